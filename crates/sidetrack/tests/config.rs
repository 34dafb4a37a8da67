//! The configuration: what a good file becomes, and every error message with its carets.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use sidetrack::config::{AdminAt, Config, ConfigError, OnCrash, RecordTo, SecretFile, Surroundings};
use sidetrack_core::policy::{Action, Warm};
use std::io;
use std::path::{Path, PathBuf};

#[path = "config/dns.rs"]
mod dns;
#[path = "config/export.rs"]
mod export;
#[path = "config/http3.rs"]
mod http3;
#[path = "config/zones.rs"]
mod zones;

/// A machine with two users and two files.
struct Machine;

impl Surroundings for Machine {
    fn uid_of(&self, name: &str) -> Option<u32> {
        [("root", 0), ("etl", 1001)].iter().find(|(user, _)| *user == name).map(|(_, uid)| *uid)
    }

    fn interface_index(&self, name: &str) -> Option<u32> {
        ["eth0", "eth1"].iter().position(|one| *one == name).map(|at| at as u32 + 7)
    }

    fn secret_file(&self, path: &str) -> io::Result<SecretFile> {
        match path {
            "gw.pass" => Ok(SecretFile { text: "ops:from-file\n".to_owned(), world_readable: false }),
            "headers" => {
                Ok(SecretFile { text: "# ours\nA: hunter2\nb:c\n\n".to_owned(), world_readable: false })
            }
            "open.pass" => Ok(SecretFile { text: "hunter2\n".to_owned(), world_readable: true }),
            _ => Err(io::Error::new(io::ErrorKind::NotFound, "No such file or directory (os error 2)")),
        }
    }

    fn resolve(&self, path: &str) -> PathBuf {
        Path::new("/etc/sidetrack").join(path)
    }
}

fn load(text: &str) -> Result<Config, String> {
    Config::from_text_in("sidetrack.toml", text, &Machine).map_err(|error| error.render(false))
}

const FULL: &str = r#"
version = 1
workers = 2
on_crash = "closed"
default = "deny"

[admin]
socket = "run/admin.sock"
metrics = "127.0.0.1:9465"

[record]
to = "./flows.jsonl"
recent = 10

[limits]
max_flows = 1000
max_flows_per_client = 50
idle_timeout_ms = 60000
lifetime_ms = 3600000
connect_timeout_ms = 5000
handshake_timeout_ms = 4000
first_bytes_ms = 50
buffer_bytes = 16384

[set]
research = ["10.20.0.0/16", "fd20::/16"]

[[listen]]
kind = "socks"
address = ["127.0.0.1:1080", "[::1]:1080"]
accept_proxy_protocol = "10.0.0.0/8"
users = [{ user = "ann", password = "secret" }, { user = "bob", password_file = "open.pass" }]
dialect = "draft"

[[listen]]
name = "web"
kind = "reverse"
address = "*:8080"
names = { "a.example" = "10.0.0.2:443", "*.b.example" = "10.0.0.3:443", "*.c.b.example" = "10.0.0.4:443" }
default = "fallback.example:443"

[[listen]]
name = "db"
kind = "reverse"
address = "127.0.0.1:5432"
to = "10.0.0.9:5432"

[[listen]]
kind = "redirect"
forwarded = true
interfaces = "eth1"
dst = ["@research", "203.0.113.0/24"]
except = "203.0.113.7"
ports = [22, "5000-5010"]
users = ["etl", 1002]
cgroup = "/system.slice/vendor.service"

[[listen]]
kind = "tproxy"
interfaces = ["eth2"]

[[rule]]
name = "ehr"
match = { from = "10.1.0.0/16", to = "@research", port = 5432, listener = ["redirect", "tproxy"], intercept = "redirect", process = "etl", user = "etl" }
carrier = ["socks5://a:p%40ss@gw:1080", "socks6://b:1081"]
resolve = "local"
metadata = { 1000 = "x", 7 = "y" }
initial_data_wait_ms = 20

[[rule]]
name = "named"
match = { host = ["*.example.nl", "example.nl"], socks_user = "ann" }
carrier = "socks5://gw"
credentials_file = "gw.pass"
dial = "name"

[[rule]]
name = "moved"
match = { port = ["1000-2000", 3000] }
carrier = "direct"
to = "10.9.9.9:99"
keep_client_address = true
proxy_protocol = 2
idle_timeout_ms = 1
lifetime_ms = 2
connect_timeout_ms = 3
tfo = true
mptcp = true
kernel = "never"

[[rule]]
name = "no-telnet"
match = { port = 23 }
action = "deny"

[[test]]
flow = { src = "10.1.0.5", dst = "10.20.3.4:5432", listener = "redirect", process = "etl", user = "etl" }
expect = { rule = "ehr", carrier = ["socks5://gw:1080", "socks6://b:1081"] }

[[test]]
flow = { dst = "192.0.2.1:443", listener = "socks", host = "www.example.nl", socks_user = "ann" }
expect = { rule = "named", action = "carry" }

[[test]]
flow = { listener = "db" }
expect = { rule = "default", action = "deny" }
"#;

#[test]
fn a_full_file_becomes_what_it_says() {
    let config = load(FULL).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((config.version, config.workers, config.on_crash), (1, 2, OnCrash::Closed));
    assert_eq!(config.admin.socket, AdminAt::Path("/etc/sidetrack/run/admin.sock".into()));
    assert_eq!(config.admin.metrics, Some("127.0.0.1:9465".parse().unwrap()));
    assert_eq!(config.record.to, RecordTo::File("/etc/sidetrack/./flows.jsonl".into()));
    assert_eq!(config.record.recent, 10);
    insta::assert_debug_snapshot!("full_limits", config.limits);
    let names: Vec<_> = config.listeners.iter().map(|listener| &*listener.name).collect();
    assert_eq!(names, ["socks", "web", "db", "redirect", "tproxy"]);
    insta::assert_debug_snapshot!("full_listeners", config.listeners);
    insta::assert_debug_snapshot!("full_policy", config.policy);
    assert_eq!(config.tests.len(), 3);
    let warnings: Vec<_> = config.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings, ["every user of this machine can read 'open.pass'"]);
}

/// Renders what is said about each text; `version = 1` is put before each.
fn said(cases: &[&str]) -> String {
    let one = |case: &&str| {
        let text = format!("version = 1\n{case}\n");
        match Config::from_text_in("sidetrack.toml", &text, &Machine) {
            Ok(config) if config.warnings.is_empty() => panic!("this is right, but should not be:\n{text}"),
            Ok(config) => ConfigError::of_warnings("sidetrack.toml", &text, &config.warnings).render(false),
            Err(error) => error.render(false),
        }
    };
    let said = cases.iter().map(one).collect::<Vec<_>>().join("----\n");
    for secret in SECRETS {
        assert!(!said.contains(secret), "{secret} shows:\n{said}");
    }
    said
}

/// What must never be shown.
const SECRETS: [&str; 5] = ["topsecret", "othersecret", "123456", "p%40ss", "hunter2"];

/// A snapshot without the cases, which stand in it anyway.
fn snapshot(name: &str, said: &str) {
    insta::with_settings!({ omit_expression => true }, { insta::assert_snapshot!(name, said) });
}

const SOCKS: &str = "[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:1080\"\n";

#[test]
fn errors_of_shape() {
    snapshot(
        "errors_of_shape",
        &said(&[
            "workers = ",
            "workers = 1\nworkers = 2",
            "wrokers = 1",
            "workers = \"four\"",
            "workers = -1",
            "on_crash = \"opn\"",
            "[[listen]]\nkind = \"shocks\"",
            "[[listen]]\nadress = \"127.0.0.1:1\"\nkind = \"socks\"",
            "[[rule]]\nname = \"a\"\ncarrier = \"direct\"\ndefault = \"deny\"",
            "[limits]\nidle_timeout = 5",
            "[[rule]]\nname = \"a\"\nmatch = { dst = \"10.0.0.1\" }\naction = \"drop\"",
            "listen = 5",
            "[[rule]]\nname = 5\nmatch = { port = [22, true] }",
            "[[listen]]\nkind = \"socks\"\nusers = [{ usr = \"ann\", password = \"topsecret\" }, 1.5]",
            "[[listen]]\nkind = \"socks\"\nusers = [{ user = \"ann\", password = 123456 }]",
            "workers 5",
        ]),
    );
}

#[test]
fn a_bad_key_hides_no_other_error_and_makes_none() {
    let text = "version = 1
defalt = \"deny\"
workers = 5000
[admin]
sockt = \"/run/x\"
metrics = \"nowhere\"
[[listen]]
kind = \"socks\"
adress = \"127.0.0.1:1080\"
[[listen]]
kind = \"reverse\"
address = \"127.0.0.1:99999\"
to = \"127.0.0.1:80\"
[[rule]]
name = \"a\"
carier = \"direct\"
idle_timeout_ms = 0
[[rule]]
name = \"b\"
match = { hst = \"x\", port = 70000 }
action = \"deny\"
[[test]]
flow = { dst = \"192.0.2.1:80\" }
expect = { action = \"deny\" }
";
    let error = Config::from_text("sidetrack.toml", text).unwrap_err();
    let wrong: Vec<_> = error.problems().iter().filter_map(|problem| error.line_column(problem)).collect();
    let lines: Vec<_> = wrong.iter().map(|(line, _)| *line).collect();
    // Nothing is said to be missing where a key was misspelt, and no decision test of half a file is made.
    assert_eq!(lines, [2, 3, 5, 6, 9, 12, 16, 17, 20, 20], "{}", error.render(false));
}

#[test]
fn several_errors_in_one_go() {
    snapshot(
        "several_errors_in_one_go",
        &said(&[
            "wrokers = 1\n[[listen]]\nkind = \"shocks\"\nadress = \"x\"\n[[rule]]\nnam = \"a\"\nmatch = { prot = 1, too = 2 }",
            "default = \"deny\"\n[[listen]]\nkind = \"socks\"\naddress = \"localhost\"\n[[rule]]\nname = \"a b\"\nmatch = { to = \"10.0.0.300\", port = 70000 }\ncarrier = \"gw:1080\"",
        ]),
    );
}

#[test]
fn errors_of_top_level_values() {
    snapshot(
        "errors_of_top_level_values",
        &said(&[
            "[[rule]]\nname = \"a\"\naction = \"deny\"",
            "workers = 5000",
            "[limits]\nfirst_bytes_ms = 500\nbuffer_bytes = 1\nidle_timeout_ms = 0\nmax_flows = 0",
            "[record]\nto = \"stdot\"\nrecent = 5000000",
            "[admin]\nsocket = \"nome\"\nmetrics = \"9465\"",
            "[admin]\npage_tokens = \"tokens\"\npage_hosts = \"node.example:443\"",
            "[admin.orchestrator]\naddress = [\"here\", \":1\", \"[::1]:7000\"]\nidentity = \"a.pem\"\nca = \"ca.pem\"",
            "[admin]\norchestrator = { address = \"one.example:7000\" }",
            "[set]\nlab = []\nall = [\"@lab\"]\nbad = \"10.0.0.1/8\"",
        ]),
    );
    for text in ["", "version = 2"] {
        let error =
            Config::from_text_in("sidetrack.toml", text, &Machine).map_err(|error| error.render(false));
        snapshot(&format!("version_{}", text.len()), &error.unwrap_err());
    }
}

#[test]
fn errors_of_listeners() {
    snapshot(
        "errors_of_listeners",
        &said(&[
            "[[listen]]\naddress = \"127.0.0.1:1\"",
            "[[listen]]\nkind = \"socks\"",
            "[[listen]]\nkind = \"socks\"\naddress = [\"example.nl:80\", \"127.0.0.1\", \"[::1]:99999\"]",
            "[[listen]]\nkind = \"socks\"\naddress = []",
            &format!("{SOCKS}{SOCKS}"),
            "[[listen]]\nkind = \"socks\"\naddress = \"*:1080\"\n[[listen]]\nname = \"two\"\nkind = \"reverse\"\naddress = \"127.0.0.1:1080\"\nto = \"10.0.0.1:80\"",
            &format!("{SOCKS}to = \"10.0.0.1:80\"\nlocal = true\nports = 80"),
            &format!("{SOCKS}versions = [4, 5]"),
            &format!("{SOCKS}versions = 5\ndialect = \"draft\""),
            &format!(
                "{SOCKS}users = [\"ann\", {{ user = \"bob\" }}, {{ user = \"eve\", password = \"topsecret\", password_file = \"gw.pass\" }}]"
            ),
            &format!(
                "{SOCKS}users = [{{ user = \"ann\", password = \"topsecret\" }}, {{ user = \"ann\", password = \"othersecret\" }}]"
            ),
            &format!("{SOCKS}users = {{ user = \"ann\", password = \"\" }}"),
            &format!("{SOCKS}users = {{ user = \"ann\", password_file = \"missing.pass\" }}"),
            &format!("{SOCKS}users = {{ user = \"ann\", password_file = \"open.pass\" }}"),
            &format!("{SOCKS}users = {{ user = \"ann\", password = 123456 }}"),
            &format!("{SOCKS}accept_proxy_protocol = \"@lb\""),
            &format!("{SOCKS}name = \"\""),
        ]),
    );
}

#[test]
fn errors_of_reverse_listeners() {
    let reverse = "[[listen]]\nkind = \"reverse\"\naddress = \"127.0.0.1:80\"\n";
    snapshot(
        "errors_of_reverse_listeners",
        &said(&[
            reverse,
            &format!("{reverse}to = \"10.0.0.1\""),
            &format!("{reverse}to = \"10.0.0.1:80\"\nnames = {{ \"a.example\" = \"10.0.0.2:80\" }}"),
            &format!("{reverse}to = \"10.0.0.1:80\"\ndefault = \"10.0.0.2:80\""),
            &format!(
                "{reverse}names = {{ \"a*.example\" = \"10.0.0.2:80\", \"b.example\" = \"10.0.0.2:0\" }}"
            ),
            &format!("{reverse}to = \"127.0.0.1:80\""),
            &format!("{reverse}names = {{ \"a.example\" = \"localhost:80\" }}"),
        ]),
    );
}

#[test]
fn errors_of_captures() {
    let redirect = "[[listen]]\nkind = \"redirect\"\n";
    snapshot(
        "errors_of_captures",
        &said(&[
            redirect,
            "[[listen]]\nkind = \"tproxy\"",
            "[[listen]]\nkind = \"tproxy\"\nports = 80\nusers = \"etl\"\ncgroup = \"x\"",
            &format!("{redirect}local = false\nports = 80"),
            &format!("{redirect}local = false\nforwarded = true\nusers = \"etl\""),
            &format!("{redirect}interfaces = \"eth0\""),
            &format!("{redirect}forwarded = true\ninterfaces = [\"eth0/1\", \"a-name-far-too-long\"]"),
            &format!("{redirect}users = [\"nobody-here\", {{ user = \"etl\" }}]"),
            &format!("{redirect}ports = [0, \"90-80\", \"http\", 70000]"),
            &format!("{redirect}dst = []"),
            &format!(
                "[set]\nresearch = \"10.0.0.0/8\"\n{redirect}dst = [\"@reserch\", \"research\", \"www.example.nl\", \"10.0.0.0/33\"]"
            ),
        ]),
    );
}

#[test]
fn errors_of_rules() {
    let rule = |rest: &str| format!("default = \"deny\"\n{SOCKS}[[rule]]\nname = \"a\"\n{rest}");
    snapshot(
        "errors_of_rules",
        &said(&[
            &rule("name = \"b\""),
            "default = \"deny\"\n[[rule]]\naction = \"deny\"",
            &rule(""),
            &rule("action = \"deny\"\ncarrier = \"direct\""),
            &rule("action = \"deny\"\ntfo = true\nto = \"10.0.0.1:80\""),
            &rule("action = \"deny\"\n[[rule]]\nname = \"a\"\ncarrier = \"direct\""),
            "default = \"deny\"\n[[rule]]\nname = \"default\"\naction = \"deny\"",
            &rule(
                "match = { listener = [\"sock\", \"zzz\"], process = \"/usr/bin/curl\", user = \"nobody-here\" }\naction = \"deny\"",
            ),
            &rule(
                "match = { host = [\"10.0.0.1\", \"a*b\"], intercept = [], socks_user = [] }\naction = \"deny\"",
            ),
            &rule("match = { to = \"www.example.nl\" }\naction = \"deny\""),
            &rule(
                "action = \"deny\"\nmatch = { port = 80 }\n[[rule]]\nname = \"c\"\nmatch = { port = [80], host = \"x.example\" }\ncarrier = \"direct\"",
            ),
        ]),
    );
}

#[test]
fn errors_of_carriers() {
    let rule = |rest: &str| format!("default = \"deny\"\n{SOCKS}[[rule]]\nname = \"a\"\n{rest}");
    snapshot(
        "errors_of_carriers",
        &said(&[
            &rule("carrier = \"gw:1080\""),
            &rule("carrier = \"sock5://gw:1080\""),
            &rule("carrier = [\"direct\", \"socks5://gw\"]"),
            &rule("carrier = []"),
            &rule("carrier = \"socks5://ann:topsecret@gw:port\""),
            &rule("carrier = \"ann:topsecret@gw\""),
            &rule("carrier = \"socks5://gw?fast=true\""),
            &rule("carrier = [\"socks5://gw\", \"socks5://gw2?tfo=true\"]"),
            &rule("carrier = \"socks5://127.0.0.1:1080\""),
            &rule("carrier = \"direct\"\nto = \"localhost:1080\""),
            &rule(
                "carrier = \"direct\"\nto = \"nowhere\"\nresolve = \"local\"\ninitial_data_wait_ms = 10\nmetadata = { 1 = \"x\" }",
            ),
            &rule(
                "carrier = \"socks5://gw\"\nkeep_client_address = true\ntfo = true\nmptcp = true\nproxy_protocol = 3",
            ),
            &rule(
                "carrier = \"socks6://gw\"\nmetadata = { key = \"x\", 70000 = \"y\" }\ninitial_data_wait_ms = 1000",
            ),
            &rule("carrier = \"direct\"\ncredentials_file = \"gw.pass\""),
            &rule("carrier = [\"socks5://gw\", \"socks5://gw2\"]\ncredentials_file = \"gw.pass\""),
            &rule("carrier = \"socks5://gw\"\ncredentials_file = \"open.pass\""),
            &rule("carrier = \"direct\"\nidle_timeout_ms = 0"),
        ]),
    );
}

#[test]
fn errors_of_warm_connections() {
    let rule = |rest: &str| format!("default = \"deny\"\n{SOCKS}[[rule]]\nname = \"a\"\n{rest}");
    snapshot(
        "errors_of_warm_connections",
        &said(&[
            &rule("carrier = \"direct\"\nwarm = 65\nwarm_idle_ms = 99"),
            &rule("carrier = \"socks5://gw\"\nwarm = 2"),
            &rule("carrier = \"direct\"\nwarm = 2\nkeep_client_address = true\nproxy_protocol = 2"),
            &rule("carrier = \"direct\"\nwarm_idle_ms = 5000"),
            &rule("action = \"deny\"\nwarm = 2"),
        ]),
    );
}

#[test]
fn warm_connections_are_what_the_rule_says() {
    let warm = |rest: &str| {
        let text = format!(
            "version = 1\ndefault = \"deny\"\n{SOCKS}[[rule]]\nname = \"a\"\ncarrier = \"direct\"\n{rest}"
        );
        let config = load(&text).unwrap_or_else(|error| panic!("{error}"));
        match &config.policy.rules()[0].action {
            Action::Carry(carry) => carry.warm,
            Action::Deny => panic!("it carries"),
        }
    };
    assert_eq!(warm(""), None);
    assert_eq!(warm("warm = 0\nkeep_client_address = true"), None);
    assert_eq!(warm("warm = 3"), Some(Warm { ready: 3, idle_ms: Warm::IDLE_MS }));
    assert_eq!(warm("warm = 64\nwarm_idle_ms = 600000"), Some(Warm { ready: 64, idle_ms: 600_000 }));
}

#[test]
fn errors_of_tests() {
    let test = |rest: &str| {
        format!(
            "default = \"deny\"\n{SOCKS}[[rule]]\nname = \"web\"\nmatch = {{ port = 80, host = \"*.example\" }}\ncarrier = \"socks5://gw\"\n[[test]]\n{rest}"
        )
    };
    snapshot(
        "errors_of_tests",
        &said(&[
            &test("flow = { dst = \"10.0.0.1:80\" }"),
            &test("flow = { dst = \"10.0.0.1:80\" }\nexpect = {}"),
            &test("flow = { src = \"x\" }\nexpect = { rule = \"wbe\" }"),
            &test(
                "flow = { dst = \"10.0.0.1:80\", listener = \"sox\", host = \"\" }\nexpect = { rule = \"web\" }",
            ),
            &test("flow = {}\nexpect = { action = \"deny\" }"),
            &test("flow = { dst = \"10.0.0.1:80\", host = \"a.test\" }\nexpect = { rule = \"web\" }"),
            &test(
                "flow = { dst = \"10.0.0.1:80\", host = \"a.example\" }\nexpect = { carrier = \"direct\" }",
            ),
            &test("flow = { dst = \"10.0.0.1:81\" }\nexpect = { action = \"carry\" }"),
        ]),
    );
}

#[test]
fn a_file_that_cannot_be_read_says_why() {
    let error = Config::load("/nonexistent/sidetrack.toml").unwrap_err();
    snapshot("a_file_that_cannot_be_read", &error.render(false));
    assert_eq!(
        error.to_string(),
        "/nonexistent/sidetrack.toml: cannot read /nonexistent/sidetrack.toml: No such file or directory (os error \
         2) (give the file with -c FILE; `sidetrack schema` tells what goes into it)"
    );
}

#[test]
fn one_line_names_the_place() {
    let error = Config::from_text_in("a.toml", "version = 1\nworkers = 5000\n", &Machine).unwrap_err();
    assert_eq!(error.to_string(), "a.toml:2:11: 5000 is out of range (use 0 to 1024 threads)");
}

#[test]
fn no_secret_is_ever_shown() {
    let full = FULL.replace("\"secret\"", "\"topsecret\"");
    let shown = |text: &str| match Config::from_text_in("a.toml", text, &Machine) {
        Ok(config) => format!("{config:?}"),
        Err(error) => format!("{}{error}", error.render(false)),
    };
    // Every line broken in turn, so that every kind of error is met near every secret.
    let lines: Vec<&str> = full.lines().collect();
    for broken in 0..=lines.len() {
        for breakage in ["???", "x = [", "password = \"topsecret", "\"password\" = othersecret"] {
            let with = |(index, line): (usize, &&str)| {
                if index == broken { format!("{line} {breakage}\n{breakage}") } else { (*line).to_owned() }
            };
            let text = lines.iter().enumerate().map(with).collect::<Vec<_>>().join("\n");
            let shown = shown(&text);
            for secret in SECRETS {
                assert!(!shown.contains(secret), "{secret} shows with line {broken} broken:\n{shown}");
            }
        }
    }
}

#[test]
fn two_engines_by_xdp_cannot_share_an_interface() {
    let engine = |name: &str, port: u16, io: &str, interfaces: &str| {
        format!(
            "[[listen]]\nkind = \"engine\"\nname = \"{name}\"\naddress = \"192.0.2.1:{port}\"\ninterfaces = {interfaces}\nto = \
             \"192.0.2.9:80\"\nengine = {{ io = \"{io}\" }}\n"
        )
    };
    let check = |second: String| {
        let first = engine("one", 80, "xdp", "[\"eth0\", \"eth1\"]");
        Config::from_text("t.toml", &format!("version = 1\ndefault = \"direct\"\n{first}{second}"))
    };
    let error = check(engine("two", 81, "xdp", "[\"eth1\"]")).expect_err("eth1 is taken").to_string();
    for said in ["eth1 is taken: listener 'one' has it", "io = \"packet\""] {
        assert!(error.contains(said), "{error}");
    }
    check(engine("two", 81, "packet", "[\"eth1\"]")).expect("packet sockets share it");
    check(engine("two", 81, "xdp", "[\"eth2\"]")).expect("another interface");
}

#[test]
fn multipath_goes_with_listeners_that_clients_dial() {
    let load = |kind: &str, mptcp: &str| {
        let more = match kind {
            "reverse" => "to = \"10.0.0.1:80\"\n",
            "redirect" | "tproxy" => "ports = 80\n",
            _ => "",
        };
        let address = if kind == "tproxy" { "*:15001" } else { "127.0.0.1:1080" };
        let listen = format!("[[listen]]\nkind = \"{kind}\"\naddress = \"{address}\"\n{more}{mptcp}");
        Config::from_text_in("t.toml", &format!("version = 1\ndefault = \"direct\"\n{listen}"), &Machine)
    };
    for kind in ["socks", "http", "reverse"] {
        for (key, accepted) in [("mptcp = true\n", true), ("mptcp = false\n", false)] {
            let config = load(kind, key).unwrap_or_else(|error| panic!("{}", error.render(false)));
            assert_eq!(config.listeners[0].mptcp, accepted, "{kind}, {key}");
        }
    }
    for kind in ["redirect", "tproxy"] {
        load(kind, "mptcp = false\n").unwrap_or_else(|error| panic!("{}", error.render(false)));
        let error = load(kind, "mptcp = true\n").expect_err("its clients dial other hosts").render(false);
        assert!(error.contains("`mptcp` goes only with the kinds socks, http and reverse"), "{error}");
    }
}
