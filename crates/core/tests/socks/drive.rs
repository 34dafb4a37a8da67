//! Drives one machine with bytes in pieces and writes down what it did, in a form that does not depend on the pieces.
//! The fuzz targets include this file too.

use sidetrack_core::carrier::{Credentials, Socks6Dialect};
use sidetrack_core::flow::Destination;
use sidetrack_core::socks::server::{Input, MAX_PIPELINED_LEN, Output, Reply, Request, ServerConfig};
use sidetrack_core::socks::v6::{
    ClientCommand, SessionId, SessionLimits, SessionQuery, SessionTable, SessionUse, StackOption,
    UdpDatagram, UdpMessage,
};
use sidetrack_core::socks::{Client, Command, Server, client, v5, v6};
use sidetrack_core::time::Instant;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

/// What a server machine did.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Served {
    /// All it sent.
    pub sent: Vec<u8>,
    /// The request, without its first bytes.
    pub request: Option<Request>,
    /// What it asked of the session table.
    pub queries: Vec<SessionQuery>,
    /// Client bytes for the destination.
    pub delivered: Vec<u8>,
    /// `Done` (without leftover), `Finished` or `Failed`.
    pub end: Option<Output>,
}

/// Hands `pieces` and then the end of the stream to a server, answering what it asks: dials give `reply`.
pub(crate) fn serve<'a>(
    config: &ServerConfig,
    pieces: impl IntoIterator<Item = &'a [u8]>,
    reply: &Reply,
) -> Served {
    let now = Instant::ZERO;
    let mut server = Server::new(Arc::new(config.clone()), now);
    let mut table = SessionTable::new(SessionLimits::default(), [7; 16]);
    let mut served = Served::default();
    for piece in pieces {
        if matches!(served.end, Some(Output::Done { .. })) {
            served.delivered.extend_from_slice(piece);
            continue;
        }
        let room = server.wants_bytes();
        server.handle(now, Input::Bytes(piece));
        pump(&mut server, &mut table, &mut served, reply);
        assert!(room || served.end.is_some(), "a server that wants no bytes has ended or fails on more");
        assert!(piece.len() < MAX_PIPELINED_LEN);
    }
    server.handle(now, Input::Eof);
    pump(&mut server, &mut table, &mut served, reply);
    // Nothing is left that a later event could bring out.
    server.handle(now + Duration::from_secs(3600), Input::Tick);
    assert_eq!(server.poll(), None, "output after the end: {served:?}");
    assert_eq!(server.deadline(), None, "a deadline after the end: {served:?}");
    served
}

fn pump(server: &mut Server, table: &mut SessionTable, served: &mut Served, reply: &Reply) {
    let (now, address) = (Instant::ZERO, IpAddr::V4(Ipv4Addr::LOCALHOST));
    while let Some(output) = server.poll() {
        assert!(served.end.is_none(), "output after the end: {output:?}");
        match output {
            Output::Send(bytes) => served.sent.extend_from_slice(&bytes),
            Output::Session(query) => {
                let answer = table.answer(now, address, &query, *b"0123456789abcdef\xff\xff\xff\xf0");
                served.queries.push(query);
                server.handle(now, Input::Session(answer));
            }
            Output::Request(mut request) => {
                served.delivered.append(&mut request.first_bytes);
                let is_bind = request.command == Command::Bind;
                assert_eq!(served.request.replace(*request), None, "two requests");
                served.delivered.append(&mut server.take_pipelined());
                server.handle(now, Input::Reply(reply.clone()));
                if is_bind {
                    // The second one tells of the peer. After a failure it is ignored.
                    server.handle(now, Input::Reply(reply.clone()));
                }
            }
            Output::Done { mut leftover } => {
                served.delivered.append(&mut leftover);
                served.end = Some(Output::Done { leftover });
            }
            end @ (Output::Finished | Output::Failed { .. }) => served.end = Some(end),
        }
    }
}

/// What a client machine did.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Dialled {
    /// All it sent.
    pub sent: Vec<u8>,
    /// `Connected` (without leftover) or `Failed`.
    pub end: Option<client::Output>,
    /// Server bytes for the application.
    pub received: Vec<u8>,
}

/// Hands `pieces` and then the end of the stream to a client.
pub(crate) fn dial<'a>(mut client: Client, pieces: impl IntoIterator<Item = &'a [u8]>) -> Dialled {
    let now = Instant::ZERO;
    let mut dialled = Dialled::default();
    drain(&mut client, &mut dialled);
    for piece in pieces {
        if dialled.end.is_some() {
            dialled.received.extend_from_slice(piece);
        } else {
            client.handle(now, client::Input::Bytes(piece));
            drain(&mut client, &mut dialled);
        }
    }
    client.handle(now, client::Input::Eof);
    drain(&mut client, &mut dialled);
    assert!(dialled.end.is_some(), "a client always ends");
    assert_eq!(client.deadline(), None);
    if matches!(dialled.end, Some(client::Output::Failed { .. })) {
        dialled.received.clear();
    }
    dialled
}

fn drain(client: &mut Client, dialled: &mut Dialled) {
    while let Some(output) = client.poll() {
        assert!(dialled.end.is_none(), "output after the end: {output:?}");
        match output {
            client::Output::Send(bytes) => dialled.sent.extend_from_slice(&bytes),
            client::Output::Connected(mut connected) => {
                dialled.received.append(&mut connected.leftover);
                dialled.end = Some(client::Output::Connected(connected));
            }
            failed @ client::Output::Failed { .. } => dialled.end = Some(failed),
        }
    }
}

fn credentials() -> Credentials {
    Credentials { user: "user".into(), password: "pass".into() }
}

/// Servers that differ in all that changes how bytes are read.
pub(crate) fn server_configs() -> Vec<ServerConfig> {
    use sidetrack_core::socks::server::ServerDialect::{Auto, Draft, Socksx};
    let mut configs = Vec::new();
    for dialect in [Auto, Draft, Socksx] {
        for accounts in [vec![], vec![credentials()]] {
            for sessions in [false, true] {
                configs.push(ServerConfig {
                    dialect,
                    accounts: accounts.clone(),
                    sessions,
                    // With and without the other commands.
                    udp: sessions,
                    bind: sessions,
                    ..ServerConfig::default()
                });
            }
        }
    }
    configs
}

/// One of the version 5 clients.
pub(crate) fn v5_client(destination: &Destination, password: bool, optimistic: bool) -> Client {
    let config = v5::ClientConfig {
        command: Command::Connect,
        destination: destination.clone(),
        credentials: password.then(credentials),
        optimistic,
        initial_data: b"hello".to_vec(),
        handshake_timeout: Duration::from_secs(10),
    };
    Client::V5(Box::new(v5::Client::new(config, Instant::ZERO)))
}

/// One of the version 6 clients.
pub(crate) fn v6_client(
    destination: &Destination,
    password: bool,
    session: u8,
    dialect: Socks6Dialect,
) -> Client {
    let session = match session % 3 {
        0 => SessionUse::None,
        1 => SessionUse::Begin { token_request: Some(16) },
        _ => SessionUse::Resume {
            id: SessionId::from_bytes(b"0123456789abcdef").expect("sixteen bytes"),
            token_request: None,
            token_spend: Some(7),
        },
    };
    let config = v6::ClientConfig {
        command: ClientCommand::Connect(destination.clone()),
        dialect,
        credentials: password.then(credentials),
        metadata: Vec::new(),
        stack: vec![StackOption::Tfo(5)],
        initial_data: b"hello".to_vec(),
        session,
        handshake_timeout: Duration::from_secs(10),
    };
    Client::V6(Box::new(v6::Client::new(config, Instant::ZERO)))
}

/// Cuts bytes into pieces whose lengths the bytes themselves decide.
fn pieces(bytes: &[u8]) -> Vec<&[u8]> {
    let (mut rest, mut pieces) = (bytes, Vec::new());
    while let Some(first) = rest.first() {
        let (piece, tail) = rest.split_at(rest.len().min(1 + usize::from(first % 7)));
        pieces.push(piece);
        rest = tail;
    }
    pieces
}

fn destination() -> Destination {
    Destination { host: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)).into(), port: 443, zone: 0 }
}

/// Any bytes, from a client to every server: no panic, and the same result in one piece as in many.
pub(crate) fn any_bytes_to_servers(bytes: &[u8]) {
    let bytes = bytes.get(..MAX_PIPELINED_LEN - 1).unwrap_or(bytes);
    let reply = Reply::connected(([198, 51, 100, 7], 40000).into());
    for config in server_configs() {
        let whole = serve(&config, [bytes], &reply);
        let split = serve(&config, pieces(bytes), &reply);
        assert_eq!(whole, split, "the pieces change the result");
    }
}

/// As [`any_bytes_to_servers`], as version 6.
pub(crate) fn any_bytes_to_servers_v6(bytes: &[u8]) {
    any_bytes_to_servers(&[&[6], bytes].concat());
}

/// As [`any_bytes_to_servers`], as version 5.
pub(crate) fn any_bytes_to_servers_v5(bytes: &[u8]) {
    any_bytes_to_servers(&[&[5], bytes].concat());
}

/// Any bytes, from a proxy to the version 5 clients.
pub(crate) fn any_bytes_to_clients_v5(bytes: &[u8]) {
    for (password, optimistic) in [(false, false), (false, true), (true, false), (true, true)] {
        let client = || v5_client(&destination(), password, optimistic);
        assert_eq!(dial(client(), [bytes]), dial(client(), pieces(bytes)));
    }
}

/// Any bytes, from a proxy to the version 6 clients, and to the decoder of UDP messages.
pub(crate) fn any_bytes_to_clients_v6(bytes: &[u8]) {
    for dialect in [Socks6Dialect::Draft, Socks6Dialect::Socksx010, Socks6Dialect::Socksx] {
        for (password, session) in [(false, 0), (true, 0), (true, 1), (false, 2)] {
            let client = || v6_client(&destination(), password, session, dialect);
            assert_eq!(dial(client(), [bytes]), dial(client(), pieces(bytes)));
        }
    }
    // The two readers of datagrams agree.
    let read = UdpDatagram::parse(bytes).map(|UdpDatagram { id, remote, payload }| UdpMessage::Datagram {
        id,
        remote,
        payload: payload.to_vec(),
    });
    let message = UdpMessage::decode_datagram(bytes);
    assert_eq!(read, message.filter(|message| matches!(message, UdpMessage::Datagram { .. })));
    if let Some(message) = UdpMessage::decode_datagram(bytes) {
        let written = message.encode().expect("what was read can be written");
        assert_eq!(UdpMessage::decode_datagram(&written), Some(message));
    }
}

/// Any bytes as a datagram of version 5: no panic, and what is accepted comes back as it was.
pub(crate) fn any_datagram_v5(bytes: &[u8]) {
    use sidetrack_core::socks::v5::udp::{Datagram, put_header};
    let Ok(datagram) = Datagram::parse(bytes) else { return };
    let mut again = Vec::new();
    put_header(&mut again, &datagram.remote);
    again.extend_from_slice(datagram.payload);
    assert_eq!(Datagram::parse(&again).as_ref(), Ok(&datagram));
}
