//! State that clients rely on goes to the new process, and comes back if it gives everything back: addresses of the resolver, ports
//! of services, the cache's folder, the socket for siblings.

use crate::node::peers::{Client, Server};
use crate::node::{Up, admin};
use crate::{Started, Upgrade, ends, stop};
use serde_json::json;
use sidetrack_core::http::htcp::{Message, parse, write_test};
use sidetrack_testkit::{LIMIT, eventually, in_namespace};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const TOP: &str = "default = \"deny\"\n";

/// An upgrade that waits for its confirmation, and the new process.
fn unconfirmed(up: &Up) -> (Upgrade, Started) {
    let mut upgrade = Upgrade::start(&up.folder(), &["--confirm", "60s"]);
    let new = upgrade.started();
    upgrade.until("serves new connections");
    (upgrade, new)
}

/// Does `there` while a new process serves that gives everything back, because it is not confirmed.
fn taken_back(up: &Up, there: impl FnOnce()) {
    let mut upgrade = Upgrade::start(&up.folder(), &["--confirm", "10s"]);
    let new = upgrade.started();
    upgrade.until("serves new connections");
    there();
    let (success, said) = upgrade.ended();
    assert!(!success && said.contains("not confirmed"), "{said}");
    ends(&new);
}

/// An upgrade that succeeds.
fn replaced(up: &Up) -> Started {
    let mut upgrade = Upgrade::start(&up.folder(), &[]);
    let new = upgrade.started();
    let (success, said) = upgrade.ended();
    assert!(success, "{said}");
    new
}

pub(crate) const RESOLVER: &str = "127.0.0.1:5353";

/// The address that the resolver gives for a name (RFC 1035 Sec. 4.1).
pub(crate) fn resolved(name: &str) -> Ipv4Addr {
    let mut bytes = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).expect("a short label"));
        bytes.extend(label.as_bytes());
    }
    bytes.extend([0, 0, 1, 0, 1]);
    let mut stream = TcpStream::connect(RESOLVER).expect("a connection");
    stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
    stream.write_all(&[&[0, u8::try_from(bytes.len()).expect("short")], &bytes[..]].concat()).expect("sent");
    let mut length = [0; 2];
    stream.read_exact(&mut length).expect("a length");
    let mut answer = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!((answer[3] & 15, answer[7]), (0, 1), "{name} has an address: {answer:?}");
    answer.last_chunk::<4>().copied().expect("an address").into()
}

/// By UDP, too: the same socket answers.
fn answers_by_udp() {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.set_read_timeout(Some(LIMIT)).expect("a time-out");
    let query = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x07example\x00\x00\x01\x00\x01";
    socket.send_to(query, RESOLVER).expect("sent");
    assert!(socket.recv(&mut [0; 512]).expect("an answer") > 12);
}

/// Connects to this address by the SOCKS listener (RFC 1928): whether it says yes.
fn reaches(up: &Up, to: Ipv4Addr, port: u16) -> bool {
    let mut stream = TcpStream::connect(up.addresses("socks")[0]).expect("a connection");
    stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
    stream.write_all(&[5, 1, 0]).expect("sent");
    stream.read_exact(&mut [0; 2]).expect("a method");
    stream.write_all(&[&[5, 1, 0, 1], &to.octets()[..], &port.to_be_bytes()].concat()).expect("sent");
    let mut reply = [0; 10];
    stream.read_exact(&mut reply).expect("a reply");
    reply[1] == 0
}

#[test]
fn addresses_of_the_resolver_keep_their_names() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let tables = format!(
            "[dns]\naddress = \"{RESOLVER}\"\nfrom = [\"127.0.0.0/8\"]\nservers = [\"127.0.0.1:9\"]\n\
             [[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n\
             [[rule]]\nname = \"names\"\nmatch = {{ host = \"*.example\" }}\nto = \"{}\"\ncarrier = \"direct\"\n",
            server.address
        );
        let up = Up::start(TOP, &tables);
        let port = server.address.port();
        let first = resolved("a.example");
        assert!(reaches(&up, first, port));
        let mut second = first;
        taken_back(&up, || {
            assert_eq!(resolved("a.example"), first, "the new process knows it");
            answers_by_udp();
            second = resolved("b.example");
            assert!(reaches(&up, second, port) && reaches(&up, first, port));
        });
        assert_ne!(first, second);
        assert_eq!((resolved("a.example"), resolved("b.example")), (first, second), "both have come back");
        answers_by_udp();
        assert!(reaches(&up, second, port));
        let third = resolved("c.example");
        assert!(third != first && third != second);
        let new = replaced(&up);
        for (name, address) in [("c.example", third), ("b.example", second), ("a.example", first)] {
            assert_eq!(resolved(name), address);
        }
        answers_by_udp();
        assert!(reaches(&up, first, port) && reaches(&up, third, port));
        assert_ne!(resolved("d.example"), first);
        drop(stop(up, &new));
    });
}

/// The answer of the interface for services: status and body.
pub(crate) fn ask(at: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(at).expect("the listener");
    stream.set_read_timeout(Some(LIMIT)).expect("a socket");
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .expect("asked");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status"), body.to_owned())
}

#[test]
fn ports_of_services_stay_open() {
    in_namespace(|| {
        let servers: Vec<_> = (0..3).map(|_| Server::start("127.0.0.1")).collect();
        let at: SocketAddr = "127.0.0.1:4000".parse().expect("an address");
        let tables = format!(
            "[outgoing]\nlisten = \"{at}\"\nports = \"5001-5003\"\n\
             [[rule]]\nname = \"all\"\nmatch = {{ to = \"127.0.0.0/8\" }}\ncarrier = \"direct\"\n"
        );
        let up = Up::start(TOP, &tables);
        let path = |server: &Server| {
            let wanted = json!({ "address": format!("http://{}", server.address), "tls": null });
            let (status, body) = ask(at, "POST", "/outgoing/new", &wanted.to_string());
            assert_eq!(status, 200, "{body}");
            SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), body.parse().expect("a port"))
        };
        let works = |path: SocketAddr| {
            let mut client = Client::connect(path).expect("the path");
            client.echo(b"word").expect("an echo");
        };
        let (first, closed) = (path(&servers[0]), path(&servers[1]));
        let mut flow = Client::connect(first).expect("the path");
        flow.echo(b"before").expect("an echo");
        let mut second = first;
        taken_back(&up, || {
            works(first);
            assert_eq!(path(&servers[0]), first, "the same again is the same path");
            assert_eq!(ask(at, "DELETE", &format!("/outgoing/{}", closed.port()), "").0, 200);
            second = path(&servers[2]);
            works(second);
        });
        works(first);
        works(second);
        assert_eq!(path(&servers[2]), second, "a path that the other process has opened");
        if second != closed {
            assert!(TcpStream::connect(closed).is_err(), "a path that the other process has closed");
        }
        flow.echo(b"still").expect("the flow goes on");
        let new = replaced(&up);
        works(first);
        works(second);
        assert_eq!(path(&servers[0]), first);
        flow.echo(b"after").expect("the flow goes on");
        flow.close().expect("an orderly end");
        drop(stop(up, &new));
    });
}

/// A server whose answers may be kept for an hour, and how often it was asked.
fn origin() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (address, asked) = (listener.local_addr().expect("bound"), Arc::new(AtomicUsize::new(0)));
    let count = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count == 1) {
                head.push(byte[0]);
            }
            count.fetch_add(1, Relaxed);
            let body = [b'x'; 20_000];
            let head = format!(
                "HTTP/1.1 200 OK\r\nCache-Control: max-age=3600\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            let _ = stream.write_all(&[head.as_bytes(), &body[..]].concat());
        }
    });
    (address, asked)
}

/// Fetches a path of the origin by the listener, with the right content.
fn fetch(up: &Up, origin: SocketAddr, path: &str) {
    let mut stream = TcpStream::connect(up.addresses("cache")[0]).expect("the listener");
    stream.set_read_timeout(Some(LIMIT)).expect("a socket");
    write!(stream, "GET http://{origin}{path} HTTP/1.1\r\nHost: {origin}\r\nConnection: close\r\n\r\n")
        .expect("asked");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("answered");
    assert!(
        answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(&[b'x'; 20_000]),
        "{} bytes",
        answer.len()
    );
}

/// Files of the cache on disk, as the node in charge says.
fn on_disk(up: &Up, files: usize) {
    let mut body = String::new();
    let text = format!("\"files\":{files},");
    eventually(&format!("{files} files"), || {
        body = admin::ask(up, "GET", "/v1/cache").1;
        body.contains(&text)
    });
}

#[test]
fn the_folder_of_a_cache_has_one_user_at_a_time_and_nothing_is_lost() {
    let (origin, asked) = origin();
    let tables = "[[listen]]\nname = \"cache\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\n\
                  cache = { memory_bytes = 1048576, disk = \"@/cache\" }\n\
                  [[rule]]\nname = \"all\"\ncarrier = \"direct\"\n";
    let up = Up::start(TOP, tables);
    fetch(&up, origin, "/one");
    on_disk(&up, 1);
    fetch(&up, origin, "/one");
    assert_eq!(asked.load(Relaxed), 1);
    taken_back(&up, || {
        on_disk(&up, 1);
        fetch(&up, origin, "/one");
        assert_eq!(asked.load(Relaxed), 1, "the new process has found it");
        fetch(&up, origin, "/two");
        on_disk(&up, 2);
    });
    on_disk(&up, 2);
    fetch(&up, origin, "/one");
    fetch(&up, origin, "/two");
    assert_eq!(asked.load(Relaxed), 2, "both have come back");
    // A process that is killed lets go of the folder, too.
    let (upgrade, new) = unconfirmed(&up);
    fetch(&up, origin, "/three");
    on_disk(&up, 3);
    crate::node::send(new.0, rustix::process::Signal::KILL);
    assert!(!upgrade.ended().0);
    on_disk(&up, 3);
    let new = replaced(&up);
    on_disk(&up, 3);
    ["/one", "/two", "/three"].iter().for_each(|path| fetch(&up, origin, path));
    assert_eq!(asked.load(Relaxed), 3);
    let log = std::fs::read_dir(up.folder().join("cache/new")).expect("the folder").count();
    assert_eq!(log, 0, "no file is left half written");
    drop(stop(up, &new));
}

#[test]
fn siblings_are_answered_by_the_process_in_charge() {
    in_namespace(|| {
        let (origin, _) = origin();
        let at = "127.0.0.1:4827";
        let tables = format!(
            "[[listen]]\nname = \"cache\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\n\
             cache = {{ memory_bytes = 1048576, htcp = {{ address = \"{at}\", from = [\"127.0.0.1\"] }} }}\n\
             [[rule]]\nname = \"all\"\ncarrier = \"direct\"\n"
        );
        let up = Up::start(TOP, &tables);
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        socket.set_read_timeout(Some(LIMIT)).expect("a time-out");
        socket.connect(at).expect("connected");
        let has = |path: &str| {
            let question = write_test(1, format!("http://{origin}{path}").as_bytes(), b"Accept: */*\r\n");
            socket.send(&question.expect("short")).expect("sent");
            let mut bytes = [0; 2000];
            let length = socket.recv(&mut bytes).expect("an answer");
            matches!(parse(&bytes[..length]), Some(Message::Answer { has: true, .. }))
        };
        fetch(&up, origin, "/one");
        assert!(has("/one") && !has("/two"));
        taken_back(&up, || {
            fetch(&up, origin, "/two");
            // What is in memory does not move: the answers are those of the new process.
            eventually("the new process answers", || has("/two") && !has("/one"));
        });
        eventually("the old process answers again", || has("/one") && !has("/two"));
        let new = replaced(&up);
        fetch(&up, origin, "/three");
        eventually("the last process answers", || has("/three") && !has("/one"));
        drop(stop(up, &new));
    });
}
