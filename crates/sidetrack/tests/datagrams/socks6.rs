//! UDP ASSOCIATE of SOCKS6 (draft-olteanu-intarea-socks-6) at a `socks` listener, by a client that writes and reads each byte
//! itself. Our own hop is tested in `masque.rs`.

use super::node::{Up, admin};
use super::socks::{RULES, up};
use super::{Echo, dropped};
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};

/// A client with an association.
struct Client {
    connection: TcpStream,
    socket: UdpSocket,
    relay: SocketAddr,
    id: [u8; 8],
}

/// Asks for UDP ASSOCIATE. Returns the connection, the code and the bound address.
fn ask(up: &Up) -> (TcpStream, u8, SocketAddr) {
    let mut connection = TcpStream::connect(up.addresses("proxy")[0]).unwrap();
    connection.set_read_timeout(Some(LIMIT)).unwrap();
    connection.write_all(&[6, 3, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]).unwrap();
    let mut head = [0; 4];
    let options = |connection: &mut TcpStream, head: &[u8; 4]| {
        let mut skipped = vec![0; usize::from(u16::from_be_bytes([head[2], head[3]]))];
        connection.read_exact(&mut skipped).unwrap();
    };
    connection.read_exact(&mut head).unwrap();
    assert_eq!(head[..2], [6, 0], "the Authentication Reply");
    options(&mut connection, &head);
    connection.read_exact(&mut head).unwrap();
    let mut bound = [0; 8];
    connection.read_exact(&mut bound).unwrap();
    assert_eq!((head[0], bound[3]), (6, 1), "an IPv4 address");
    options(&mut connection, &head);
    let ip = Ipv4Addr::new(bound[4], bound[5], bound[6], bound[7]);
    (connection, head[1], SocketAddr::new(ip.into(), u16::from_be_bytes([bound[0], bound[1]])))
}

/// Reads a message of the connection: its type and what follows the header.
fn message(connection: &mut TcpStream) -> (u8, [u8; 8], Vec<u8>) {
    let mut head = [0; 12];
    connection.read_exact(&mut head).unwrap();
    assert_eq!(head[0], 6);
    let mut rest = vec![0; usize::from(u16::from_be_bytes([head[2], head[3]])) - 12];
    connection.read_exact(&mut rest).unwrap();
    (head[1], head[4..].try_into().unwrap(), rest)
}

impl Client {
    fn new(up: &Up) -> Self {
        let (mut connection, code, relay) = ask(up);
        assert_eq!(code, 0);
        let (kind, id, rest) = message(&mut connection);
        assert_eq!((kind, rest.len()), (1, 0), "the association is announced");
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        Self { connection, socket, relay, id }
    }

    /// Writes a datagram to this address type, address and port.
    fn datagram(&self, (kind, address): (u8, &[u8]), port: u16, payload: &[u8]) -> Vec<u8> {
        let length = u16::try_from(16 + address.len() + payload.len()).unwrap().to_be_bytes();
        let port = port.to_be_bytes();
        [&[6, 3], &length[..], &self.id, &[kind, 0], &port, address, payload].concat()
    }

    fn to(&self, server: SocketAddr, payload: &[u8]) -> Vec<u8> {
        match server.ip() {
            IpAddr::V4(ip) => self.datagram((1, &ip.octets()), server.port(), payload),
            IpAddr::V6(ip) => self.datagram((4, &ip.octets()), server.port(), payload),
        }
    }

    fn send(&self, datagram: &[u8]) {
        self.socket.send_to(datagram, self.relay).unwrap();
    }

    #[track_caller]
    fn receives(&self, datagram: &[u8]) {
        let mut buffer = [0; 2048];
        let (length, from) = self.socket.recv_from(&mut buffer).expect("an answer");
        assert_eq!((from, &buffer[..length]), (self.relay, datagram));
    }

    fn is_confirmed(&mut self) {
        assert_eq!(message(&mut self.connection), (2, self.id, Vec::new()));
    }
}

#[test]
fn one_association_reaches_servers_of_both_families_and_names_by_udp() {
    let servers = [Echo::start("127.0.0.1"), Echo::start("::1")];
    let mut up = up("", RULES);
    let mut client = Client::new(&up);
    // A server of its own opens the way with an empty datagram to nowhere.
    client.send(&client.datagram((1, &[0; 4]), 0, b""));
    client.is_confirmed();
    for server in &servers {
        for payload in [&b"hello"[..], b"", &[7; 1200]] {
            let datagram = client.to(server.address, payload);
            client.send(&datagram);
            client.receives(&datagram);
        }
    }
    let port = servers[0].address.port();
    // The length of a name counts its padding.
    client.send(&client.datagram((3, b"\x0blocalhost\0\0"), port, b"by name"));
    client.receives(&client.to(servers[0].address, b"by name"));
    let mut stranger = client.to(servers[0].address, b"guess");
    stranger[11] ^= 1;
    client.send(&stranger);
    eventually("another id is dropped", || dropped(&up, "unknown") == 1);
    let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    other.send_to(&client.to(servers[0].address, b"x"), client.relay).unwrap();
    eventually("another port is dropped", || dropped(&up, "stranger") == 1);
    let whole = client.to(servers[0].address, b"whole");
    for length in 0..whole.len() {
        client.send(&whole[..length]);
    }
    client.send(&[&whole[..], b"padding"].concat());
    client.receives(&whole);
    let cut = whole.len() as u64;
    eventually("those that are cut are counted", || dropped(&up, "malformed") == cut);
    let flows = admin::flows(&up);
    assert_eq!(flows.len(), 4, "the connection and three flows: {flows:?}");
    drop(client);
    for record in (0..4).map(|_| up.record()) {
        assert_eq!(record.text("reason"), "ok", "{record:?}");
    }
}

#[test]
fn datagrams_pass_in_the_connection_wherever_it_is_cut() {
    let server = Echo::start("127.0.0.1");
    let mut up = up("", RULES);
    let mut client = Client::new(&up);
    let datagram = client.to(server.address, b"in the connection");
    for cut in 0..=datagram.len() {
        let (one, other) = datagram.split_at(cut);
        client.connection.write_all(one).unwrap();
        client.connection.write_all(other).unwrap();
        if cut == 0 {
            client.is_confirmed();
        }
        let mut answer = vec![0; datagram.len()];
        client.connection.read_exact(&mut answer).unwrap();
        assert_eq!(answer, datagram, "cut at {cut}");
    }
    // The way is fixed: the same by UDP is dropped.
    client.send(&datagram);
    eventually("it is dropped", || dropped(&up, "stranger") == 1);
    client.connection.write_all(&[5, 3, 0, 12]).unwrap();
    assert!(matches!(client.connection.read(&mut [0; 16]), Ok(0) | Err(_)), "what is not a message ends it");
    let reasons = [up.record(), up.record()].map(|record| record.text("reason").to_owned());
    assert_eq!(reasons, ["bad_request", "bad_request"]);
}

#[test]
fn a_client_that_reads_nothing_costs_datagrams_and_no_memory() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    server.set_read_timeout(Some(LIMIT)).unwrap();
    let up = up("", RULES);
    let mut client = Client::new(&up);
    let datagram = client.to(server.local_addr().unwrap(), b"x");
    client.connection.write_all(&datagram).unwrap();
    let (_, outside) = server.recv_from(&mut [0; 16]).unwrap();
    let payload = vec![1; 60_000];
    eventually("datagrams to the client are dropped", || {
        for _ in 0..20 {
            server.send_to(&payload, outside).unwrap();
        }
        dropped(&up, "unsent") > 0
    });
    assert_eq!(admin::flows(&up).len(), 2);
}

#[test]
fn where_it_is_off_it_is_refused() {
    assert_eq!(ask(&up("udp_ports = \"off\"", RULES)).1, 7);
}
