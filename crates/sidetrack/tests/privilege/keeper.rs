//! The keeper on its own: what it refuses, and what its end means.

use crate::hosts::in_namespace;
use crate::node::peers::{Client, Server};
use crate::node::traces::Traces;
use crate::node::{Dice, Up, send};
use rustix::process::Signal;
use sidetrack::keeper::{ARGUMENT, Ask, Order};
use sidetrack::steer::Forwards;
use sidetrack_sys::{process, scm};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};

/// Requests that are none.
const GARBAGE: usize = 300;

/// A keeper with its socket in our hands.
struct Bare {
    child: Child,
    end: OwnedFd,
}

impl Bare {
    fn start() -> Self {
        let (end, theirs) = scm::pair().expect("a pair");
        let child = Command::new(env!("CARGO_BIN_EXE_sidetrack"))
            .arg(ARGUMENT)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary");
        Self { child, end }
    }

    /// Sends bytes and gives what is answered; none if the keeper ended.
    fn ask(&self, bytes: &[u8]) -> Option<String> {
        scm::send(&self.end, bytes, &[]).ok()?;
        let limit = Some(crate::node::LIMIT);
        assert!(scm::wait(&self.end, limit).expect("poll"), "no answer in time to {bytes:?}");
        let message = scm::receive(&self.end).ok()??;
        Some(String::from_utf8(message.bytes).expect("text"))
    }

    /// Closes the socket; what it had to say, and how it ended.
    fn finish(self) -> (std::process::ExitStatus, String) {
        drop(self.end);
        let output = self.child.wait_with_output().expect("ended");
        (output.status, String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// A request cut, changed or made up.
fn garbage(dice: &mut Dice, request: &[u8]) -> Vec<u8> {
    let mut bytes = request.to_vec();
    match dice.below(4) {
        0 => {
            let length = 1 + dice.below(5000);
            bytes = dice.bytes(length);
        }
        1 => bytes.truncate(1 + dice.below(request.len() - 1)),
        2 => {
            let at = dice.below(bytes.len());
            bytes[at] ^= 1 << dice.below(8);
        }
        // Deeper than anybody reads.
        _ => bytes = [b"[".repeat(10_000), bytes].concat(),
    }
    bytes
}

#[test]
fn what_is_no_request_is_refused_and_changes_nothing() {
    in_namespace(|| {
        let before = Traces::now();
        let keeper = Bare::start();
        let order = Order {
            name: "x.toml".into(),
            text: "version = 7\n[[listen".into(),
            bound: vec![],
            first_path: 0,
            forwards: Forwards { v4: false, v6: false },
        };
        let request = serde_json::to_vec(&Ask::Steer(order)).expect("JSON");
        let refused = keeper.ask(&request).expect("an answer");
        assert!(refused.starts_with("{\"Failed\":"), "a wrong configuration is refused: {refused}");
        let mut dice = Dice(1);
        for _ in 0..GARBAGE {
            let bytes = garbage(&mut dice, &request);
            let answer = keeper.ask(&bytes).unwrap_or_else(|| panic!("it ended at {bytes:?}"));
            assert!(answer.starts_with("{\"Failed\":"), "{answer} to {bytes:?}");
        }
        let flows = keeper.ask(b"\"Flows\"").expect("an answer");
        assert_eq!(flows, "{\"Flows\":[]}", "it serves on");
        let (status, said) = keeper.finish();
        assert!(status.success() && !said.contains("panic"), "{status}: {said}");
        before.expect_back("after the end");
    });
}

#[test]
fn a_message_that_is_too_large_ends_it_without_a_trace() {
    in_namespace(|| {
        let before = Traces::now();
        let keeper = Bare::start();
        let large = vec![b' '; scm::MAX_BYTES + 1];
        rustix::net::send(&keeper.end, &large, rustix::net::SendFlags::empty()).expect("sent");
        let told = scm::receive(&keeper.end).expect("an answer or the end");
        assert!(told.is_none_or(|told| told.bytes.starts_with(b"{\"Failed\":")));
        let (_, said) = keeper.finish();
        assert!(!said.contains("panic"), "{said}");
        before.expect_back("after the end");
    });
}

#[test]
fn without_its_keeper_the_node_says_so_and_ends() {
    for on_crash in ["open", "closed"] {
        in_namespace(move || {
            let before = Traces::now();
            let server = Server::start("127.0.0.1");
            let tables = format!(
                "[[listen]]\nname = \"out\"\nkind = \"redirect\"\ndst = \"127.0.0.1\"\nports = {}\n\
                 [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n",
                server.address.port()
            );
            let top = format!("default = \"deny\"\non_crash = \"{on_crash}\"\n");
            let mut up = Up::start(&top, &tables);
            let mut client = Client::connect(server.address).expect("connect");
            client.echo(b"word").expect("echo");
            let keeper = process::watch(up.keeper()).expect("a process");
            send(up.keeper(), Signal::KILL);
            assert!(crate::hosts::readable(keeper.as_fd(), crate::node::LIMIT));
            let (status, records) = up.gone();
            assert_eq!(status.code(), Some(1), "a failure, so that a service manager starts it again");
            assert_eq!(records.len(), 1, "{records:?}");
            assert_eq!(records[0].text("reason"), "shutdown");
            let what = if on_crash == "open" { "goes past sidetrack" } else { "is blocked" };
            assert!(up.logged().contains(what), "{}", up.logged());
            if on_crash == "open" {
                before.expect_back("after the end");
            }
            assert_eq!(Client::connect(server.address).is_ok(), on_crash == "open");
        });
    }
}
