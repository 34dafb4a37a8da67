//! The page's address.

use super::{Check, Facts};

const NAME: &str = "page";

pub(super) fn examine(facts: &Facts) -> Vec<Check> {
    let Some(address) = facts.page else { return Vec::new() };
    let needed_for = "the page: a token that is sent without TLS can be read on the way";
    if address.ip().to_canonical().is_loopback() {
        let found = format!("{address} is reached from this host alone, or by ssh -L");
        return vec![Check::ok(NAME, found).needed_for(needed_for)];
    }
    let found = format!("{address} can be reached from the network, and the page itself has no TLS");
    let fix = "[admin] page = \"127.0.0.1:9466\", and a proxy with TLS or ssh -L before it (docs/page.md)";
    vec![Check::warn(NAME, found).needed_for(needed_for).fix(fix)]
}
