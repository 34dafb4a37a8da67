//! The function in the container: this very test program, asked by `serve` to be a SOCKS proxy that does to a flow what the
//! first line of the flow says, and nothing to flows that say nothing.

use sidetrack_core::carrier::Socks6Dialect;
use sidetrack_core::flow::Destination;
use sidetrack_core::socks::client::{Input as ToClient, Output as FromClient};
use sidetrack_core::socks::server::{Input, Output, Reply, Request, ServerConfig, Version};
use sidetrack_core::socks::v6::{Client, ClientCommand, ClientConfig, Metadata, SessionUse, SocksxChain};
use sidetrack_core::socks::{ReplyCode, Server};
use sidetrack_core::time::Instant;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// The metadata key in which it says that it has seen a flow.
pub(crate) const SEEN: u16 = 4711;

/// How long a client may be silent until its server is taken for one that speaks first.
const SPEAKS_FIRST: Duration = Duration::from_secs(2);

/// Nothing moves any more in any flow.
static STALLED: AtomicBool = AtomicBool::new(false);

/// Is the function, in its container. Not a test: the others run it.
#[test]
#[ignore = "the other tests run it in containers"]
fn serve() {
    let how = std::env::var("HOW").unwrap_or_default();
    eprintln!("function: {how}");
    match how.as_str() {
        "exit" => {
            eprintln!("no configuration in /etc/function.conf");
            std::process::exit(3);
        }
        "deaf" => loop {
            std::thread::park();
        },
        _ => {}
    }
    let listener = TcpListener::bind("127.0.0.1:1080").expect("its own port");
    for stream in listener.incoming().map_while(Result::ok) {
        let how = how.clone();
        std::thread::Builder::new()
            .stack_size(256 << 10)
            .spawn(move || flow(stream, &how))
            .expect("a thread");
    }
}

fn flow(mut client: TcpStream, how: &str) {
    if STALLED.load(Relaxed) {
        // Taken, and never answered.
        loop {
            std::thread::park();
        }
    }
    let Some((server, mut first)) = handshake(&mut client, how) else { return };
    if how == "reorder" {
        return relay(client, server, &first, Some("!reorder"));
    }
    if first.is_empty() {
        // A server may speak first: then nothing is asked for.
        let _ = client.set_read_timeout(Some(SPEAKS_FIRST));
        let mut bytes = [0; 4096];
        if let Ok(n) = client.read(&mut bytes) {
            if n == 0 {
                return relay_ended(client, server);
            }
            first.extend_from_slice(&bytes[..n]);
        }
        let _ = client.set_read_timeout(None);
    }
    let order = order(&first);
    relay(client, server, &first, order.as_deref());
}

/// A client that has ended before it said anything.
fn relay_ended(client: TcpStream, server: TcpStream) {
    let _ = server.shutdown(Shutdown::Write);
    let _ = copy_beside(Ok(server), Ok(client)).join();
}

/// What the first line of a flow asks for.
fn order(first: &[u8]) -> Option<String> {
    let line = first.split(|byte| *byte == b'\n').next()?;
    let text = std::str::from_utf8(line).ok()?;
    let word = text.split_whitespace().next()?;
    word.starts_with('!').then(|| word.to_owned())
}

/// The SOCKS handshake with each client, and the connection onwards; along the chain where there is one.
fn handshake(client: &mut TcpStream, how: &str) -> Option<(TcpStream, Vec<u8>)> {
    let now = Instant::from_millis(0);
    let mut machine = Server::new(Arc::new(ServerConfig { sessions: false, ..ServerConfig::default() }), now);
    let mut onward = None;
    let mut bytes = [0; 4096];
    loop {
        while let Some(output) = machine.poll() {
            match output {
                Output::Send(bytes) => client.write_all(&bytes).ok()?,
                Output::Request(request) if how == "refuse" => {
                    drop(request);
                    machine.handle(now, Input::Reply(Reply::failed(ReplyCode::NotAllowed)));
                }
                Output::Request(request) => match next(&request) {
                    Ok((server, early)) => {
                        let bound = server.local_addr().ok()?;
                        machine.handle(now, Input::Reply(Reply::connected(bound)));
                        onward = Some((server, request.first_bytes.clone(), early));
                    }
                    Err(error) => {
                        eprintln!("cannot go on to {}: {error}", request.destination);
                        machine.handle(now, Input::Reply(Reply::failed(ReplyCode::GeneralFailure)));
                    }
                },
                Output::Done { leftover } => {
                    let (server, mut first, early) = onward.take()?;
                    client.write_all(&early).ok()?;
                    first.extend(leftover);
                    return Some((server, first));
                }
                Output::Session(_) | Output::Finished | Output::Failed { .. } => return None,
            }
        }
        let n = client.read(&mut bytes).ok().filter(|n| *n > 0)?;
        machine.handle(now, Input::Bytes(&bytes[..n]));
    }
}

/// On to the next link of the chain as functions of the EPI framework do it, or to the destination.
fn next(request: &Request) -> io::Result<(TcpStream, Vec<u8>)> {
    let chain = SocksxChain::from_metadata(&request.metadata).map_err(io::Error::other)?;
    let link = chain.map_or(Ok(None), |chain| chain.next()).map_err(io::Error::other)?;
    let Some((link, chain)) = link else {
        return Ok((TcpStream::connect(request.destination.to_string())?, Vec::new()));
    };
    let mut metadata = chain.to_metadata();
    metadata.extend(request.metadata.iter().filter(|entry| !SocksxChain::is_chain_key(entry.key)).cloned());
    metadata.push(Metadata { key: SEEN, value: "seen".to_owned() });
    let dialect = match request.version {
        Version::V6Socksx => Socks6Dialect::Socksx,
        _ => Socks6Dialect::Draft,
    };
    ask(&link, request.destination.clone(), (metadata, dialect))
}

fn ask(
    link: &Destination,
    destination: Destination,
    (metadata, dialect): (Vec<Metadata>, Socks6Dialect),
) -> io::Result<(TcpStream, Vec<u8>)> {
    let now = Instant::from_millis(0);
    let mut stream = TcpStream::connect(link.to_string())?;
    let config = ClientConfig {
        command: ClientCommand::Connect(destination),
        session: SessionUse::None,
        dialect,
        credentials: None,
        metadata,
        stack: Vec::new(),
        initial_data: Vec::new(),
        handshake_timeout: Duration::from_secs(60),
    };
    let mut machine = Client::new(config, now);
    let mut bytes = [0; 4096];
    loop {
        while let Some(output) = machine.poll() {
            match output {
                FromClient::Send(bytes) => stream.write_all(&bytes)?,
                FromClient::Connected(connected) => return Ok((stream, connected.leftover)),
                FromClient::Failed { detail, .. } => return Err(io::Error::other(detail)),
            }
        }
        let n = stream.read(&mut bytes)?;
        let input = if n == 0 { ToClient::Eof } else { ToClient::Bytes(&bytes[..n]) };
        machine.handle(now, input);
    }
}

/// Moves a flow, and does to it what it asks for.
fn relay(client: TcpStream, server: TcpStream, first: &[u8], order: Option<&str>) {
    match order {
        None => {
            let down = copy_beside(server.try_clone(), client.try_clone());
            let _ = copy(first, client, server, |bytes| bytes);
            drop(down.join());
        }
        Some("!upper") => {
            let down = copy_beside(server.try_clone(), client.try_clone());
            let _ = copy(&first.to_ascii_uppercase(), client, server, |bytes| bytes.to_ascii_uppercase());
            drop(down.join());
        }
        Some("!reorder") => {
            let down = copy_beside(server.try_clone(), client.try_clone());
            let turned = |bytes: Vec<u8>| bytes.into_iter().rev().collect::<Vec<u8>>();
            let _ = copy(&turned(first.to_vec()), client, server, turned);
            drop(down.join());
        }
        // Both directions, in order, when the answer has begun.
        Some("!cut") => {
            let _ = pass_on(&server, &client, first);
        }
        Some("!flood") => {
            let mut client = client;
            while client.write_all(&[b'x'; 65_536]).is_ok() {}
        }
        Some("!stall") => {
            STALLED.store(true, Relaxed);
            loop {
                std::thread::park();
            }
        }
        Some("!exit") => std::process::exit(7),
        Some("!about") => {
            let mut client = client;
            let _ = client.write_all(about().as_bytes());
            // Only its ends may end a flow in order, so the client ends it.
            let _ = io::copy(&mut client, &mut io::sink());
        }
        Some(other) => eprintln!("what is {other}?"),
    }
}

fn pass_on(mut server: &TcpStream, mut client: &TcpStream, first: &[u8]) -> io::Result<()> {
    server.write_all(first)?;
    let mut bytes = [0; 1024];
    let n = server.read(&mut bytes)?;
    client.write_all(&bytes[..n])?;
    client.shutdown(Shutdown::Both)?;
    server.shutdown(Shutdown::Both)
}

fn copy(
    first: &[u8],
    mut from: TcpStream,
    mut to: TcpStream,
    change: impl Fn(Vec<u8>) -> Vec<u8>,
) -> io::Result<()> {
    to.write_all(first)?;
    let mut bytes = vec![0; 65_536];
    loop {
        if STALLED.load(Relaxed) {
            std::thread::park();
            continue;
        }
        match from.read(&mut bytes)? {
            0 => return to.shutdown(Shutdown::Write),
            n => to.write_all(&change(bytes[..n].to_vec()))?,
        }
    }
}

fn copy_beside(from: io::Result<TcpStream>, to: io::Result<TcpStream>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        if let (Ok(from), Ok(to)) = (from, to) {
            let _ = copy(&[], from, to, |bytes| bytes);
        }
    })
}

/// What it may do, one fact a line.
fn about() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let capabilities = status.lines().find(|line| line.starts_with("CapBnd")).unwrap_or("?");
    let interfaces = std::fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    let interfaces: Vec<_> =
        interfaces.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim()).collect();
    let root = std::fs::write("/written", b"x").is_err();
    let outside =
        TcpStream::connect_timeout(&"192.0.2.1:80".parse().expect("an address"), Duration::from_millis(200));
    format!(
        "{capabilities}\ninterfaces {}\nroot is read-only {root}\nno way out {}\n",
        interfaces.join(","),
        outside.is_err()
    )
}
