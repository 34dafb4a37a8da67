//! Flows of UDP through a tunnel between two nodes: over QUIC, where what fits travels in QUIC datagrams, and over TLS.

use super::node::{Up, admin};
use super::socks::Associated;
use super::{Echo, LONGEST, client, echo};
use rustix::process::Signal;
use sidetrack::tls::{Made, Pin, self_signed};
use sidetrack_testkit::{LIMIT, eventually};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const TRANSPORTS: [&str; 2] = ["quic", "tls"];

/// The keys of both ends.
struct Keys {
    folder: TempDir,
    near: Made,
    far: Made,
}

impl Keys {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [near, far] = ["near.test", "far.test"].map(|name| self_signed(name, 1).unwrap());
        for (name, made) in [("near", &near), ("far", &far)] {
            std::fs::write(folder.path().join(name), made.identity_pem()).unwrap();
        }
        Self { folder, near, far }
    }

    fn of(&self, own: &str, other: &Made) -> String {
        let pin = Pin::of_pem(&other.certificate_pem).unwrap();
        format!("identity = \"{}\"\npins = [\"{pin}\"]\n", self.folder.path().join(own).display())
    }

    /// A far side with these rules.
    fn far(&self, rules: &str) -> Up {
        let keys = self.of("far", &self.near);
        let listener = "[[listen]]\nname = \"far\"\nkind = \"tunnel\"\naddress = \"127.0.0.1:0\"\n";
        // Its flows end at once when it is told to stop.
        let limits = "[limits]\ndrain_ms = 0\n";
        Up::start("default = \"deny\"\n", &format!("{limits}{listener}{keys}{rules}"))
    }

    /// A near side with a UDP port for this server, and a tunnel to these far sides.
    fn near(&self, server: SocketAddr, far: &[&Up], tunnel: &str) -> Up {
        let addresses: Vec<_> = far.iter().map(|far| format!("\"{}\"", far.addresses("far")[0])).collect();
        let (keys, addresses) = (self.of("near", &self.far), addresses.join(", "));
        Up::start(
            "default = \"deny\"\n",
            &format!(
                "[[listen]]\nname = \"dns\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\n\
                 to = \"{server}\"\n[[tunnel]]\nname = \"t\"\naddress = [{addresses}]\n{keys}{tunnel}\n\
                 [[rule]]\nname = \"over\"\nmatch = {{ protocol = \"udp\" }}\ncarrier = \"tunnel:t\"\n"
            ),
        )
    }
}

const ALLOWED: &str = "[[rule]]\nname = \"from-near\"\ncarrier = \"direct\"\n\
                       match = { protocol = \"udp\", socks_user = \"near.test\", intercept = \"tunnel\" }\n";

#[test]
fn datagrams_of_every_length_pass_and_both_ends_have_a_record() {
    for transport in TRANSPORTS {
        let (server, keys) = (Echo::start("127.0.0.1"), Keys::new());
        let mut far = keys.far(ALLOWED);
        let mut near = keys.near(server.address, &[&far], &format!("transport = \"{transport}\""));
        let client = client(near.addresses("dns")[0]);
        let longest: Vec<u8> = (0..LONGEST).map(|at| (at % 251) as u8).collect();
        // Those that do not fit in one packet travel in the stream.
        for length in [5, 0, 1, 1150, 1200, 1400, 9000, LONGEST] {
            assert!(echo(&client, &longest[..length]) == longest[..length], "{transport}, {length} bytes");
        }
        let from = client.local_addr().unwrap();
        let shown = admin::flows(&near).remove(0);
        assert!(shown.text("path").starts_with(transport), "{shown:?}");
        let (status, body) = admin::ask(&near, "DELETE", &format!("/v1/flows/{}", shown.number("flow")));
        assert_eq!(status, 200, "{body}");
        let record = near.record();
        assert_eq!(record.fate(), ("over", "tunnel:t", "killed"));
        assert_eq!((record.address("client"), record.number("packets_up")), (from, 8));
        let there = far.record();
        assert_eq!(there.fate(), ("from-near", "direct", "ok"), "{there:?}");
        assert_eq!((there.text("protocol"), there.text("intercept")), ("udp", "tunnel"));
        assert_eq!((there.address("client"), there.address("orig_dst")), (from, server.address));
        for record in [&record, &there] {
            assert_eq!(record.number("packets_down"), 8, "{record:?}");
            assert_eq!(record.number("bytes_up"), record.number("bytes_down"));
        }
    }
}

#[test]
fn many_flows_share_one_connection_and_do_not_mix() {
    let (server, keys) = (Echo::start("127.0.0.1"), Keys::new());
    let far = keys.far(ALLOWED);
    let near = keys.near(server.address, &[&far], "transport = \"quic\"");
    let clients: Vec<_> = (0..50).map(|_| client(near.addresses("dns")[0])).collect();
    for round in 0..4_u8 {
        for (number, client) in (0..).zip(&clients) {
            client.send(&[round, number]).unwrap();
        }
        for (number, client) in (0..).zip(&clients) {
            let mut answer = [0; 8];
            assert_eq!(client.recv(&mut answer).expect("an answer"), 2);
            assert_eq!(answer[..2], [round, number]);
        }
    }
    assert_eq!(admin::flows(&far).len(), clients.len());
}

#[test]
fn a_refusal_of_the_far_side_reaches_the_record() {
    for transport in TRANSPORTS {
        let (server, keys) = (Echo::start("127.0.0.1"), Keys::new());
        let mut far =
            keys.far("[[rule]]\nname = \"no\"\nmatch = { protocol = \"udp\" }\naction = \"deny\"\n");
        let mut near = keys.near(server.address, &[&far], &format!("transport = \"{transport}\""));
        client(near.addresses("dns")[0]).send(b"x").unwrap();
        let record = near.record();
        assert_eq!(record.fate(), ("over", "tunnel:t", "hop_failed"));
        let detail = record.text("detail");
        assert!(
            detail.contains("tunnel 't'") && detail.contains("the far side says policy_denied"),
            "{detail}"
        );
        assert_eq!(far.record().fate(), ("no", "", "policy_denied"));
    }
}

#[test]
fn what_ends_at_the_far_side_ends_here_and_begins_again_by_the_other_path() {
    let (server, keys) = (Echo::start("127.0.0.1"), Keys::new());
    let [mut first, second] = [(); 2].map(|()| keys.far(ALLOWED));
    let mut near = keys.near(server.address, &[&first, &second], "transport = \"quic\"");
    let client = client(near.addresses("dns")[0]);
    assert_eq!(echo(&client, b"a"), b"a");
    let flow = admin::flows(&first).remove(0);
    let (status, body) = admin::ask(&first, "DELETE", &format!("/v1/flows/{}", flow.number("flow")));
    assert_eq!(status, 200, "{body}");
    assert_eq!(first.record().text("reason"), "killed");
    let record = near.record();
    assert_eq!(record.fate(), ("over", "tunnel:t", "hop_failed"));
    assert_eq!(echo(&client, b"b"), b"b", "the next datagram begins another one");
    first.signal(Signal::TERM);
    let record = near.record();
    assert_eq!(record.fate(), ("over", "tunnel:t", "hop_failed"));
    assert!(record.text("detail").contains("tunnel 't'"), "{record:?}");
    // A datagram may meet the path while it goes down: UDP repeats it.
    client.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let (end, mut answer) = (Instant::now() + LIMIT, [0; 8]);
    loop {
        client.send(b"c").unwrap();
        if client.recv(&mut answer).is_ok() {
            break;
        }
        assert!(Instant::now() < end, "the other path carries it");
    }
    eventually("it is at the second far side", || admin::flows(&second).len() == 1);
}

#[test]
fn our_own_ports_of_tunnels_and_of_the_overlay_are_loops() {
    let keys = Keys::new();
    let file = keys.folder.path().join("overlay");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    let made = command.args(["overlay", "key"]).arg(&file).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let key = String::from_utf8(made.stdout).unwrap();
    let tables = format!(
        "[[listen]]\nname = \"proxy\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n\
         [[listen]]\nname = \"shared\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\nudp_ports = \"shared\"\n\
         [[listen]]\nname = \"far\"\nkind = \"tunnel\"\naddress = \"127.0.0.1:0\"\n{}\
         [overlay]\nname = \"own\"\nkey_file = \"{}\"\nlisten = \"127.0.0.1:0\"\n\
         [overlay.node.own]\nkey = \"{}\"\n",
        keys.of("far", &keys.near),
        file.display(),
        key.trim()
    );
    let mut up = Up::start("default = \"direct\"\n", &tables);
    let log = up.logged();
    let of_overlay =
        log.lines().find(|line| line.contains(": listening ") && line.contains("kind=\"overlay\""));
    let of_overlay = of_overlay.unwrap().rsplit_once("address=").unwrap().1.to_owned();
    let client = Associated::new(up.addresses("proxy")[0]);
    for own in [up.addresses("far")[0].to_string(), up.addresses("shared")[0].to_string(), of_overlay] {
        client.send(&own, b"back to us");
        let record = up.record();
        assert_eq!((record.text("protocol"), record.text("reason")), ("udp", "loop"), "{own}: {record:?}");
    }
}
