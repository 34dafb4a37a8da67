//! Nodes join an overlay by invitations, and the others learn of them by a signed table.

use crate::command::{Inviting, Said, run, text};
use crate::node::Up;
use crate::tunnel::JOIN;
use sidetrack_testkit::{eventually, in_namespace};
use std::path::{Path, PathBuf};

/// The configuration of a node, in a folder of its own.
struct Node {
    folder: tempfile::TempDir,
    config: PathBuf,
}

impl Node {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("sidetrack.toml");
        Self { folder, config }
    }

    /// The first node, which listens.
    fn first() -> Self {
        let node = Self::new();
        let key = run(&["overlay", "key", text(&node.folder.path().join("overlay.key"))], "");
        assert!(key.is_ok, "{key:?}");
        let config = format!(
            "version = 1\ndefault = \"direct\"\n[overlay]\nname = \"a\"\nkey_file = \"overlay.key\"\n\
             listen = \"127.0.0.1:8100\" # mine\n[overlay.node.a]\nkey = \"{}\"\n",
            key.text.trim()
        );
        std::fs::write(&node.config, config).unwrap();
        node
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.config).unwrap()
    }

    fn invite(&self, name: &str, more: &[&str]) -> Inviting {
        let fixed = ["overlay", "invite", name, "-c", text(&self.config), "--listen", JOIN];
        Inviting::start(&[&fixed[..], more].concat())
    }

    fn join(&self, invitation: &str, more: &[&str]) -> Said {
        run(&[&["overlay", "join", "-", "-c", text(&self.config)][..], more].concat(), invitation)
    }

    fn update(&self, table: &str) -> Said {
        run(&["overlay", "update", "-", "-c", text(&self.config)], table)
    }

    /// Invites a new node, which joins.
    fn grown_by(&self, name: &str, more: &[&str]) -> (Self, Said) {
        let new = Self::new();
        let inviting = self.invite(name, &[]);
        let joined = new.join(&inviting.text, more);
        assert!(joined.is_ok, "{joined:?}");
        let said = inviting.end();
        assert!(said.is_ok && said.text.contains(&format!("{name} has joined")), "{said:?}");
        (new, said)
    }

    /// Runs the node with its own keys and tables.
    fn start(&self) -> Up {
        let rest = self.text().replace("version = 1\n", "").replace("default = \"direct\"\n", "");
        let key = |to: &Path| {
            std::fs::copy(self.folder.path().join("overlay.key"), to.join("overlay.key")).unwrap();
        };
        Up::start_with("default = \"direct\"\n", &rest, key)
    }
}

#[test]
fn three_nodes_know_each_other_after_two_invitations_and_one_update() {
    in_namespace(|| {
        let a = Node::first();
        let (b, _) = a.grown_by("b", &[]);
        let (c, said) = a.grown_by("c.site", &["--listen", "127.0.0.1:8101", "--address", "127.0.0.1:8101"]);
        assert!(said.text.contains("overlay update"), "{said:?}");
        assert!(
            a.text().contains("# mine") && a.text().contains("[overlay.node.\"c.site\"]"),
            "{}",
            a.text()
        );
        assert!(!b.text().contains("c.site"), "{}", b.text());
        let table = run(&["overlay", "table", "-c", text(&a.config)], "");
        let updated = b.update(&table.text);
        assert!(updated.is_ok && updated.text.contains("new nodes: c.site"), "{updated:?}");
        let known = b.update(&table.text);
        assert!(known.is_ok && known.text.contains("has all of these nodes already"), "{known:?}");

        let nodes = [&a, &b, &c].map(Node::start);
        let socket = nodes[1].folder().join("admin.sock");
        let ping = || run(&["overlay", "ping", "c.site", "-c", "1", "--admin", text(&socket)], "");
        eventually("b reaches c over a", || ping().is_ok);
        for node in nodes {
            assert!(node.stop().0.success());
        }
    });
}

#[test]
fn a_table_changes_nothing_that_is_there_and_needs_a_known_signer() {
    in_namespace(|| {
        let a = Node::first();
        let (b, _) = a.grown_by("b", &[]);
        let before = b.text();
        let table = run(&["overlay", "table", "-c", text(&a.config)], "").text;

        b.update("nonsense").expect_error("not a table of nodes");
        b.update(&table[..table.len() - 10]).expect_error("table");
        let mut letters: Vec<char> = table.trim().chars().collect();
        let last = letters.len() - 3;
        letters[last] = if letters[last] == 'A' { 'B' } else { 'A' };
        b.update(&letters.into_iter().collect::<String>()).expect_error("not signed by 'a'");

        // Another overlay has a node of the same name, with another key.
        let stranger = Node::first();
        let foreign = run(&["overlay", "table", "-c", text(&stranger.config)], "").text;
        b.update(&foreign).expect_error("not signed by 'a'");
        std::fs::write(
            &stranger.config,
            stranger.text().replace("\"a\"", "\"z\"").replace("node.a", "node.z"),
        )
        .unwrap();
        let foreign = run(&["overlay", "table", "-c", text(&stranger.config)], "").text;
        b.update(&foreign).expect_error("is not a node of");

        // A signed table gives b another key.
        let key = run(&["overlay", "key", text(&a.folder.path().join("other.key"))], "").text;
        let old = before.lines().skip_while(|line| !line.contains("node.b]")).nth(1).unwrap().to_owned();
        std::fs::write(&a.config, a.text().replace(&old, &format!("key = \"{}\"", key.trim()))).unwrap();
        let table = run(&["overlay", "table", "-c", text(&a.config)], "").text;
        b.update(&table).expect_error("the node 'b' has another key here");
        assert_eq!(b.text(), before);
    });
}

#[test]
fn links_that_nodes_may_announce_grow_by_the_new_one() {
    in_namespace(|| {
        let a = Node::first();
        let (_b, _) = a.grown_by("b", &[]);
        let listed = a.text() + "[[overlay.topology]]\nends = [\"a\", \"b\"]\nleast_us = 70\n";
        std::fs::write(&a.config, listed).unwrap();
        let (c, _) = a.grown_by("c", &[]);
        for node in [&a, &c] {
            let text = node.text();
            assert!(text.contains("ends = [\"a\", \"c\"]") && text.contains("least_us = 70"), "{text}");
        }
    });
}

#[test]
fn mistakes_of_names_and_addresses_are_named() {
    in_namespace(|| {
        let a = Node::first();
        let invite = |more: &[&str]| {
            run(
                &[&["overlay", "invite", "-c", text(&a.config), "--listen", "127.0.0.1:0"][..], more]
                    .concat(),
                "",
            )
        };
        invite(&["a"]).expect_error("has a node 'a' already");
        invite(&["b", "--address", "host.test"]).expect_error("dialled by IP address");
        let none = Node::new();
        run(&["overlay", "invite", "b", "-c", text(&none.config)], "").expect_error("sidetrack init overlay");
        // A node that is in an overlay joins only as itself.
        let before = a.text();
        let inviting = a.invite("b", &[]);
        let other = Node::first();
        other.join(&inviting.text, &[]).expect_error("is the node 'a' of an overlay");
        assert_eq!(a.text(), before);
        let b = Node::new();
        b.join(&inviting.text, &["--listen", "nonsense"]).expect_error("was not changed");
        assert_eq!((a.text(), b.config.exists()), (before, false));
        assert!(b.join(&inviting.text, &[]).is_ok);
        assert!(inviting.end().is_ok);
    });
}
