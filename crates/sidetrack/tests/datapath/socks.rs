//! A SOCKS client of the test's own: bytes written out for version 5, the product's machine for version 6.

use super::peers::{connect, expect, patient};
use sidetrack_core::flow::Destination;
use sidetrack_core::socks::client::{Connected, Input, Output};
use sidetrack_core::socks::v6::{self, ClientConfig};
use sidetrack_core::time::Instant;
use sidetrack_testkit::LIMIT;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

/// `address port` of a version 5 request.
pub(crate) fn v5_address(to: &str) -> Vec<u8> {
    let (host, port) = to.rsplit_once(':').expect("host:port");
    let port: u16 = port.parse().expect("a port");
    let mut bytes = match host.trim_matches(['[', ']']).parse() {
        Ok(IpAddr::V4(ip)) => [&[1], &ip.octets()[..]].concat(),
        Ok(IpAddr::V6(ip)) => [&[4], &ip.octets()[..]].concat(),
        Err(_) => [&[3, u8::try_from(host.len()).expect("a short name")], host.as_bytes()].concat(),
    };
    bytes.extend(port.to_be_bytes());
    bytes
}

/// A version 5 request for this command.
pub(crate) fn v5_request(command: u8, to: &str) -> Vec<u8> {
    [&[5, command, 0], &v5_address(to)[..]].concat()
}

/// Greets without a password, asks to connect, and gives the reply's code.
pub(crate) fn v5_ask(stream: &mut TcpStream, command: u8, to: &str) -> u8 {
    stream.write_all(&[5, 1, 0]).expect("an open stream");
    expect(stream, &[5, 0]);
    stream.write_all(&v5_request(command, to)).expect("an open stream");
    v5_reply(stream)
}

/// Reads a reply and gives its code.
pub(crate) fn v5_reply(stream: &mut TcpStream) -> u8 {
    let mut head = [0; 4];
    stream.read_exact(&mut head).expect("a reply");
    assert_eq!((head[0], head[2]), (5, 0), "a version 5 reply");
    let rest = match head[3] {
        1 => 6,
        4 => 18,
        other => panic!("address type {other} in a reply"),
    };
    stream.read_exact(&mut vec![0; rest]).expect("a whole reply");
    head[1]
}

/// Connects through a version 5 proxy.
pub(crate) fn v5_connect(proxy: SocketAddr, to: &str) -> TcpStream {
    let mut stream = connect(proxy);
    assert_eq!(v5_ask(&mut stream, 1, to), 0);
    stream
}

/// Connects through a version 5 proxy; none if the proxy resets at once.
pub(crate) fn v5_try(proxy: SocketAddr, to: &str) -> Option<TcpStream> {
    let mut stream = patient(TcpStream::connect_timeout(&proxy, LIMIT).ok()?);
    stream.write_all(&[5, 1, 0]).ok()?;
    let mut method = [0; 2];
    stream.read_exact(&mut method).ok()?;
    assert_eq!(method, [5, 0]);
    stream.write_all(&v5_request(1, to)).expect("an open stream");
    assert_eq!(v5_reply(&mut stream), 0);
    Some(stream)
}

/// A plain version 6 CONNECT.
pub(crate) fn v6_config(to: &str) -> ClientConfig {
    ClientConfig {
        command: v6::ClientCommand::Connect(to.parse::<Destination>().expect("a destination")),
        session: v6::SessionUse::None,
        dialect: Default::default(),
        credentials: None,
        metadata: Vec::new(),
        stack: Vec::new(),
        initial_data: Vec::new(),
        handshake_timeout: Duration::from_secs(3600),
    }
}

/// Runs a version 6 handshake; what the proxy said, or how it failed in words.
pub(crate) fn v6_ask(stream: &mut TcpStream, config: ClientConfig) -> Result<Box<Connected>, String> {
    let now = Instant::from_nanos(0);
    let mut machine = v6::Client::new(config, now);
    loop {
        while let Some(output) = machine.poll() {
            match output {
                Output::Send(bytes) => stream.write_all(&bytes).expect("an open stream"),
                Output::Connected(connected) => return Ok(connected),
                Output::Failed { reason, detail } => return Err(format!("{reason}: {detail}")),
            }
        }
        // One by one: what follows the reply is the server's.
        let mut buffer = [0; 1];
        match stream.read(&mut buffer).map_err(|error| error.to_string())? {
            0 => machine.handle(now, Input::Eof),
            n => machine.handle(now, Input::Bytes(&buffer[..n])),
        }
    }
}
