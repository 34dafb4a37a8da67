//! The log as JSON, and the variables of the environment that say what is logged and which node is asked.

use crate::node::peers::{Server, visit};
use crate::node::{Up, send};
use crate::{TOP, free, reverse, rule};
use serde_json::Value;
use sidetrack_testkit::{eventually, in_namespace};
use std::net::SocketAddr;
use std::process::{Command, Stdio};

#[test]
fn each_line_of_a_json_log_has_time_level_target_and_message() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let address = free();
        let tables = |name: &str| {
            format!("[log]\nformat = \"json\"\n{}{}", reverse("in", &address, server.address), rule(name))
        };
        let mut up = Up::spawn(TOP, &tables("first"));
        up.log_line("readiness", |line| line.contains("\"ready\""));
        visit(address.parse::<SocketAddr>().expect("an address"), b"word");
        assert_eq!(up.record().text("rule"), "first");
        up.reload(TOP, &tables("second"));
        up.rewrite(TOP, "[[listen");
        up.log_line("an error", |line| line.contains("is rejected"));
        let mut lines = 0;
        for line in up.log_so_far().lines() {
            let line: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
            for key in ["timestamp", "level", "target", "message"] {
                assert!(line[key].as_str().is_some_and(|text| !text.is_empty()), "no {key} in {line}");
            }
            let level = line["level"].as_str().unwrap_or_default();
            assert!(["ERROR", "WARN", "INFO", "DEBUG", "TRACE"].contains(&level), "{line}");
            assert!(line["target"].as_str().is_some_and(|target| target.starts_with("sidetrack")), "{line}");
            lines += 1;
        }
        assert!(lines >= 4, "{}", up.logged());
        assert!(up.stop().0.success());
    });
}

/// What a node logs from its start to its end, with this value of `SIDETRACK_LOG`.
fn logged(value: Option<&str>) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("sidetrack.toml");
    let listener = "[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n";
    let socket = folder.path().join("admin.sock");
    let text = format!("version = 1\nworkers = 1\n[admin]\nsocket = '{}'\n{listener}", socket.display());
    std::fs::write(&config, text).expect("a file");
    let mut up = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    up.args(["up", "-c"]).arg(&config).env_remove("SIDETRACK_LOG").env_remove("SIDETRACK_LOG_FORMAT");
    up.envs(value.map(|value| ("SIDETRACK_LOG", value)));
    let child = up.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary");
    // It catches signals when all has started, and says then that it is ready.
    eventually("the node catches SIGTERM", || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        caught.is_some_and(|mask| mask & 1 << (rustix::process::Signal::TERM.as_raw() - 1) != 0)
    });
    send(child.id(), rustix::process::Signal::TERM);
    let output = child.wait_with_output().expect("its end");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn sidetrack_log_says_which_lines_are_written() {
    in_namespace(|| {
        let ready = |log: &str| log.contains(" INFO sidetrack::app::node: ready");
        let usual = logged(None);
        assert!(ready(&usual), "{usual}");
        assert_eq!(logged(Some("off")), "");
        let few = logged(Some("warn"));
        assert!(!few.contains(" INFO "), "{few}");
        let debug = logged(Some("debug"));
        assert!(ready(&debug) && !debug.contains("is ignored"), "{debug}");
        let one = logged(Some("warn,sidetrack::app::node=info"));
        let is_of_it = |line: &str| !line.contains(" INFO ") || line.contains(" INFO sidetrack::app::node: ");
        assert!(ready(&one) && one.lines().all(is_of_it), "{one}");
        // By itself a misspelt level would be a target, and nothing would be written.
        let wrong = logged(Some("verbose"));
        let told = "SIDETRACK_LOG: 'verbose' is ignored: write LEVEL or TARGET=LEVEL";
        assert!(ready(&wrong) && wrong.contains(told), "{wrong}");
        let partly = logged(Some("sidetrack=loud,warn"));
        assert!(partly.contains("'sidetrack=loud' is ignored") && !partly.contains(" INFO "), "{partly}");
    });
}

#[test]
fn sidetrack_admin_names_the_node_that_is_asked() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let address = free();
        let mut up = Up::start(TOP, &(reverse("in", &address, server.address) + &rule("all")));
        visit(address.parse::<SocketAddr>().expect("an address"), b"word");
        let id = up.record().number("flow");
        let flows = |socket: &str| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
            let asked = command.args(["flows", "show", &id.to_string()]).env("SIDETRACK_ADMIN", socket);
            asked.output().expect("the binary")
        };
        let socket = up.folder().join("admin.sock").display().to_string();
        let found = flows(&socket);
        let out = String::from_utf8_lossy(&found.stdout).into_owned();
        assert!(found.status.success() && out.contains(&server.address.to_string()), "{found:?}");
        let lost = flows("/nowhere/admin.sock");
        assert!(!lost.status.success(), "{lost:?}");
        assert!(String::from_utf8_lossy(&lost.stderr).contains("/nowhere/admin.sock"), "{lost:?}");
        assert!(up.stop().0.success());
    });
}
