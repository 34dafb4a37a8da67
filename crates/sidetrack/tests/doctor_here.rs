//! `sidetrack doctor` on the machine at hand. Without a test harness: looking starts a command, and that is for
//! processes with one thread only.

use sidetrack::cli::doctor::report;
use sidetrack::doctor::{Facts, Isolation, Level, Nftables, examine};

fn main() {
    let facts = Facts::gather();
    println!("{}", report(&facts, false).out);
    assert!(facts.nofile.0 > 0 && facts.nofile.0 <= facts.nofile.1, "{:?}", facts.nofile);
    assert!(
        facts.settings.contains_key("net/core/somaxconn") || facts.settings.is_empty(),
        "{:?}",
        facts.settings
    );
    // Root without the right to look, or an ordinary user with it, would be a fault of ours.
    assert_eq!(facts.net_admin, !matches!(facts.nftables, Nftables::NotAllowed), "{:?}", facts.nftables);
    let checks = examine(&facts);
    for check in &checks {
        let complete = !check.name.is_empty() && !check.found.is_empty() && !check.needed_for.is_empty();
        assert!(complete, "{check:?}");
    }
    let run = checks.iter().find(|check| check.name == "run without root").expect("it is looked at");
    assert_eq!(run.level == Level::Ok, matches!(facts.isolation, Isolation::Works(_)), "{run:?}");
    let json: serde_json::Value = serde_json::from_str(&report(&facts, true).out).expect("JSON");
    assert_eq!(json["checks"].as_array().map(Vec::len), Some(checks.len()));
    println!("doctor_here: ok");
}
