//! A configuration that must be confirmed: it is taken back in time, and kept if it is confirmed.

use crate::node::peers::{Client, Server, visit};
use crate::node::upgrading::SIDETRACK;
use crate::node::{Up, admin};
use sidetrack_testkit::{eventually, in_namespace};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const TOP: &str = "default = \"deny\"\n";

fn tables(server: SocketAddr, rule: &str) -> String {
    format!(
        "[[listen]]\nkind = \"redirect\"\ndst = \"127.0.0.1\"\nports = {}\n[[rule]]\nname = \"{rule}\"\ncarrier = \"direct\"\nkernel = \"never\"\n",
        server.port()
    )
}

/// Runs `sidetrack reload` with these words, without a terminal.
fn reload(up: &Up, words: &[&str]) -> (bool, String) {
    let mut command = Command::new(SIDETRACK);
    command.arg("reload").args(words).arg("--admin").arg(up.folder().join("admin.sock")).stdin(Stdio::null());
    let Output { status, stdout, stderr } = command.output().expect("the binary");
    (status.success(), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

fn config(up: &Up) -> String {
    admin::ask(up, "GET", "/v1/config").1
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).expect("a file")
}

#[test]
fn a_configuration_that_is_tried_comes_and_goes_and_is_kept_if_confirmed() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let mut up = Up::start(TOP, &tables(server.address, "first"));
        let own = up.folder().join("sidetrack.toml");
        let first = text(&own);
        let tried = up.folder().join("tried.toml");
        let named = |name: &str| std::fs::write(&tried, first.replace("first", name)).expect("written");
        let path = tried.display().to_string();
        let mut flow = Client::connect(server.address).expect("a connection");
        flow.echo(b"before").expect("an echo");

        named("second");
        let (success, said) = reload(&up, &[&path, "--confirm", "60s"]);
        assert!(success && said.contains("configuration 2 is in force for 60 s"), "{said}");
        assert!(config(&up).contains("\"unconfirmed_ms\":"));
        visit(server.address, b"word");
        assert_eq!(up.record().text("rule"), "second");
        let (success, said) = reload(&up, &[&path, "--confirm", "1s"]);
        assert!(!success && said.contains("waits for its confirmation"), "{said}");
        assert_eq!(text(&own), first, "the file is as before");
        let (success, said) = reload(&up, &["--confirmed"]);
        assert!(success && said.contains("sidetrack.toml has it"), "{said}");
        assert_eq!(text(&own), first.replace("first", "second"));
        assert!(!config(&up).contains("unconfirmed_ms"));
        let (success, said) = reload(&up, &["--confirmed"]);
        assert!(!success && said.contains("no configuration waits"), "{said}");

        named("third");
        let (success, said) = reload(&up, &[&path, "--confirm", "1ms"]);
        assert!(success, "{said}");
        eventually("it is taken back", || config(&up).contains("not confirmed"));
        visit(server.address, b"word");
        assert_eq!(up.record().text("rule"), "second");
        assert_eq!(text(&own), first.replace("first", "second"));
        // What was written by the confirmation was no reload: 1, 2, 3 (tried), 4 (taken back).
        assert!(config(&up).contains("\"generation\":4"), "{}", config(&up));
        std::fs::write(&tried, "version = 1\nnonsense = 1\n").expect("written");
        let (success, said) = reload(&up, &[&path, "--confirm", "60s"]);
        assert!(!success && said.contains("nonsense"), "{said}");
        assert!(!config(&up).contains("unconfirmed_ms"));
        let (success, said) = reload(&up, &[]);
        assert!(success && said.contains("configuration 5 is in force"), "{said}");
        flow.echo(b"after").expect("the flow goes on");
        flow.close().expect("an orderly end");
        assert!(up.stop().0.success());
    });
}

#[test]
fn a_node_that_is_not_confirmed_ends_and_leaves_nothing() {
    in_namespace(|| {
        let before = crate::node::traces::Traces::now();
        let server = Server::start("127.0.0.1");
        let closed = format!("{TOP}on_crash = \"closed\"\n");
        let mut up = Up::spawn_with_words(&["--confirm", "1ms"], &closed, &tables(server.address, "all"));
        let (status, _) = up.gone();
        assert!(!status.success() && up.logged().contains("not confirmed"), "{status}");
        before.expect_back("after its end");
        let (client, seen, _) = visit(server.address, b"word");
        assert_eq!(client, seen, "nothing stands in the way");

        let up = Up::spawn_with_words(&["--confirm", "60s"], &closed, &tables(server.address, "all")).ready();
        assert!(config(&up).contains("\"unconfirmed_ms\":"));
        let (success, said) = reload(&up, &["--confirmed"]);
        assert!(success && said.contains("is confirmed"), "{said}");
        assert!(!config(&up).contains("unconfirmed_ms"));
        let (client, seen, _) = visit(server.address, b"word");
        assert_ne!(client, seen, "it steers");
        assert!(up.stop().0.success());
        before.expect_back("after its end");
    });
}
