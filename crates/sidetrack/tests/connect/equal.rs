//! The result of `connect()` is that of a direct one: accepted, refused, unreachable in four ways, timed out, reset at once;
//! over IPv4 and IPv6; by `run`, `redirect` and `tproxy`; directly and through SOCKS5 and SOCKS6.

use crate::node::Up;
use crate::probe::{differences, differences_under_run, far_side};
use sidetrack_testkit::{Line, is_root};

/// Rounds of each test; all ways of both IP versions in each.
const ROUNDS: usize = 15;

/// A far side that answers in all ways; none without rights or tools.
fn line() -> Option<Line> {
    if !is_root() {
        return None;
    }
    let line = Line::new();
    far_side(&line).then_some(line)
}

fn rule(carrier: &str) -> String {
    format!(
        "[[rule]]\nname = \"all\"\ncarrier = \"{carrier}\"\nconnect = \"faithful\"\nkernel = \"never\"\n{NO_DRAIN}"
    )
}

/// Connections to where nothing answers do not keep the node from its end.
const NO_DRAIN: &str = "[limits]\ndrain_ms = 0\n";

/// The configuration of a proxy beside the far side, which answers there.
const PROXY: &str = "[[listen]]\nname = \"proxy\"\nkind = \"socks\"\naddress = \"10.0.2.1:1080\"\n\
                     [limits]\ndrain_ms = 0\n";

fn proxy(line: &Line) -> Up {
    line.server.run(|| Up::start("default = \"direct\"\n", PROXY))
}

#[test]
fn without_us_each_way_ends_as_the_table_says() {
    let Some(line) = line() else { return };
    assert_eq!(line.client.run(|| differences(2)), Vec::<String>::new());
}

#[test]
fn redirect_gives_what_a_direct_connection_gives() {
    let Some(line) = line() else { return };
    let tables = format!(
        "[[listen]]\nname = \"r\"\nkind = \"redirect\"\ndst = [\"10.0.2.0/24\", \"fd00:2::/64\"]\n{}",
        rule("direct")
    );
    let up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    assert_eq!(line.router.run(|| differences(ROUNDS)), Vec::<String>::new());
    assert!(up.stop().0.success());
}

#[test]
fn tproxy_gives_what_a_direct_connection_gives() {
    let Some(line) = line() else { return };
    let listen = "[[listen]]\nname = \"t\"\nkind = \"tproxy\"\ninterfaces = [\"to-client\"]\n";
    let tables = format!("{listen}{}", rule("direct"));
    let up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    assert_eq!(line.client.run(|| differences(ROUNDS)), Vec::<String>::new());
    assert!(up.stop().0.success());
}

#[test]
fn forwarded_redirect_gives_what_a_direct_connection_gives() {
    let Some(line) = line() else { return };
    let listen = "[[listen]]\nname = \"r\"\nkind = \"redirect\"\nlocal = false\nforwarded = true\n\
                  dst = [\"10.0.2.0/24\", \"fd00:2::/64\"]\n";
    let tables = format!("{listen}{}", rule("direct"));
    let up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    assert_eq!(line.client.run(|| differences(ROUNDS)), Vec::<String>::new());
    assert!(up.stop().0.success());
}

#[test]
fn run_gives_what_a_direct_connection_gives() {
    let Some(line) = line() else { return };
    // It is the default.
    let differences = line.router.run(|| differences_under_run(&[], ROUNDS));
    assert_eq!(differences, Vec::<String>::new());
    let differences = line.router.run(|| differences_under_run(&["--faithful", "--mode", "cgroup"], 2));
    assert_eq!(differences, Vec::<String>::new());
}

#[test]
fn accepted_early_on_request() {
    let Some(line) = line() else { return };
    let differences = line.router.run(|| differences_under_run(&["--early", "--quiet"], 1));
    // Connected each time. The one whose server resets at once differs in nothing.
    let connected = differences.iter().filter(|line| line.ends_with(": connected")).count();
    assert_eq!(connected, 12, "{differences:?}");
}

#[test]
fn through_socks_the_far_sides_answer_comes_back() {
    let Some(line) = line() else { return };
    let proxy = proxy(&line);
    for scheme in ["socks5", "socks6"] {
        let hop = format!("{scheme}://10.0.2.1:1080");
        let tables = format!(
            "[[listen]]\nname = \"r\"\nkind = \"redirect\"\ndst = [\"10.0.2.0/24\", \"fd00:2::/64\"]\n{}",
            rule(&hop)
        );
        let up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
        assert_eq!(line.router.run(|| differences(ROUNDS / 2)), Vec::<String>::new(), "{scheme}");
        assert!(up.stop().0.success());
        let differences =
            line.router.run(move || differences_under_run(&["--faithful", "--via", &hop], ROUNDS / 2));
        assert_eq!(differences, Vec::<String>::new(), "{scheme} under run");
    }
    assert!(proxy.stop().0.success());
}

/// Rounds of [`ROUNDS`] that make 10,000 connections.
const TEN_THOUSAND: usize = 42;

/// Asks 10,000 times and prints how many results were right.
fn ask_often(what: &str, ask: impl Fn() -> Vec<String>) {
    let wrong: Vec<String> = (0..TEN_THOUSAND).flat_map(|_| ask()).collect();
    let all = TEN_THOUSAND * ROUNDS * 16;
    println!("{what}: {} of {all}", all - wrong.len());
    assert_eq!(wrong, Vec::<String>::new(), "{what}");
}

#[test]
#[ignore = "takes minutes: 10,000 connections for each kind"]
fn ten_thousand_connections_each() {
    let Some(line) = line() else { return };
    let proxy = proxy(&line);
    for hop in ["direct", "socks5://10.0.2.1:1080", "socks6://10.0.2.1:1080"] {
        let listen =
            "[[listen]]\nname = \"r\"\nkind = \"redirect\"\ndst = [\"10.0.2.0/24\", \"fd00:2::/64\"]\n";
        let tables = format!("{listen}{}", rule(hop));
        let up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
        ask_often(&format!("redirect, {hop}"), || line.router.run(|| differences(ROUNDS)));
        assert!(up.stop().0.success());
        let listen = "[[listen]]\nname = \"t\"\nkind = \"tproxy\"\ninterfaces = [\"to-client\"]\n";
        let tables = format!("{listen}{}", rule(hop));
        let up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
        ask_often(&format!("tproxy, {hop}"), || line.client.run(|| differences(ROUNDS)));
        assert!(up.stop().0.success());
        let via = if hop == "direct" { vec![] } else { vec!["--via", hop] };
        ask_often(&format!("run, {hop}"), || {
            let via = via.clone();
            line.router.run(move || differences_under_run(&via, ROUNDS))
        });
    }
    assert!(proxy.stop().0.success());
}
