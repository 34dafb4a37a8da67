//! Lists of hosts: no text panics, the order of lines means nothing, and one more line says what it says of a host. The last
//! line of the input is the host.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::flow::HostName;
use sidetrack_core::policy::HostList;

fuzz_target!(|data: &[u8]| {
    let end = data.iter().rposition(|byte| *byte == b'\n').unwrap_or(data.len());
    let (text, host) = data.split_at(end);
    let list = HostList::parse(text);
    let Ok(host) = HostName::from_bytes(host.strip_prefix(b"\n").unwrap_or_default()) else { return };
    let is_meant = list.contains(&host);
    let backwards: Vec<&[u8]> = text.split(|byte| *byte == b'\n').rev().collect();
    let backwards = HostList::parse(&backwards.join(&b'\n'));
    assert_eq!((backwards.contains(&host), backwards.len()), (is_meant, list.len()));
    let with = |line: String| {
        let longer = HostList::parse(&[text, b"\n", line.as_bytes()].concat());
        // Not every host name is one that such a line can name.
        (longer.skipped() == list.skipped() && longer.len() >= list.len().max(1)).then_some(longer)
    };
    if let Some(never) = with(format!("@@||{host}^")) {
        assert!(!never.contains(&host));
    }
    if let Some(more) = with(format!("||{host}^"))
        && !text.windows(2).any(|pair| pair == b"@@")
    {
        assert!(more.contains(&host));
    }
});
