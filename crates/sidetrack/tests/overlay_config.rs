//! `[overlay]` and the keys of rules about it: what is accepted, what is refused and in which words.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use sidetrack::config::Config;
use std::process::Command;
use tempfile::TempDir;

/// A folder with the keys of two nodes.
struct Nodes {
    folder: TempDir,
    /// What every file of `here` has.
    overlay: String,
}

impl Nodes {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let key = |name: &str| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
            let made = command.args(["overlay", "key", name]).current_dir(&folder).output().unwrap();
            String::from_utf8(made.stdout).unwrap().trim().to_owned()
        };
        let overlay = format!(
            "[overlay]\nname = 'here'\nkey_file = 'here'\nlisten = '127.0.0.1:8100'\n[overlay.node.here]\nkey = '{}'\n\
             [overlay.node.far]\nkey = '{}'\n",
            key("here"),
            key("far")
        );
        Self { folder, overlay }
    }

    /// Reads a file with these keys and tables before `[overlay]`, and these tables after it.
    fn read(&self, first: &str, tables: &str) -> Result<(), String> {
        let name = self.folder.path().join("test.toml").display().to_string();
        let text = format!("version = 1\n{first}{}{tables}", self.overlay);
        Config::from_text(&name, &text).map(drop).map_err(|error| error.render(false))
    }
}

/// Something is refused, in these words.
#[track_caller]
fn refused(read: Result<(), String>, said: &str, what: &str) {
    let words = read.expect_err(what);
    assert!(words.contains(said), "{what}{words}");
}

#[test]
fn check_says_which_services_of_packets_do_not_exist() {
    let nodes = Nodes::new();
    let packets = "[[overlay.packets]]\nnode = 'far'\nto = '10.2.0.0/24'\n";
    let read = |keys: &str| nodes.read("", &format!("{packets}{keys}"));
    let best = "link = 'best-effort'\n";
    for good in [
        "dissemination = 'duplicate'\npaths = 5\n",
        "dissemination = 'flood'\nhops = 15\ndeadline_ms = 10000\n",
        "dissemination = 'shortest'\n",
        "dissemination = 'graph'\ndeadline_ms = 65\n",
        "trust = 'intrusion-tolerant'\npriority = 10\n",
        "trust = 'members'\n[[overlay.topology]]\nends = ['here', 'far']\nleast_us = 2500\n",
    ] {
        assert_eq!(read(&format!("{best}{good}")), Ok(()), "{good}");
    }
    let reliable = "trust = 'intrusion-tolerant'\ndissemination = 'flood'\n";
    assert_eq!(read(reliable), Ok(()));
    let real_time = "link = 'real-time'\ndeadline_ms = 65\n";
    for more in ["", "dissemination = 'duplicate'\npaths = 3\n"] {
        assert_eq!(read(&format!("{real_time}{more}")), Ok(()), "{more}");
    }
    for (bad, said) in [
        ("dissemination = 'duplicate'\n", "packets on reliable links take the shortest path only"),
        ("link = 'best-effort'\ndissemination = 'duplicate'\npaths = 6\n", "`paths` cannot be 6"),
        ("link = 'best-effort'\ndissemination = 'duplicate'\npaths = 1\n", "`paths` cannot be 1"),
        ("link = 'best-effort'\npaths = 2\n", "`paths` has no meaning with this dissemination"),
        ("link = 'best-effort'\ndissemination = 'flood'\nhops = 0\n", "`hops` cannot be 0"),
        ("link = 'best-effort'\ndissemination = 'duplicate'\nhops = 2\n", "`hops` has no meaning"),
        ("link = 'best-effort'\ndeadline_ms = 65\n", "`deadline_ms` has no meaning"),
        ("link = 'best-effort'\ndissemination = 'broadcast'\n", "broadcast"),
        ("link = 'real-time'\n", "packets on real-time links need a `deadline_ms`"),
        ("link = 'real-time'\ndeadline_ms = 0\n", "`deadline_ms` cannot be 0"),
        ("trust = 'intrusion-tolerant'\n", "reliable packets among members that lie are flooded"),
        ("trust = 'intrusion-tolerant'\ndissemination = 'duplicate'\n", "members that lie are flooded"),
        ("trust = 'intrusion-tolerant'\ndissemination = 'flood'\nhops = 3\n", "`hops` has no meaning"),
        (
            "trust = 'intrusion-tolerant'\ndissemination = 'flood'\npriority = 3\n",
            "`priority` has no meaning",
        ),
        ("trust = 'intrusion-tolerant'\ndissemination = 'flood'\ndeadline_ms = 65\n", "`deadline_ms` has no"),
        (
            "link = 'real-time'\ndeadline_ms = 65\ntrust = 'intrusion-tolerant'\n",
            "intrusion-tolerant packets do not travel over real-time links",
        ),
        ("link = 'best-effort'\npriority = 3\n", "`priority` has no meaning with this trust"),
        ("link = 'best-effort'\ntrust = 'intrusion-tolerant'\npriority = 11\n", "`priority` cannot be 11"),
        ("[[overlay.topology]]\nends = ['here']\n", "a link has two ends"),
        ("[[overlay.topology]]\nends = ['here', 'here']\n", "the two ends of a link are the same node"),
        ("[[overlay.topology]]\nends = ['here', 'elsewhere']\n", "the overlay has no node 'elsewhere'"),
        ("[[overlay.topology]]\nends = ['here', 'far']\nleast_us = 0\n", "`least_us` cannot be 0"),
    ] {
        refused(read(bad), said, bad);
    }
}

#[test]
fn check_says_which_rules_for_datagrams_can_be_intrusion_tolerant() {
    let nodes = Nodes::new();
    let tolerant = "trust = 'intrusion-tolerant'\n";
    let read = |matcher: &str, keys: &str| {
        let rule = format!("[[rule]]\nname = 'r'\nmatch = {{ {matcher} }}\ncarrier = 'overlay:far'\n{keys}");
        nodes.read(&format!("default = 'deny'\n{rule}"), "")
    };
    let udp = "protocol = 'udp'";
    for good in
        ["", "dissemination = 'duplicate'\npriority = 9\n", "link = 'reliable'\ndissemination = 'flood'\n"]
    {
        assert_eq!(read(udp, &format!("{tolerant}{good}")), Ok(()), "{good}");
    }
    for (matcher, bad, said) in [
        ("protocol = 'tcp'", tolerant.to_owned(), "this value of `trust` is for datagrams only"),
        (udp, "priority = 3\n".to_owned(), "`priority` has no meaning with this trust"),
        (udp, format!("{tolerant}link = 'reliable'\n"), "members that lie are flooded"),
        (
            udp,
            format!("{tolerant}link = 'reliable'\ndissemination = 'flood'\nhops = 3\n"),
            "`hops` has no meaning",
        ),
        (
            udp,
            format!("{tolerant}link = 'real-time'\ndeadline_ms = 65\n"),
            "do not travel over real-time links",
        ),
        (udp, format!("{tolerant}priority = 11\n"), "`priority` cannot be 11"),
    ] {
        refused(read(matcher, &bad), said, &bad);
    }
}

#[test]
fn check_says_what_a_link_without_congestion_control_needs() {
    let nodes = Nodes::new();
    let read = |link: &str| nodes.read("", link);
    let link = |more: &str| format!("[[overlay.link]]\nbetween = ['here', 'far']\n{more}");
    for good in [
        "rate = '200Mbit/s'\nbought = true\n",
        "rate = '1.5 Gbit/s'\n",
        "rate = '64kbit/s'\nbought = false\n",
    ] {
        assert_eq!(read(&link(good)), Ok(()), "{good}");
    }
    for (bad, said) in [
        (
            link("bought = true\n"),
            "a bought link without a rate: without congestion control, nothing else limits",
        ),
        (link(""), "this link has no rate"),
        (link("rate = '200'\n"), "\"200\" is not a rate"),
        (link("rate = '1kbit/s'\n"), "from \"64kbit/s\" to \"100Gbit/s\""),
        ("[[overlay.link]]\nrate = '1Mbit/s'\n".to_owned(), "does not say which link it is about"),
        (link("rate = '1Mbit/s'\n").replace("'far'", "'fra'"), "the overlay has no node 'fra'"),
        (link("rate = '1Mbit/s'\n").replace("'far'", "'here'"), "a link is between two different nodes"),
        (link("rate = '1Mbit/s'\n").repeat(2), "a second rate for the link between 'here' and 'far'"),
    ] {
        refused(read(&bad), said, &bad);
    }
}
