//! Joins that go wrong: wrong lines, guests that leave at each step, and hosts that change meanwhile.

use crate::command::{Inviting, run, text};
use crate::tunnel::{Far, JOIN, join};
use ring::hmac;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};
use sidetrack::tls::{RawKey, self_signed};
use sidetrack_core::invitation::host::WRONG_MAX;
use sidetrack_core::invitation::{ALPN, EXPORTER, Invitation, Message, Refusal, Secret, proven};
use sidetrack_core::tunnel::Parsed;
use sidetrack_testkit::{LIMIT, in_namespace};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;

/// A guest that is led by hand.
struct Guest {
    stream: StreamOwned<ClientConnection, TcpStream>,
    ask: Vec<u8>,
}

fn key() -> RawKey {
    RawKey::of_pem(&self_signed("near.test", 1).unwrap().identity_pem()).unwrap()
}

impl Guest {
    /// Connects, does the handshake, and has its first message ready.
    fn connect(invitation: &Invitation, key: &RawKey) -> Self {
        let stream = TcpStream::connect(JOIN).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let config = key.client(invitation.pin.into(), ALPN).unwrap();
        let name = ServerName::from(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let mut stream = StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), stream);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).unwrap();
        }
        let mut exported = [0; 32];
        stream.conn.export_keying_material(&mut exported, EXPORTER, None).unwrap();
        let bytes = proven(&exported, &invitation.pin, &key.pin().into(), &invitation.name);
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &invitation.secret.0), &bytes);
        let proof = tag.as_ref().try_into().unwrap();
        let ask = Message::Ask { proof, addresses: Vec::new() }.encode().unwrap();
        Self { stream, ask }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
        self.stream.flush().unwrap();
    }

    fn receive(&mut self) -> Message {
        let mut bytes = Vec::new();
        loop {
            match Message::parse(&bytes) {
                Parsed::Message(message, _) => return message,
                Parsed::Malformed(error) => panic!("{error}"),
                Parsed::Incomplete => {}
            }
            let mut byte = [0];
            self.stream.read_exact(&mut byte).unwrap();
            bytes.extend(byte);
        }
    }

    fn offered(mut self) -> Self {
        let ask = self.ask.clone();
        self.send(&ask);
        assert!(matches!(self.receive(), Message::Tunnel(_)));
        self
    }

    fn message(&mut self, message: &Message) {
        self.send(&message.encode().unwrap());
    }

    fn refused(&mut self) -> Refusal {
        match self.receive() {
            Message::Refused { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    }
}

/// A near side's folder.
struct Near {
    folder: tempfile::TempDir,
    config: PathBuf,
}

impl Near {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("sidetrack.toml");
        Self { folder, config }
    }

    /// The names of its files: what a failed join may leave is the key.
    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn parsed(inviting: &Inviting) -> Invitation {
    inviting.text.parse().unwrap()
}

#[test]
fn wrong_lines_are_named_and_the_right_one_works_after_them() {
    in_namespace(|| {
        let far = Far::start();
        let before = far.text();
        let near = Near::new();
        let inviting = far.invite(&[]);
        let right = parsed(&inviting);
        let wrong = |invitation: Invitation| invitation.to_text().unwrap();
        let mut pin = right.pin;
        pin[0] ^= 1;
        for (line, words) in [
            ("nonsense".to_owned(), "this is not an invitation"),
            (inviting.text[..60].to_owned(), "damaged or not complete"),
            (
                wrong(Invitation { secret: Secret([7; 16]), ..right.clone() }),
                "the secret of the invitation is wrong",
            ),
            (wrong(Invitation { pin, ..right.clone() }), "shows another key than the invitation says"),
            (
                wrong(Invitation { name: "other.test".into(), ..right.clone() }),
                "the secret of the invitation is wrong",
            ),
            (wrong(Invitation { name: "../near".into(), ..right.clone() }), "is not a DNS name"),
            (
                wrong(Invitation { addresses: vec!["127.0.0.1:9".parse().unwrap()], ..right.clone() }),
                "the address of the invitation does not answer",
            ),
            (
                wrong(Invitation {
                    addresses: vec!["127.0.0.1:9".parse().unwrap()],
                    expires: 1,
                    ..right.clone()
                }),
                "It has expired at 1970-01-01T00:00:01Z",
            ),
        ] {
            join(&line, &near.config, &[]).expect_error(words);
            assert_eq!((far.text(), near.config.exists()), (before.clone(), false), "{words}");
        }
        let other = run(&["overlay", "join", "-", "-c", text(&near.config)], &inviting.text);
        other.expect_error("this invitation is for 'sidetrack tunnel join'");
        // A clock that is wrong here does not matter, and a break in the line neither.
        let late = wrong(Invitation { expires: 1, ..right });
        let joined = join(&format!("{}\n {}", &late[..40], &late[40..]), &near.config, &[]);
        assert!(joined.is_ok, "{joined:?}");
        assert!(inviting.end().is_ok);
        join(&late, &near.config, &[]).expect_error("does not answer");
    });
}

#[test]
fn a_guest_may_leave_at_each_step_and_come_again() {
    in_namespace(|| {
        let far = Far::start();
        let before = far.text();
        let inviting = far.invite(&[]);
        let invitation = parsed(&inviting);
        let (guest, other) = (key(), key());
        drop(TcpStream::connect(JOIN).unwrap());
        drop(Guest::connect(&invitation, &guest));
        let whole = Guest::connect(&invitation, &guest).ask;
        for end in [1, 2, 3, 20, whole.len() - 1] {
            let mut leaving = Guest::connect(&invitation, &guest);
            let part = leaving.ask[..end].to_vec();
            leaving.send(&part);
        }
        drop(Guest::connect(&invitation, &guest).offered());
        let mut rude = Guest::connect(&invitation, &guest).offered();
        rude.message(&Message::Finish);
        let mut long = Guest::connect(&invitation, &guest);
        long.send(b"\x01\xff\xff");
        // Another guest with the secret may still come, because no guest has taken the invitation.
        drop(Guest::connect(&invitation, &other).offered());
        let mut slow = Guest::connect(&invitation, &other).offered();
        assert_eq!(far.text(), before, "nothing is written before a guest takes the offer");

        let mut taking = Guest::connect(&invitation, &guest).offered();
        taking.message(&Message::Take);
        assert!(matches!(taking.receive(), Message::Given { .. }));
        drop(taking);
        let written = far.text();
        assert!(written.contains(&format!("near.test={}", guest.pin())), "{written}");

        slow.message(&Message::Take);
        assert_eq!(slow.refused(), Refusal::Used);
        let mut late = Guest::connect(&invitation, &other);
        let ask = late.ask.clone();
        late.send(&ask);
        assert_eq!(late.refused(), Refusal::Used);

        // The answer may have been lost: the same guest does it all again, and nothing is written twice.
        let mut again = Guest::connect(&invitation, &guest).offered();
        again.message(&Message::Take);
        assert!(matches!(again.receive(), Message::Given { .. }));
        again.message(&Message::Finish);
        assert!(inviting.end().is_ok);
        assert_eq!(far.text(), written);
    });
}

#[test]
fn guesses_end_the_invitation() {
    in_namespace(|| {
        let far = Far::start();
        let before = far.text();
        let inviting = far.invite(&[]);
        let invitation = Invitation { secret: Secret([0; 16]), ..parsed(&inviting) };
        for _ in 0..WRONG_MAX {
            let mut guessing = Guest::connect(&invitation, &key());
            let ask = guessing.ask.clone();
            guessing.send(&ask);
            assert_eq!(guessing.refused(), Refusal::Proof);
        }
        inviting.end().expect_error("too many wrong secrets");
        assert_eq!(far.text(), before);
    });
}

#[test]
fn time_ends_the_invitation() {
    in_namespace(|| {
        let far = Far::start();
        let before = far.text();
        let inviting = far.invite(&["--expires", "1s"]);
        let mut slow = Guest::connect(&parsed(&inviting), &key()).offered();
        inviting.end().expect_error("the invitation has expired");
        let _ = slow.stream.write_all(&Message::Take.encode().unwrap());
        assert!(slow.stream.read_exact(&mut [0]).is_err(), "it has left");
        assert_eq!(far.text(), before);
    });
}

#[test]
fn mistakes_of_either_file_change_neither() {
    in_namespace(|| {
        let far = Far::start();
        let before = far.text();
        let near = Near::new();
        let inviting = far.invite(&[]);

        // The near side has another tunnel of this name, or a mistake.
        let taken = "version = 1\ndefault = \"direct\"\n[[tunnel]]\nname = \"far\"\naddress = \"192.0.2.1:1\"\n\
                     identity = \"near.test.pem\"\npins = [\"sha256//47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\"]\n";
        for (old, words) in
            [(taken, "has another tunnel 'far' already"), ("version = 1\nwrong = 1\n", "was not changed")]
        {
            std::fs::write(&near.config, old).unwrap();
            join(&inviting.text, &near.config, &[]).expect_error(words);
            assert_eq!(std::fs::read_to_string(&near.config).unwrap(), old);
            assert_eq!(
                (far.text(), near.files()),
                (before.clone(), ["near.test.pem", "sidetrack.toml"].map(String::from).to_vec())
            );
        }

        // An administrator has edited the far side's file meanwhile: the name is there, or the file is wrong.
        std::fs::write(&near.config, taken).unwrap();
        let pin = "near.test=sha256//47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=";
        for (edited, words) in [
            (before.replace("pins = [", &format!("pins = [\"{pin}\", ")), "already: remove its pin"),
            (format!("{before}wrong = 1\n"), "was not changed"),
        ] {
            std::fs::write(&far.config, &edited).unwrap();
            join(&inviting.text, &near.config, &["--name", "site"]).expect_error(words);
            assert_eq!(
                (far.text(), std::fs::read_to_string(&near.config).unwrap()),
                (edited, taken.to_owned())
            );
        }
        std::fs::write(&far.config, &before).unwrap();
        let joined = join(&inviting.text, &near.config, &["--name", "site"]);
        assert!(joined.is_ok, "{joined:?}");
        assert!(inviting.end().is_ok);
        let text = std::fs::read_to_string(&near.config).unwrap();
        assert!(text.starts_with(taken) && text.contains("name = \"site\""), "{text}");
    });
}

#[test]
fn mistakes_at_the_host_come_out_before_an_invitation_is_made() {
    in_namespace(|| {
        let far = Far::start();
        let invite = |more: &[&str]| {
            run(
                &[&["tunnel", "invite", "-c", text(&far.config), "--listen", "127.0.0.1:0"][..], more]
                    .concat(),
                "",
            )
        };
        invite(&["a b", "--address", "127.0.0.1"]).expect_error("is not a DNS name");
        invite(&["near.test"]).expect_error("--address far.example");
        invite(&["near.test", "--address", "127.0.0.1", "--listener", "none"])
            .expect_error("no tunnel listener 'none'");
        invite(&["near.test", "--address", "127.0.0.1", "--to", "nonsense"]).expect_error("was not changed");
        invite(&["near.test", "--address", "127.0.0.1", "--expires", "8days"]).expect_error("7 days");
        std::fs::write(&far.config, "wrong = 1\n").unwrap();
        invite(&["near.test", "--address", "127.0.0.1"]).expect_error("wrong");
    });
}
