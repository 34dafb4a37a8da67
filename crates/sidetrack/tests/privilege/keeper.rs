//! The keeper on its own: what it refuses, and what its end means.

use crate::node::peers::{Client, Server};
use crate::node::traces::Traces;
use crate::node::{Dice, Up, send};
use rustix::process::Signal;
use sidetrack::keeper::{ARGUMENT, Alone, Ask, Begin, Order, REQUEST_MAX, Redirected, Selected, Transparent};
use sidetrack::process::ClientSocket;
use sidetrack_core::flow::Protocol;
use sidetrack_sys::{process, scm};
use sidetrack_testkit::in_namespace;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};

/// Requests that are none.
const GARBAGE: usize = 300;

/// What a keeper may hold in memory at most, kB.
const MEMORY_MAX_KB: u64 = 200_000;

/// A keeper with its socket in our hands.
struct Bare {
    child: Child,
    end: OwnedFd,
}

impl Bare {
    fn start() -> Self {
        Self::begun(Begin { closed: false, owners: false })
    }

    fn begun(begin: Begin) -> Self {
        let (end, theirs) = scm::pair().expect("a pair");
        let child = Command::new(env!("CARGO_BIN_EXE_sidetrack"))
            .arg(ARGUMENT)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary");
        let keeper = Self { child, end };
        assert_eq!(keeper.tell(&Ask::Begin(begin)), "\"Begun\"");
        keeper
    }

    /// Sends bytes and gives what is answered; none if the keeper ended.
    fn ask(&self, bytes: &[u8]) -> Option<String> {
        self.ask_with(bytes, &[])
    }

    fn ask_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Option<String> {
        scm::send(&self.end, bytes, fds).ok()?;
        let limit = Some(sidetrack_testkit::LIMIT);
        assert!(scm::wait(&self.end, limit).expect("poll"), "no answer in time to {bytes:?}");
        let message = scm::receive(&self.end).ok()??;
        Some(String::from_utf8(message.bytes).expect("text"))
    }

    /// Asks, and gives the answer.
    fn tell(&self, ask: &Ask) -> String {
        self.ask(&serde_json::to_vec(ask).expect("JSON")).expect("an answer")
    }

    /// Sends an order with these descriptors as proof; gives the last answer.
    fn steer(&self, proofs: &[BorrowedFd<'_>], order: Order) -> String {
        let ask = serde_json::to_vec(&Ask::Listeners).expect("JSON");
        let proved = self.ask_with(&ask, proofs).expect("an answer");
        let steered = self.tell(&Ask::Steer(order));
        if proved == "\"Listening\"" { steered } else { format!("{proved} {steered}") }
    }

    /// Bytes attached as one descriptor, as a large request comes.
    fn attach(&self, attached: BorrowedFd<'_>) -> String {
        self.ask_with(b"\0", &[attached]).expect("an answer")
    }

    /// The most memory it ever had, kB.
    fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("VmHWM");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    /// Closes the socket; what it had to say, and how it ended.
    fn finish(self) -> (std::process::ExitStatus, String) {
        drop(self.end);
        let output = self.child.wait_with_output().expect("ended");
        (output.status, String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// Every connection of this host to the first listener.
fn everything() -> Order {
    let local = vec![Selected { to_this_host: true, ..Selected::default() }];
    Order {
        redirects: vec![Redirected { listener: 0, local, forwarded: vec![], hold: None }],
        ..Order::default()
    }
}

fn refused(answer: &str) -> bool {
    answer.starts_with("{\"Failed\":")
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
        let request = serde_json::to_vec(&Ask::Steer(everything())).expect("JSON");
        let answer = keeper.ask(&request).expect("an answer");
        assert!(refused(&answer), "an order without its listener is refused: {answer}");
        let mut dice = Dice(1);
        for _ in 0..GARBAGE {
            let bytes = garbage(&mut dice, &request);
            let answer = keeper.ask(&bytes).unwrap_or_else(|| panic!("it ended at {bytes:?}"));
            assert!(refused(&answer), "{answer} to {bytes:?}");
        }
        let flows = keeper.ask(b"\"Flows\"").expect("an answer");
        assert_eq!(flows, "{\"Flows\":[]}", "it serves on");
        let (status, said) = keeper.finish();
        assert!(status.success() && !said.contains("panic"), "{status}: {said}");
        before.expect_back("after the end");
    });
}

/// A holder of its socket that wants to read what only the keeper's capabilities can.
#[test]
fn no_file_is_read_and_no_content_quoted() {
    in_namespace(|| {
        let before = Traces::now();
        let keeper = Bare::begun(Begin { closed: false, owners: true });
        let shadow = std::fs::File::open("/etc/shadow").expect("root reads it");
        let text = std::fs::read_to_string("/etc/shadow").expect("root reads it");
        let secret = text.lines().next().expect("a line");
        let answer = keeper.attach(shadow.as_fd());
        assert!(refused(&answer) && !answer.contains(secret), "{answer}");
        // As an attachment of the right kind.
        let answer = keeper.attach(scm::attach(text.as_bytes()).expect("memory").as_fd());
        assert!(refused(&answer) && !answer.contains("root"), "{answer}");
        // The form of earlier versions: a configuration, whose lists and passwords are files.
        let config = "version = 1\ndefault = \"deny\"\n[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n\
                      users_file = \"/etc/shadow\"\n[[rule]]\nmatch = { host_file = \"/etc/shadow\" }\naction = \"deny\"\n";
        for name in ["/etc/shadow", "x.toml"] {
            let order = serde_json::json!({"Steer": {
                "name": name, "text": config, "bound": [], "first_path": 0, "forwards": {"v4": true, "v6": true},
            }});
            let answer = keeper.ask(order.to_string().as_bytes()).expect("an answer");
            assert!(refused(&answer) && !answer.contains("root") && !answer.contains("shadow"), "{answer}");
        }
        assert!(keeper.finish().0.success());
        before.expect_back("after the end");
    });
}

#[test]
fn connections_are_led_only_to_listeners_that_came_along() {
    in_namespace(|| {
        let before = Traces::now();
        let keeper = Bare::start();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let datagrams = UdpSocket::bind("127.0.0.1:0").expect("a port");
        let other_loopback = TcpListener::bind("127.0.0.2:0").expect("a port");
        let elsewhere = std::thread::spawn(|| {
            sidetrack_testkit::enter_new_namespace();
            TcpListener::bind("127.0.0.1:0").expect("a port")
        });
        let elsewhere = elsewhere.join().expect("a namespace");
        let connected = std::net::TcpStream::connect(listener.local_addr().expect("bound")).expect("connect");
        let file = std::fs::File::open("/dev/null").expect("a file");
        let proofs: [(&str, &[BorrowedFd<'_>]); 7] = [
            ("none", &[]),
            ("UDP", &[datagrams.as_fd()]),
            ("a connection", &[connected.as_fd()]),
            ("a file", &[file.as_fd()]),
            ("another namespace", &[elsewhere.as_fd()]),
            ("an address that redirects do not lead to", &[other_loopback.as_fd()]),
            ("one of two is wrong", &[listener.as_fd(), file.as_fd()]),
        ];
        for (what, proofs) in proofs {
            let answer = keeper.steer(proofs, everything());
            assert!(refused(&answer), "{what}: {answer}");
        }
        assert!(keeper.finish().0.success());
        before.expect_back("after the end");
    });
}

/// Connections that are redirected to the listener with this index.
fn redirected(listener: usize, local: &[Selected], forwarded: &[Selected], hold: Option<u16>) -> Order {
    let one = Redirected { listener, local: local.to_vec(), forwarded: forwarded.to_vec(), hold };
    Order { redirects: vec![one], ..Order::default() }
}

#[test]
fn orders_that_no_configuration_leads_to_are_refused() {
    in_namespace(|| {
        let before = Traces::now();
        let keeper = Bare::start();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let proof = listener.as_fd();
        let some = [Selected::default()];
        let orders = [
            ("a second listener", redirected(1, &some, &[], None)),
            ("forwarded to loopback", redirected(0, &[], &some, None)),
            ("a queue of other programs", redirected(0, &some, &[], Some(1))),
            (
                "not transparent",
                Order {
                    tproxies: vec![Transparent {
                        listener: 0,
                        selected: vec![Selected::default()],
                        local: vec![],
                        only_known: false,
                        hold: None,
                    }],
                    ..Order::default()
                },
            ),
            (
                "DNAT of another's port",
                Order {
                    paths: vec![Alone::Dnat {
                        listener: 1,
                        server: "127.0.0.1:9".parse().expect("an address"),
                        masquerade: false,
                    }],
                    ..Order::default()
                },
            ),
            ("rules that stay", Order { closed: true, ..everything() }),
        ];
        for (what, order) in orders {
            let answer = keeper.steer(&[proof], order);
            assert!(refused(&answer), "{what}: {answer}");
        }
        assert_eq!(keeper.steer(&[proof], everything()), "{\"Steered\":{\"warnings\":[]}}");
        // What was proved counts once.
        assert!(refused(&keeper.tell(&Ask::Steer(everything()))));
        assert!(keeper.finish().0.success());
        before.expect_back("after the end");
    });
}

#[test]
fn what_the_keeper_was_not_started_for_is_refused() {
    in_namespace(|| {
        let keeper = Bare::start();
        let wider = Ask::Begin(Begin { closed: true, owners: true });
        assert!(refused(&keeper.tell(&wider)), "it cannot be widened");
        let [local, remote] = ["127.0.0.1:1", "127.0.0.1:2"].map(|text| text.parse().expect("an address"));
        let socket = ClientSocket { protocol: Protocol::Tcp, local, remote, redirected_to: None };
        assert!(refused(&keeper.tell(&Ask::Owner(socket))));
        assert!(keeper.finish().0.success());
        let keeper = Bare::begun(Begin { closed: false, owners: true });
        assert!(!refused(&keeper.tell(&Ask::Owner(socket))));
        assert!(keeper.finish().0.success());
    });
}

#[test]
fn giant_requests_take_no_memory() {
    in_namespace(|| {
        let keeper = Bare::start();
        // As large as was once enough for three gigabytes.
        let giant = rustix::fs::memfd_create("giant", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("memory");
        rustix::fs::ftruncate(&giant, 300 << 20).expect("length");
        assert!(refused(&keeper.attach(giant.as_fd())), "not sealed");
        use rustix::fs::SealFlags;
        rustix::fs::fcntl_add_seals(&giant, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK)
            .expect("sealed");
        assert!(refused(&keeper.attach(giant.as_fd())), "too large");
        // The most that may come, of what takes most memory for its bytes.
        let one = serde_json::to_string(&Ask::Steer(everything())).expect("JSON");
        for (from, filling) in [("\"spare\":[", "\"::\","), ("\"spare\":[", "["), ("\"redirects\":[", "{},")]
        {
            let (head, tail) = one.split_at(one.find(from).expect("a list") + from.len());
            let count = (REQUEST_MAX - one.len()) / filling.len();
            let text = format!("{head}{}{tail}", filling.repeat(count));
            let answer = keeper.attach(scm::attach(text.as_bytes()).expect("memory").as_fd());
            assert!(refused(&answer), "{answer}");
        }
        assert!(keeper.memory() < MEMORY_MAX_KB, "{} kB", keeper.memory());
        assert_eq!(keeper.tell(&Ask::Flows), "{\"Flows\":[]}", "it serves on");
        assert!(keeper.finish().0.success());
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
            assert!(sidetrack_testkit::readable(keeper.as_fd(), sidetrack_testkit::LIMIT));
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
