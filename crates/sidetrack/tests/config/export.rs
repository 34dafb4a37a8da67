//! `[export]`: what it says, mistakes in it, and that a reload does not change it.

use crate::load;
use sidetrack::config::{Config, waiting_for_restart};
use sidetrack_core::flow::Protocol;
use std::time::Duration;

fn read(keys: &str) -> Result<Config, String> {
    load(&format!("version = 1\n{keys}"))
}

#[test]
fn a_collector_has_defaults() {
    let config = read("[export.ipfix]\ncollector = \"flows.example:4739\"\n").unwrap();
    let ipfix = config.export.ipfix.clone().expect("a collector");
    let minute = Duration::from_secs(60);
    assert_eq!((ipfix.collector.to_string(), ipfix.transport), ("flows.example:4739".into(), Protocol::Udp));
    assert_eq!(
        (ipfix.refresh, ipfix.active, ipfix.domain, ipfix.enterprise),
        (minute, Some(minute), 1, None)
    );
    let other =
        read("[export.ipfix]\ncollector = \"[2001:db8::1]:1\"\ntransport = \"tcp\"\nactive_timeout_ms = 0\n")
            .unwrap();
    assert_eq!(other.export.ipfix.as_ref().map(|ipfix| ipfix.active), Some(None));
    let waiting = waiting_for_restart(&config, &other).join("\n");
    assert!(waiting.contains("[export.ipfix]: flows.example:4739 (udp, domain 1"), "{waiting}");
    assert_eq!(waiting_for_restart(&config, &config), Vec::<String>::new());
}

#[test]
fn mistakes_are_told() {
    let at = "collector = \"192.0.2.1:4739\"\n";
    for (keys, said) in [
        ("domain = 1\n".to_owned(), "unknown"),
        (String::new(), "[export.ipfix] has no `collector`"),
        ("collector = \"flows.example\"\n".into(), "lacks a port"),
        (format!("{at}transport = \"sctp\"\n"), "is none of the words allowed here"),
        (format!("{at}template_refresh_ms = 999\n"), "999 is out of range"),
        (format!("{at}transport = \"tcp\"\ntemplate_refresh_ms = 1000\n"), "has no meaning with transport"),
        (format!("{at}active_timeout_ms = 5\n"), "use 1000 to 86400000 milliseconds, or 0"),
        (format!("{at}enterprise = 0\n"), "0 is out of range"),
    ] {
        let error = read(&format!("[export.ipfix]\n{keys}")).expect_err(said);
        assert!(error.contains(said), "{said}:\n{error}");
    }
}
