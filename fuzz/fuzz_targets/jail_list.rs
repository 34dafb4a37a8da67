//! Lists of a jail: no text panics, what is accepted is written so that it is read again, and the rules do not depend on how often
//! an entry stands.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::jail::{Entry, Jail, Lists};

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(entry) = text.parse::<Entry>() {
        assert_eq!(entry.to_string().parse::<Entry>().as_ref(), Ok(&entry));
    }
    let mut listed = Lists::default();
    let _ = listed.allow(text);
    let mut lists = Lists::default();
    if lists.profile(text).is_err() {
        return;
    }
    let mut twice = lists.clone();
    twice.profile(text).unwrap_or_default();
    let rules = |lists: Lists| Jail { lists, closed: true, ..Jail::default() }.policy().rules().len();
    assert_eq!(rules(lists), rules(twice));
});
