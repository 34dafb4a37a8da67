//! What people are told of containers: how they are, and that looking never waits for one that does not get well.

use crate::engine::engine;
use crate::node::{Up, admin};
use crate::passing::children;
use crate::scene::{Echo, connect, exchange, own, tables, up};
use rustix::process::Signal;
use serde_json::{Value, json};
use sidetrack_testkit::{eventually, in_namespace};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;

const LED: &str = "chain = ['f']\non_function_down = 'deny'\n";

/// What the admin interface says of the containers of a function.
pub(crate) fn health(up: &Up, name: &str) -> Value {
    let all: Value = serde_json::from_str(&admin::show(up, "/v1/functions")).expect("JSON");
    let all = all["functions"].as_array().expect("a list").clone();
    let found = all.into_iter().find(|function| function["name"] == name);
    found.expect("the function")["containers"].take()
}

/// What `explain` says of a flow through the node's listener, and its exit code.
fn explained(up: &Up) -> (String, Option<i32>) {
    let mut explain = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    explain.args(["explain", "--config"]).arg(up.folder().join("sidetrack.toml")).arg("127.0.0.1");
    let output = explain.output().expect("the binary");
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code())
}

#[test]
fn the_health_of_containers_is_told_by_the_admin_interface_and_by_explain() {
    in_namespace(|| {
        let server = Echo::start();
        let functions = format!("{}[function.count]\nkind = 'count'\n", own("f", "instances = 2"));
        let mut node = up(server.address, "chain = ['count', 'f']\non_function_down = 'deny'\n", &functions);
        assert_eq!(
            health(&node, "f"),
            json!({ "image": "localhost/function:1", "wanted": 2, "well": 2, "falls": 0, "trouble": null })
        );
        assert_eq!(health(&node, "count"), Value::Null, "inside sidetrack");
        let (text, code) = explained(&node);
        assert!(code == Some(0) && text.contains("well     f: 2 of 2 containers\n"), "{text}");

        let mut last = connect(&node);
        last.write_all(b"!exit\n").expect("an open stream");
        assert!(last.read(&mut [0; 16]).is_err());
        node.log_line("the fall", |line| line.contains("down: its program ended with code 7"));
        eventually("the fall is counted, and made good", || {
            health(&node, "f")
                == json!({ "image": "localhost/function:1", "wanted": 2, "well": 2, "falls": 1, "trouble": null })
        });
        let config = node.folder().join("sidetrack.toml");
        let text = std::fs::read_to_string(&config).expect("the configuration");
        assert!(node.stop().0.success());
        // It does not run any more: the rules are explained all the same.
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("sidetrack.toml"), text).expect("written");
        let mut explain = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
        explain.arg("explain").arg("127.0.0.1").current_dir(folder.path());
        let output = explain.output().expect("the binary");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("well     not known: no sidetrack runs at"),
            "{text}"
        );
    });
}

#[test]
fn a_container_that_is_down_is_said_with_its_reason() {
    in_namespace(|| {
        let server = Echo::start();
        let node =
            up(server.address, LED, "[function.f]\nkind = 'container'\nimage = 'localhost/nobody:1'\n");
        let told = health(&node, "f");
        assert_eq!((&told["wanted"], &told["well"]), (&json!(1), &json!(0)));
        assert!(told["trouble"].as_str().is_some_and(|why| why.contains("localhost/nobody:1")), "{told}");
        let (text, _) = explained(&node);
        assert!(
            text.contains("well     f: 0 of 1 containers") && text.contains("localhost/nobody:1"),
            "{text}"
        );
        assert!(node.stop().0.success());
    });
}

/// A reload waits until new containers are well. Meanwhile requests to the admin interface are answered, flows go on, and a node that is told to
/// stop does not wait for them.
#[test]
fn nobody_waits_for_a_reload_that_waits_for_containers() {
    in_namespace(|| {
        let server = Echo::start();
        let text = |chain: &str, functions: &str| {
            tables(server.address, &format!("chain = ['{chain}']\non_function_down = 'deny'\n"), functions)
        };
        let mut node = Up::start("default = 'deny'\n", &text("f", &own("f", "")));
        let process = children(&node);
        let never_well = own("g", "environment = { HOW = 'deaf' }\nstart_timeout_ms = 600000");
        node.rewrite("default = 'deny'\n", &text("g", &never_well));
        let mut reload = UnixStream::connect(node.folder().join("admin.sock")).expect("the admin socket");
        reload
            .write_all(
                b"POST /v1/reload HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
            )
            .expect("asked");
        eventually("the reload is at it", || {
            !engine().containers(&format!("sidetrack-g-{process}")).is_empty()
        });
        for path in ["/v1/status", "/v1/functions", "/v1/flows", "/metrics"] {
            admin::show(&node, path);
        }
        assert_eq!(health(&node, "f")["well"], 1);
        assert_eq!(exchange(connect(&node), b"x").expect("the old chain"), b"xbye\n");
        reload.set_nonblocking(true).expect("a socket");
        let early = reload.read(&mut [0; 16]).expect_err("the reload has no answer yet");
        assert_eq!(early.kind(), std::io::ErrorKind::WouldBlock);
        node.signal(Signal::TERM);
        assert!(node.gone().0.success());
        assert!(engine().containers(&format!("-{process}-")).is_empty());
    });
}
