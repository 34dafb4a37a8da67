//! What `check`, `explain` and `schema` print.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use clap::{Args, Command, FromArgMatches};
use sidetrack::cli::{Printed, check, explain, plan, schema};
use std::path::{Path, PathBuf};

const GOOD: &str = r#"version = 1
default = "deny"

[[listen]]
name = "lan"
kind = "redirect"
dst = ["203.0.113.0/24", "10.0.0.0/8"]

[[listen]]
name = "web"
kind = "reverse"
address = "127.0.0.1:8080"
to = "127.0.0.1:80"

[[rule]]
name = "no-ssh"
match = { to = "203.0.113.0/24", port = 22 }
action = "deny"

[[rule]]
name = "named"
match = { host = "*.example", port = 443 }
carrier = ["socks5://ann:secret@gw:1080", "socks6://inner"]
idle_timeout_ms = 5000
dial = "name"

[[rule]]
name = "builds"
match = { process = "cargo", user = 0, from = "10.1.0.0/16" }
carrier = "direct"
to = "10.9.9.9:3128"
keep_client_address = true
proxy_protocol = 2
lifetime_ms = 60000

[[rule]]
name = "plain"
match = { to = ["10.0.0.0/8", "127.0.0.1"] }
carrier = "direct"

[[test]]
flow = { dst = "203.0.113.5:22" }
expect = { rule = "no-ssh" }
"#;

fn file(folder: &Path, text: &str) -> PathBuf {
    let path = folder.join("sidetrack.toml");
    std::fs::write(&path, text).unwrap();
    path
}

fn parsed<A: Args + FromArgMatches>(words: &[&str]) -> A {
    let command = A::augment_args(Command::new("sidetrack"));
    let matches = command.try_get_matches_from([&["sidetrack"], words].concat()).unwrap();
    A::from_arg_matches(&matches).unwrap()
}

/// Runs `check` on a text; the folder's name is taken out of what it prints.
fn checked(text: &str, options: &[&str]) -> Printed {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), text);
    let words = [&[path.to_str().unwrap()], options].concat();
    let printed = check::report(&parsed(&words), false);
    let plain = |text: String| text.replace(folder.path().to_str().unwrap(), "");
    Printed { out: plain(printed.out), err: plain(printed.err), code: printed.code }
}

#[test]
fn check_says_that_a_file_is_right_and_warns() {
    let printed = checked(GOOD, &[]);
    assert_eq!(
        printed.out,
        "/sidetrack.toml: ok: 2 listeners, 4 rules, default deny, 1 test passed, 0 warnings\n"
    );
    assert_eq!((printed.err.as_str(), printed.code), ("", 0));
    let shadowed =
        format!("{GOOD}\n[[rule]]\nname = \"late\"\nmatch = {{ to = \"10.1.0.0/16\" }}\naction = \"deny\"\n");
    let printed = checked(&shadowed, &[]);
    assert_eq!(printed.code, 0);
    assert!(printed.out.ends_with("1 test passed, 1 warning\n"), "{}", printed.out);
    assert!(printed.err.contains("⚠ the rule 'late' is never reached: 'plain' matches all of its flows"));
}

#[test]
fn check_says_what_is_wrong() {
    let printed = checked("version = 1\nworkers = 5000\nwrokers = 1\n", &[]);
    assert_eq!((printed.out.as_str(), printed.code), ("", 2));
    insta::assert_snapshot!(printed.err);
    let missing = check::report(&parsed(&["/nonexistent.toml"]), false);
    assert_eq!(missing.code, 2);
    assert!(missing.err.contains("cannot read /nonexistent.toml"), "{}", missing.err);
}

#[test]
fn check_speaks_json() {
    let printed = checked("version = 1\n\nworkers = 5000\n", &["--json"]);
    assert_eq!((printed.err.as_str(), printed.code), ("", 2));
    let json: serde_json::Value = serde_json::from_str(&printed.out).unwrap();
    let problem = &json["problems"][0];
    assert_eq!((json["ok"].as_bool(), problem["severity"].as_str()), (Some(false), Some("error")));
    assert_eq!((problem["line"].as_u64(), problem["column"].as_u64()), (Some(3), Some(11)));
    assert_eq!(
        (problem["message"].as_str(), problem["help"].as_str()),
        (Some("5000 is out of range"), Some("use 0 to 1024 threads"))
    );
    assert_eq!(checked(GOOD, &["--json"]).out, "{\"ok\":true,\"problems\":[]}\n");
}

fn explained(words: &[&str]) -> anyhow::Result<Printed> {
    explained_by(GOOD, words)
}

fn explained_by(config: &str, words: &[&str]) -> anyhow::Result<Printed> {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), config);
    explain::report(&parsed(&[&["-c", path.to_str().unwrap()], words].concat()), false)
}

#[test]
fn explain_tells_the_rule_and_why() {
    let lan = ["--listener", "lan"];
    let cases: [&[&str]; 6] = [
        &["10.0.0.5", "203.0.113.10:22"],
        &["10.0.0.5 -> 203.0.113.10:443", "--host", "www.example"],
        &["10.0.0.5", "to", "203.0.113.10:443"],
        &["10.1.0.5", "203.0.113.10:80", "--process", "cargo", "--user", "0"],
        &["10.0.0.5", "10.2.0.1:80"],
        &["10.0.0.5:4711", "[2001:db8::1]:80"],
    ];
    let mut said = String::new();
    for words in cases {
        let printed = explained(&[words, &lan].concat()).unwrap();
        assert_eq!((printed.err.as_str(), printed.code), ("", 0));
        said.push_str(&printed.out);
        said.push('\n');
    }
    said.push_str(&explained(&["127.0.0.1", "--listener", "web"]).unwrap().out);
    assert!(!said.contains("secret"));
    insta::assert_snapshot!(said);
}

#[test]
fn explain_tells_what_the_rule_asks_of_the_way() {
    let config = "version = 1\ndefault = \"deny\"\n[function.seen]\nkind = \"count\"\n\
        [[rule]]\nname = \"near\"\ncarrier = \"direct\"\nmatch = { port = 80 }\ntfo = true\nmptcp = true\nwarm = 3\n\
        [[rule]]\nname = \"far\"\ncarrier = \"direct\"\nchain = [\"seen\"]\n";
    let near = explained_by(config, &["10.0.0.5", "203.0.113.10:80"]).unwrap().out;
    let carry = near.lines().find(|line| line.starts_with("carry ")).unwrap();
    assert!(
        carry.contains("direct, with TCP Fast Open, with Multipath TCP, 3 connections held ready;"),
        "{carry}"
    );
    let far = explained_by(config, &["10.0.0.5", "203.0.113.10:81"]).unwrap().out;
    assert!(far.contains("direct, through seen;"), "{far}");
}

#[test]
fn explain_is_asked_about_udp() {
    let config = "version = 1\ndefault = \"deny\"\n[[rule]]\nname = \"dns\"\nmatch = { protocol = \"udp\", port = 53 }\n\
                  carrier = \"direct\"\n[[test]]\nflow = { dst = \"9.9.9.9:53\", protocol = \"udp\" }\nexpect = { rule = \"dns\" }\n\
                  [[test]]\nflow = { dst = \"9.9.9.9:53\" }\nexpect = { rule = \"default\" }\n";
    let say = |words: &[&str]| explained_by(config, &[&["10.0.0.5", "9.9.9.9:53"], words].concat());
    let udp = say(&["--protocol", "udp"]).unwrap().out;
    assert!(udp.contains(", udp\n") && udp.contains("verdict  carry: rule 'dns'"), "{udp}");
    let tcp = say(&[]).unwrap().out;
    assert!(tcp.contains("verdict  deny"), "{tcp}");
    assert!(say(&["--protocol", "sctp"]).unwrap_err().to_string().contains("neither tcp nor udp"));
}

#[test]
fn explain_knows_what_attach_would_do() {
    let own = std::process::id();
    let name = sidetrack_sys::process::process_info(own).unwrap().name;
    let config = format!(
        "version = 1\ndefault = \"direct\"\n[[listen]]\nname = \"in\"\nkind = \"socks\"\naddress = \"127.0.0.1:1080\"\n\
         [[rule]]\nname = \"socks\"\naction = \"deny\"\nmatch = {{ listener = \"in\" }}\n\
         [[rule]]\nname = \"own\"\naction = \"deny\"\nmatch = {{ process = \"{name}\", port = 22 }}\n"
    );
    let say = |words: &[&str]| explained_by(&config, words);
    let pid = own.to_string();
    let denied = say(&["--attach", &pid, "203.0.113.10:22"]).unwrap().out;
    assert!(denied.contains("verdict  deny: rule 'own'"), "{denied}");
    let carried = say(&["--attach", &pid, "10.0.0.5", "203.0.113.10:80", "--json"]).unwrap().out;
    let json: serde_json::Value = serde_json::from_str(&carried).unwrap();
    assert_eq!((&json["action"], &json["rule"]), (&"carry".into(), &serde_json::Value::Null), "{json}");
    assert_eq!((&json["flow"]["intercept"], &json["flow"]["listener"]), (&"run".into(), &"run".into()));
    let error = say(&["--attach", "4194305", "203.0.113.10:22"]).unwrap_err();
    assert!(format!("{error:#}").contains("there is no process 4194305"), "{error:#}");
}

#[test]
fn explain_says_which_packets_the_overlay_captures() {
    let folder = tempfile::tempdir().unwrap();
    let key = |name: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_sidetrack"));
        command.args(["overlay", "key"]).arg(folder.path().join(name));
        String::from_utf8(command.output().unwrap().stdout).unwrap().trim().to_owned()
    };
    let (near, far) = (key("node.key"), key("far.key"));
    let config = format!(
        "version = 1\ndefault = \"deny\"\n[admin]\nsocket = \"{0}/none.sock\"\n[overlay]\nname = \"near\"\n\
         key_file = \"{0}/node.key\"\n[overlay.node.near]\nkey = \"{1}\"\n[overlay.node.far]\nkey = \"{2}\"\n\
         address = \"192.0.2.9:8100\"\n\
         [[overlay.packets]]\nnode = \"far\"\nto = \"10.2.0.0/24\"\nport = [22]\n\
         [[overlay.packets]]\nnode = \"far\"\nto = \"10.2.0.0/24\"\nlink = \"real-time\"\n\
         dissemination = \"graph\"\ndeadline_ms = 65\nat = \"router\"\n",
        folder.path().display(),
        near,
        far
    );
    let say = |words: &[&str]| explained_by(&config, words).unwrap().out;
    let ssh = say(&["10.1.0.5", "10.2.0.9:22"]);
    assert!(
        ssh.contains("packets  sent by this host, captured whole by [[overlay.packets]] number 1"),
        "{ssh}"
    );
    assert!(ssh.contains("to node far: reliable, shortest\nlinks    not known: "), "{ssh}");
    // The answers of a server at port 22 match by their source port.
    let answer = say(&["10.1.0.5:22", "10.2.0.9:4000"]);
    assert!(answer.contains("[[overlay.packets]] number 1,"), "{answer}");
    let voice = say(&["10.1.0.5", "10.2.0.9:5004", "--protocol", "udp"]);
    assert!(voice.contains("packets  sent or forwarded by this host"), "{voice}");
    assert!(
        voice.contains("number 2, before any listener; to node far: real-time, graph, within 65 ms"),
        "{voice}"
    );
    let json = say(&["10.1.0.5", "10.2.0.9:5004", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let packets = &json["packets"];
    assert_eq!((&packets["entry"], &packets["dissemination"]), (&2.into(), &"graph".into()));
    assert_eq!(packets["trust"], "members");
    assert_eq!(packets["deadline_ms"], 65);
    let other = say(&["10.1.0.5", "10.3.0.9:22"]);
    assert!(!other.contains("overlay.packets"), "{other}");
}

#[test]
fn explain_speaks_json() {
    let words = ["10.0.0.5", "203.0.113.10:443", "--host", "www.example", "--listener", "lan", "--json"];
    let json: serde_json::Value = serde_json::from_str(&explained(&words).unwrap().out).unwrap();
    insta::assert_snapshot!(serde_json::to_string_pretty(&json).unwrap());
}

#[test]
fn explain_says_which_argument_is_wrong() {
    let cases: [(&[&str], &str); 9] = [
        (&["10.0.0.5", "-"], "the shell took '>' as a redirection"),
        (&["10.0.0.5", "b", "c"], "'10.0.0.5 b c' is no flow"),
        (&["10.0.0.5"], "the flow has no destination"),
        (&["host", "1.1.1.1:1"], "'host' is no address of a client"),
        (&["10.0.0.5", "1.1.1.1"], "lacks a port"),
        (&["10.0.0.5", "1.1.1.1:1", "--listener", "x"], "there is no 'x'; the listeners are: lan, web"),
        (&["10.0.0.5", "1.1.1.1:1", "--user", "no-such-user"], "there is no user 'no-such-user'"),
        (&["10.0.0.5", "1.1.1.1:1", "--intercept", "x"], "'x' is none of run,"),
        (&["10.0.0.5", "1.1.1.1:1", "--host", "a b"], "--host"),
    ];
    for (words, why) in cases {
        let error = explained(words).unwrap_err();
        assert!(format!("{error:#}").contains(why), "{words:?}: {error:#}");
    }
    let printed =
        explain::report(&parsed(&["-c", "/nonexistent.toml", "10.0.0.5", "1.1.1.1:1"]), false).unwrap();
    assert_eq!(printed.code, 2);
}

#[test]
fn schema_prints_a_schema() {
    let printed = |words: &[&str]| -> serde_json::Value {
        let args: schema::SchemaArgs = parsed(words);
        serde_json::from_str(&schema::report(args.what).unwrap().out).unwrap()
    };
    let json = printed(&[]);
    assert_eq!(json["$schema"], "https://json-schema.org/draft/2020-12/schema");
    assert_eq!(json["required"], serde_json::json!(["version"]));
    assert_eq!(json, printed(&["configuration"]));
    let records = printed(&["records"]);
    assert_eq!(records["$schema"], json["$schema"]);
    assert_eq!(records["required"][0], "ts");
    assert_eq!(printed(&["admin"])["openapi"], "3.1.0");
}

fn planned(text: &str, options: &[&str]) -> Printed {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), text);
    plan::report(&parsed(&[&["-c", path.to_str().unwrap()], options].concat()), false).unwrap()
}

#[test]
fn plan_lists_every_privileged_action() {
    let text = r#"version = 1
default = "direct"
on_crash = "closed"

[[listen]]
kind = "socks"
address = "*:443"

[[listen]]
kind = "redirect"
address = "127.0.0.1:15001"
dst = "203.0.113.0/24"

[[listen]]
kind = "tproxy"
address = ["0.0.0.0:15002", "[::]:15002"]
interfaces = "eth1"

[[listen]]
kind = "reverse"
address = "127.0.0.1:8080"
to = "127.0.0.1:80"

[[rule]]
name = "web"
match = { port = 80, process = "curl", listener = "redirect" }
carrier = "socks6://gw"

[[rule]]
name = "own-address"
match = { listener = "tproxy", port = 22 }
carrier = "direct"
keep_client_address = true
"#;
    let printed = planned(text, &[]);
    assert_eq!((printed.err.as_str(), printed.code), ("", 0));
    insta::assert_snapshot!(printed.out);
    let json: serde_json::Value = serde_json::from_str(&planned(text, &["--json"]).out).unwrap();
    assert_eq!(json["steps"][0]["needs"], "CAP_NET_BIND_SERVICE");
    assert!(json["table"].as_str().unwrap().contains("table inet sidetrack"));
}

/// Plans a configuration with the files `here` and `far`, keys of an overlay; their public keys stand where the text says HERE
/// and FAR. Each of the lines has to be in the plan.
fn plan_has(tables: &str, lines: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let [here, far] = ["here", "far"].map(|name| program(folder.path(), &["overlay", "key", name]).1);
    let text = format!("version = 1\ndefault = \"deny\"\n{tables}");
    let path = file(folder.path(), &text.replace("HERE", here.trim()).replace("FAR", far.trim()));
    let printed = plan::report(&parsed(&["-c", path.to_str().unwrap()]), false).unwrap();
    assert_eq!(printed.code, 0, "{}", printed.err);
    for line in lines {
        assert!(printed.out.contains(line), "no '{line}' in\n{}of\n{text}", printed.out);
    }
    assert!(!printed.out.contains("no privileged action"), "{}of\n{text}", printed.out);
}

#[test]
fn plan_lists_what_an_overlay_does() {
    let overlay = |keys: &str, packets: &str| {
        format!(
            "[overlay]\nname = 'here'\nkey_file = 'here'\n{keys}\n[overlay.node.here]\nkey = 'HERE'\n\
             [overlay.node.far]\nkey = 'FAR'\n{packets}"
        )
    };
    let packets = "[[overlay.packets]]\nnode = 'far'\nto = '10.2.0.0/24'\n";
    plan_has(
        &overlay("listen = '[::1]:810'", ""),
        &["listen on ::1, port 810, for [overlay]", "needs CAP_NET_BIND_SERVICE"],
    );
    plan_has(
        &overlay("listen = '127.0.0.1:8100'", packets),
        &[
            "open a packet queue (NFQUEUE)",
            "'inet sidetrack-packets', which puts packets into that queue, owned by our netlink socket",
            "packets of this host to 10.2.0.0/24",
            "open raw sockets that deliver packets of other nodes",
        ],
    );
    let router = format!("{packets}at = 'router'\n");
    plan_has(
        &overlay("listen = '127.0.0.1:8100'", &router),
        &["packets that leave this host, forwarded ones too, to 10.2.0.0/24"],
    );
    let closed = overlay("listen = '127.0.0.1:8100'", packets);
    plan_has(&format!("on_crash = 'closed'\n{closed}"), &["kept when we die", "`sidetrack cleanup`"]);
}

#[test]
fn plan_lists_what_engines_and_shunts_do() {
    let engine = "[[listen]]\nkind = 'engine'\naddress = '192.0.2.10:443'\ninterfaces = ['eth0']\n\
                  names = { 'a.example' = '10.0.0.5:443' }\n";
    plan_has(
        &format!("{engine}engine = {{ io = 'xdp' }}\n"),
        &["open AF_XDP sockets on eth0", "attach a BPF program to XDP of eth0", "open raw sockets"],
    );
    plan_has(
        engine,
        &["open packet sockets on eth0", "attach a BPF program to tcx ingress of eth0", "needs CAP_BPF"],
    );
    let shunt = |path: &str| {
        format!(
            "[shunt]\nfast_path = '{path}'\nforwarding = 'bridged'\n[[shunt.port]]\nnumber = 1\ninterface = 'lan0'\n\
             [[shunt.port]]\nnumber = 2\ninterface = 'wan0'\n"
        )
    };
    plan_has(
        &shunt("tc"),
        &["subscribe to conntrack's events", "attach a BPF program to tcx ingress of lan0"],
    );
    plan_has(&shunt("xdp"), &["attach a BPF program to XDP of wan0"]);
}

#[test]
fn plan_lists_low_ports_and_rules_of_the_kernel() {
    plan_has(
        "[[listen]]\nkind = 'redirect'\ndst = '203.0.113.0/24'\n",
        &["make the nftables table 'inet sidetrack'", "mark our own connections"],
    );
    let listener = "[[listen]]\nkind = 'socks'\naddress = '127.0.0.1:0'\n";
    plan_has(&format!("{listener}[admin]\nmetrics = '127.0.0.1:99'\n"), &["port 99, for [admin] metrics"]);
    plan_has(&format!("{listener}[admin]\npage = '127.0.0.1:97'\n"), &["port 97, for [admin] page"]);
    let outgoing = "[outgoing]\nlisten = '127.0.0.1:98'\nports = '4200-4299'\n";
    plan_has(&format!("{listener}{outgoing}"), &["port 98, for [outgoing]"]);
    let low = outgoing.replace("4200-4299", "900-1100");
    plan_has(&format!("{listener}{low}"), &["CAP_NET_BIND_SERVICE: to listen on ports below 1024"]);
}

#[test]
fn plan_says_when_no_right_is_needed() {
    let printed = planned("version = 1\n[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:1080\"\n", &[]);
    assert!(printed.out.starts_with("no privileged action: every user may run this\n"), "{}", printed.out);
    assert_eq!(planned("version = 2", &[]).code, 2);
}

/// The program itself, in a folder of its own.
fn program(folder: &Path, words: &[&str]) -> (Option<i32>, String) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    let ended = command.args(words).current_dir(folder).env("NO_COLOR", "1").output().unwrap();
    let told = [ended.stdout, ended.stderr].concat();
    (ended.status.code(), String::from_utf8_lossy(&told).into_owned())
}

#[test]
fn check_takes_its_file_in_every_way_and_finds_it_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    file(folder.path(), GOOD);
    for words in [
        &["check"][..],
        &["check", "sidetrack.toml"],
        &["check", "-c", "sidetrack.toml"],
        &["check", "--config", "sidetrack.toml"],
    ] {
        let (code, told) = program(folder.path(), words);
        assert_eq!(code, Some(0), "{words:?}: {told}");
        assert!(told.contains("sidetrack.toml: ok"), "{told}");
    }
    assert_eq!(program(folder.path(), &["check", "a", "-c", "b"]).0, Some(2));
}

#[test]
fn a_bad_configuration_has_the_same_exit_code_everywhere() {
    let folder = tempfile::tempdir().unwrap();
    file(folder.path(), "version = 1\nworkers = \"many\"\n");
    for words in [
        &["check"][..],
        &["up"],
        &["plan"],
        &["explain", "192.0.2.1:80"],
        &["shunt", "rules"],
        &["fn", "test", "x"],
        &["chain", "bench", "x"],
    ] {
        let (code, told) = program(folder.path(), words);
        assert_eq!(code, Some(2), "{words:?}: {told}");
    }
    let (code, told) = program(folder.path(), &["run", "-c", "sidetrack.toml", "--", "true"]);
    assert_eq!(code, Some(125), "{told}");
}

#[test]
fn check_warns_of_an_open_proxy_and_of_a_node_that_does_nothing() {
    let warned = |text: &str| {
        let printed = checked(&format!("version = 1\n{text}"), &[]);
        assert_eq!(printed.code, 0, "{}", printed.err);
        printed.err
    };
    for (kind, address) in [("socks", "0.0.0.0:1080"), ("http", "*:3128"), ("socks", "192.0.2.1:1080")] {
        let listen = format!("[[listen]]\nkind = \"{kind}\"\naddress = \"{address}\"\n");
        let told = warned(&listen);
        assert!(told.contains("is an open proxy"), "{told}");
        let told = warned(&format!("default = \"deny\"\n{listen}"));
        assert!(!told.contains("open proxy"), "{told}");
        let told = warned(&format!("{listen}users = [{{ user = \"ann\", password = \"x\" }}]\n"));
        assert!(!told.contains("open proxy"), "{told}");
    }
    for quiet in [
        "[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:1080\"\n",
        "[[listen]]\nkind = \"http\"\naddress = \"[::1]:3128\"\n",
    ] {
        assert_eq!(warned(quiet), "");
    }
    assert!(warned("default = \"direct\"\n").contains("has no listener"));
}

#[test]
fn plan_says_who_the_data_plane_is() {
    let listen = |port: u16| format!("[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:{port}\"\n");
    let said = |top: &str, port| planned(&format!("version = 1\n{top}{}", listen(port)), &[]).out;
    let default = said("", 1080);
    assert!(default.contains("the first of these users that there is: sidetrack, nobody"), "{default}");
    assert!(default.contains("CAP_NET_RAW: ") && !default.contains("CAP_NET_BIND_SERVICE: "), "{default}");
    let low = said("user = \"nobody\"\n", 80);
    assert!(low.contains("becomes user 'nobody'") && low.contains("CAP_NET_BIND_SERVICE: "), "{low}");
    assert!(low.contains("become the same user") && low.contains("the keeper: CAP_NET_ADMIN\n"), "{low}");
    let root = said("user = \"root\"\n", 1080);
    assert!(root.contains("stays root") && !root.contains("CAP_DAC_READ_SEARCH"), "{root}");
}
