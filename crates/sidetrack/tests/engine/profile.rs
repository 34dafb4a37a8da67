//! `sidetrack profile` of a running node: stages of the engine and of sessions, and nothing before it is asked for.

use crate::node::admin;
use crate::node::peers::visit;
use crate::site::{ENGINE, Site, engine};
use serde_json::Value;
use sidetrack_testkit::{LIMIT, is_root};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The same server, through a session.
const REVERSE: &str = "10.0.1.254:81";
/// Stages that every connection passes.
const STAGES: [&str; 9] = [
    "session loop",
    "session admit",
    "session policy",
    "session dial",
    "session move",
    "engine receive",
    "engine packets",
    "engine policy",
    "engine send",
];

fn profile(site: &Site) -> Value {
    let up = site.up.as_ref().expect("started");
    serde_json::from_str(&admin::show(up, "/v1/profile")).expect("JSON")
}

/// Whether a profile has events and time of each of [`STAGES`].
fn has_all(profile: &Value) -> bool {
    let of = |name: &str| {
        let stages = profile["stages"].as_array().expect("a list");
        stages.iter().find(|stage| stage["stage"] == name).cloned().unwrap_or_default()
    };
    STAGES.iter().all(|name| {
        of(name)["events"].as_u64().is_some_and(|events| events > 0) && of(name)["busy_ns"].as_u64() > Some(0)
    })
}

#[test]
fn it_is_off_until_it_is_asked_for_and_shows_where_the_time_goes() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    let reverse =
        format!("[[listen]]\nkind = \"reverse\"\naddress = \"{REVERSE}\"\nto = \"{}\"\n", server.address);
    let rule = "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n";
    let listen = engine(&format!("to = \"{}\"", server.address));
    site.start("default = \"deny\"\n", &format!("{listen}{reverse}{rule}"));
    let visits = |site: &Site| {
        for address in [ENGINE, REVERSE] {
            site.line.client.run(move || visit(address.parse().expect("an address"), b"a word"));
        }
    };
    visits(&site);
    assert_eq!(profile(&site)["stages"].as_array().map(Vec::len), Some(0), "nothing is measured yet");
    let up = site.up.as_ref().expect("started");
    let socket = up.folder().join("admin.sock");
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.args(["profile", "--seconds", "600", "--admin"]).arg(&socket);
    let command = command.stdout(Stdio::piped()).spawn().expect("the binary");
    let begun = Instant::now();
    while !has_all(&profile(&site)) {
        assert!(begun.elapsed() < LIMIT, "{}", profile(&site));
        visits(&site);
    }
    let metrics = admin::show(up, "/metrics");
    for name in STAGES {
        assert!(
            metrics.contains(&format!("sidetrack_profile_events_total{{stage=\"{name}\"}} ")),
            "{metrics}"
        );
    }
    assert_eq!(admin::ask(up, "DELETE", "/v1/profile").0, 200);
    let output = command.wait_with_output().expect("it ends with the measurement");
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && table.starts_with("STAGE "), "{table}");
    assert!(STAGES.iter().all(|name| table.contains(name)) && table.contains(" processors\n"), "{table}");
    // Off again: the counts stand still.
    let ended = profile(&site);
    visits(&site);
    assert_eq!(profile(&site), ended);
}
