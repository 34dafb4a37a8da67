//! A near side joins a far side that runs, and its first flow arrives.

use crate::command::{Inviting, Said, run, text};
use crate::node::peers::{Client, Server, visit};
use crate::node::{Up, admin};
use sidetrack::tls::{Pin, self_signed};
use sidetrack_testkit::in_namespace;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

const TOP: &str = "default = \"deny\"\n";

/// The far side's port, and that of joins. Each test has a network namespace of its own.
const TUNNEL: &str = "127.0.0.1:4433";
pub(crate) const JOIN: &str = "127.0.0.1:4434";

/// A far side that runs, with one near side already.
pub(crate) struct Far {
    up: Up,
    pub(crate) config: PathBuf,
}

impl Far {
    /// Starts it.
    pub(crate) fn start() -> Self {
        let [far, other] = ["far.test", "other.test"].map(|name| self_signed(name, 1).unwrap());
        let pin = Pin::of_pem(&other.certificate_pem).unwrap();
        let tables = format!(
            "[[listen]]\nkind = \"tunnel\"\naddress = \"{TUNNEL}\"\nidentity = \"@/far.pem\"\n\
             pins = [\n  \"{pin}\", # the other one\n]\n\
             [[rule]]\nname = \"near\"\nmatch = {{ socks_user = \"near.test\" }}\ncarrier = \"direct\"\n"
        );
        let key = |folder: &Path| std::fs::write(folder.join("far.pem"), far.identity_pem()).unwrap();
        let up = Up::start_with(TOP, &tables, key);
        let config = up.folder().join("sidetrack.toml");
        Self { up, config }
    }

    /// Its configuration now.
    pub(crate) fn text(&self) -> String {
        std::fs::read_to_string(&self.config).unwrap()
    }

    /// Starts an invitation for `near.test`.
    pub(crate) fn invite(&self, more: &[&str]) -> Inviting {
        self.invite_as("near.test", more)
    }

    /// Starts an invitation for this name.
    fn invite_as(&self, name: &str, more: &[&str]) -> Inviting {
        let fixed =
            ["tunnel", "invite", name, "-c", text(&self.config), "--address", "127.0.0.1", "--listen", JOIN];
        Inviting::start(&[&fixed[..], more].concat())
    }
}

/// Joins with an invitation.
pub(crate) fn join(invitation: &str, config: &Path, more: &[&str]) -> Said {
    run(&[&["tunnel", "join", "-", "-c", text(config)][..], more].concat(), invitation)
}

#[test]
fn a_near_side_joins_by_one_line_and_its_flow_arrives() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let mut far = Far::start();
        let mode = std::fs::metadata(&far.config).unwrap().mode();
        let entry = "[[listen]]\nname = \"in\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\n";
        let mut near = Up::start(TOP, &format!("{entry}to = \"{}\"\n", server.address));
        let config = near.folder().join("sidetrack.toml");

        let inviting = far.invite(&[]);
        let joined = join(&inviting.text, &config, &[]);
        assert!(joined.is_ok && joined.text.contains("has the tunnel 'far' to far.test"), "{joined:?}");
        let invited = inviting.end();
        assert!(invited.is_ok && invited.text.contains("near.test has joined"), "{invited:?}");

        let text = far.text();
        assert!(text.contains("\"near.test=sha256//") && text.contains("# the other one"), "{text}");
        assert_eq!(std::fs::metadata(&far.config).unwrap().mode(), mode);
        let key = std::fs::metadata(near.folder().join("near.test.pem")).unwrap();
        assert_eq!(key.mode() & 0o007, 0, "other users cannot read the key");

        // Both nodes have it in force: only a rule is missing.
        let rule = "[[rule]]\nname = \"over\"\ncarrier = \"tunnel:far\"\n";
        let text = std::fs::read_to_string(&config).unwrap();
        assert!(text.contains("# [[rule]]"), "the next step is there as a comment: {text}");
        std::fs::write(&config, text + rule).unwrap();
        let (status, answer) = admin::ask(&near, "POST", "/v1/reload");
        assert_eq!(status, 200, "{answer}");
        let entry = near.addresses("in")[0];
        visit(entry, b"hello");
        let record = far.up.record();
        assert_eq!((record.text("rule"), record.text("reason")), ("near", "ok"), "{record:?}");
        assert_eq!(record.text("user"), "near.test", "{record:?}");
        assert_eq!(near.record().text("reason"), "ok");

        // One more near side cuts no flow of this one.
        let mut client = Client::connect(entry).unwrap();
        let third = tempfile::tempdir().unwrap();
        let inviting = far.invite_as("third.test", &[]);
        assert!(join(&inviting.text, &third.path().join("sidetrack.toml"), &[]).is_ok);
        assert!(inviting.end().is_ok);
        assert!(far.text().contains("third.test=sha256//"));
        client.echo(b"still here").unwrap();
        client.close().unwrap();
        assert_eq!(far.up.record().text("reason"), "ok");
    });
}

#[test]
fn a_pinned_near_side_cannot_take_the_name_of_another() {
    in_namespace(|| {
        let mut far = Far::start();
        let server = Server::start("127.0.0.1");
        let entry = "[[listen]]\nname = \"in\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\n";
        let near = Up::start(TOP, &format!("{entry}to = \"{}\"\n", server.address));
        let config = near.folder().join("sidetrack.toml");
        let inviting = far.invite_as("evil.test", &[]);
        assert!(join(&inviting.text, &config, &[]).is_ok);
        assert!(inviting.end().is_ok);
        // The same key in a certificate with another name.
        let own = std::fs::read_to_string(near.folder().join("evil.test.pem")).unwrap();
        let key = rcgen::KeyPair::from_pem(own.split_once("-----END CERTIFICATE-----").unwrap().1).unwrap();
        let params = rcgen::CertificateParams::new(["near.test".to_owned()]).unwrap();
        let other = params.self_signed(&key).unwrap().pem() + &key.serialize_pem();
        std::fs::write(near.folder().join("evil.test.pem"), other).unwrap();
        let text = std::fs::read_to_string(&config).unwrap();
        std::fs::write(&config, text + "[[rule]]\nname = \"over\"\ncarrier = \"tunnel:far\"\n").unwrap();
        let (status, answer) = admin::ask(&near, "POST", "/v1/reload");
        assert_eq!(status, 200, "{answer}");
        assert!(Client::connect(near.addresses("in")[0]).is_err());
        far.up.log_line("a refusal", |line| line.contains("not let in"));
    });
}

#[test]
fn two_hosts_without_a_file_need_two_commands() {
    in_namespace(|| {
        let folder = tempfile::tempdir().unwrap();
        let [far, config] = ["far", "near"].map(|name| folder.path().join(name).join("sidetrack.toml"));
        std::fs::create_dir(far.parent().unwrap()).unwrap();
        let arguments =
            ["tunnel", "invite", "near.test", "--address", "127.0.0.1", "--to", "127.0.0.0/8", "-c"];
        let inviting = Inviting::start(&[&arguments[..], &[text(&far), "--listen", JOIN]].concat());
        assert!(!far.exists(), "nothing is written before the near side is there");
        let joined = join(&inviting.text, &config, &["--name", "site", "--to", "10.1.0.0/16"]);
        assert!(joined.is_ok, "{joined:?}");
        assert!(joined.text.contains("sidetrack up -c"), "{joined:?}");
        let invited = inviting.end();
        assert!(invited.is_ok && invited.text.contains("sidetrack up -c"), "{invited:?}");
        for (file, words) in [(&far, "from-near.test"), (&config, "carrier = \"tunnel:site\"")] {
            let checked = run(&["check", text(file)], "");
            assert!(checked.is_ok, "{checked:?}");
            let text = std::fs::read_to_string(file).unwrap();
            assert!(text.contains(words), "{text}");
        }
    });
}
