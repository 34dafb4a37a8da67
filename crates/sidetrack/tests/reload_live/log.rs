//! The log as JSON, and the variables of the environment that say what is logged and which node is asked.

use crate::hosts::in_namespace;
use crate::node::Up;
use crate::node::peers::{Server, visit};
use crate::{TOP, free, reverse, rule};
use serde_json::Value;
use std::net::SocketAddr;
use std::process::Command;

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
