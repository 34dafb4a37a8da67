//! One flow through one container: it goes in by the container's protocol, and comes back through our door in its
//! network.

use super::door::{Door, Place};
use super::instance::{Guest, Instance};
use crate::carry::hops::{self, Request};
use crate::carry::{Admitted, Failure, Wire, gate};
use crate::live::Clock;
use crate::reactor::{TcpStream, timeout};
use sidetrack_core::carrier::{Hop, HopProtocol, Socks6Dialect};
use sidetrack_core::flow::{Destination, EndReason, FlowId, HostName};
use sidetrack_core::function::{Spoken, WayBack, metadata_from, metadata_to};
use sidetrack_core::proxy_protocol::{self, Addresses, Tlv};
use sidetrack_core::socks::server::{Input, Output, Reply, ServerConfig, ServerDialect};
use sidetrack_core::socks::v6::Metadata;
use sidetrack_core::socks::{Command, ReplyCode, Server};
use sidetrack_sys::sockopt;
use socket2::Socket;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;
use tokio::io::AsyncWriteExt;

/// What a container is told about a flow.
#[derive(Clone, Copy, Debug)]
pub struct Intro<'a> {
    /// Its number.
    pub id: FlowId,
    /// The client.
    pub client: SocketAddr,
    /// The flow's destination.
    pub destination: &'a Destination,
    /// The host that the client wants, if it is known.
    pub host: Option<&'a HostName>,
    /// The metadata that came with the flow.
    pub metadata: &'a [Metadata],
    /// The client's first bytes, which are sent together with the request.
    pub first: &'a [u8],
    /// How long the passage may take.
    pub patience: Duration,
}

/// A flow that passes a container.
#[derive(Debug)]
pub struct Passed {
    /// The connection to the container, for the client's bytes.
    pub into: TcpStream,
    /// Bytes that the container has already sent to the client.
    pub early: Vec<u8>,
    /// The connection from the container, for bytes to the server.
    pub back: TcpStream,
    /// Bytes that have already come back.
    pub held: Vec<u8>,
    /// The metadata to forward.
    pub metadata: Vec<Metadata>,
}

/// Why a flow does not pass a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It cannot be reached, and has received nothing of the flow: another container may take it.
    Down(String),
    /// It refused the flow, or broke it.
    Failed(Failure),
}

/// Leads a flow through a container.
///
/// # Errors
/// Fails if the container is not reached, refuses, breaks its protocol, or does not forward the flow in time.
pub async fn pass(instance: &Guest, intro: Intro<'_>) -> Result<Passed, Trouble> {
    let down = |what: &str| Trouble::Down(format!("{what} {}", instance.name));
    let door = Door::of(instance).await.map_err(|_| down("no way back from"))?;
    // The place must exist before the container is asked, which may connect back at once.
    let place = door.place().map_err(|error| Trouble::Down(error.to_string()))?;
    let Ok(passed) = timeout(intro.patience, passing(instance, &place, intro)).await else {
        let limit = intro.patience.as_millis();
        return Err(failed(format!("took the flow and did not pass it on within {limit} ms")));
    };
    passed
}

fn failed(what: impl Into<String>) -> Trouble {
    Trouble::Failed(Failure::new(EndReason::FunctionFailed, what))
}

async fn passing(instance: &Instance, place: &Place, intro: Intro<'_>) -> Result<Passed, Trouble> {
    let mut into = dial(instance).await?;
    let broken = |error: std::io::Error| failed(format!("the connection to {}: {error}", instance.name));
    let back = place.address();
    let spec = &instance.spec;
    let protocol = match spec.speaks {
        Spoken::Socks5 => HopProtocol::Socks5,
        Spoken::Socks6(dialect) => HopProtocol::Socks6(dialect),
        Spoken::ProxyV2 => {
            let header = header(&intro, back.into());
            into.write_all(&[&header, intro.first].concat()).await.map_err(broken)?;
            // The container can refuse only by closing the connection.
            let (back, held, said) = tokio::select! {
                biased;
                came = returned(instance, place) => came?,
                () = poll_fn(|cx| into.poll_ended(cx)) => {
                    let words = "closed the flow before it passed it on";
                    return Err(Trouble::Failed(Failure::new(EndReason::FunctionRefused, words)));
                }
            };
            let metadata = metadata_from(intro.metadata, &said);
            return Ok(Passed { into, early: Vec::new(), back, held, metadata });
        }
    };
    let hop = Hop {
        protocol,
        address: instance.address().into(),
        credentials: None,
        optimistic: false,
        tfo: false,
        mptcp: false,
        ca_file: None,
        ca_pem: None,
    };
    let destination = match spec.way_back {
        WayBack::Destination => SocketAddr::from(back).into(),
        WayBack::Link => intro.destination.clone(),
    };
    let metadata = metadata_to(intro.metadata, spec, back).map_err(|error| failed(error.to_string()))?;
    let (command, initial) = (Command::Connect, intro.first.to_vec());
    let request = Request { hop: &hop, command, destination, metadata, stack: &[], initial };
    let asked = async { hops::ask(&mut into, request).await.map_err(refused) };
    let (early, (back, held, said)) = tokio::try_join!(asked, returned(instance, place))?;
    Ok(Passed { into, early, back, held, metadata: metadata_from(intro.metadata, &said) })
}

/// Connects to the container, in its network.
async fn dial(instance: &Instance) -> Result<TcpStream, Trouble> {
    let gone = || Trouble::Down(format!("container {} is gone", instance.name));
    let socket: Socket = instance.socket().await.ok_or_else(gone)?.into();
    let down = |error: std::io::Error| {
        Trouble::Down(format!("cannot connect to port {} of {}: {error}", instance.spec.port, instance.name))
    };
    sockopt::set_tcp_nodelay(&socket, true).map_err(down)?;
    // In every protocol we send first, so the acknowledgement of the SYN-ACK can travel with that data. It also works
    // without.
    let _ = sockopt::set_tcp_ack_with_data(&socket);
    let to = Admitted::configured(instance.address());
    let done = gate::start(&socket, to).map_err(down)?;
    let stream = TcpStream::new(socket.into()).map_err(down)?;
    // On one host the connection is usually open when the call returns, which saves one turn of the loop.
    if !done && !stream.has_connected().map_err(down)? {
        stream.writable().await;
        if stream.has_failed()
            && let Some(error) = stream.take_error().map_err(down)?
        {
            return Err(down(error));
        }
    }
    Ok(stream)
}

/// Converts the container's answer to our request into an error.
fn refused(failure: Failure) -> Trouble {
    let reason = match failure.detail.contains(ReplyCode::NotAllowed.text()) {
        true => EndReason::FunctionRefused,
        false => EndReason::FunctionFailed,
    };
    Trouble::Failed(Failure { reason, ..failure })
}

/// Returns the header for a container that speaks the PROXY protocol. The container connects to the address in it.
fn header(intro: &Intro<'_>, back: SocketAddr) -> Vec<u8> {
    let addresses = Addresses::tcp(intro.client, back);
    let mut tlvs: Vec<_> = intro.host.iter().map(|host| Tlv::Authority((*host).clone())).collect();
    tlvs.push(Tlv::UniqueId(intro.id.0.to_be_bytes().to_vec()));
    let bare = || proxy_protocol::encode_v2(&addresses, &[], false).unwrap_or_default();
    proxy_protocol::encode_v2(&addresses, &tlvs, false).unwrap_or_else(|_| bare())
}

/// Waits until the flow is back. Returns the connection, the bytes that came over it already, and the metadata.
async fn returned(
    instance: &Instance,
    place: &Place,
) -> Result<(TcpStream, Vec<u8>, Vec<Metadata>), Trouble> {
    let mut stream = place.back().await;
    let (Spoken::Socks6(dialect), WayBack::Link) = (instance.spec.speaks, instance.spec.way_back) else {
        return Ok((stream, Vec::new(), Vec::new()));
    };
    match link(&mut stream, dialect).await {
        Ok((held, metadata)) => Ok((stream, held, metadata)),
        Err(why) => {
            stream.close(true);
            Err(failed(format!("as the next link of its chain it says: {why}")))
        }
    }
}

/// Serves SOCKS6 to the container, as the next link of its chain. We answer yes at once. If the server cannot be reached,
/// we tell the client ourselves.
async fn link(stream: &mut TcpStream, dialect: Socks6Dialect) -> Result<(Vec<u8>, Vec<Metadata>), String> {
    let dialect = match dialect {
        Socks6Dialect::Draft => ServerDialect::Draft,
        Socks6Dialect::Socksx | Socks6Dialect::Socksx010 => ServerDialect::Socksx,
    };
    let clock = Clock::start();
    let config = ServerConfig { v5: false, dialect, sessions: false, ..ServerConfig::default() };
    let mut machine = Server::new(Arc::new(config), clock.now());
    let mut asked = None;
    loop {
        while let Some(output) = machine.poll() {
            match output {
                Output::Send(bytes) => {
                    stream.write_all(&bytes).await.map_err(|error| error.to_string())?;
                }
                Output::Request(request) => {
                    asked = Some((request.first_bytes, request.metadata));
                    let bound = SocketAddr::from(([0, 0, 0, 0], 0));
                    machine.handle(clock.now(), Input::Reply(Reply::connected(bound)));
                }
                Output::Done { leftover } => {
                    let (mut first, metadata) = asked.take().unwrap_or_default();
                    first.extend(leftover);
                    return Ok((first, metadata));
                }
                Output::Failed { detail, .. } => return Err(detail),
                Output::Finished => return Err("a NOOP".to_owned()),
                Output::Session(_) => return Err("it asks for a session".to_owned()),
            }
        }
        let read = poll_fn(|cx| {
            let mut buffer = [0; 2048];
            let n = ready!(stream.poll_recv(cx, &mut buffer))?;
            match &buffer[..n] {
                [] => machine.handle(clock.now(), Input::Eof),
                bytes => machine.handle(clock.now(), Input::Bytes(bytes)),
            }
            Poll::Ready(std::io::Result::Ok(()))
        });
        read.await.map_err(|error| error.to_string())?;
    }
}
