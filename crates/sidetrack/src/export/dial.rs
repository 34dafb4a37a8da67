//! Sockets to a collector. The configuration names it; its addresses pass the gate all the same.

use crate::carry::{Admitted, gate, resolve};
use sidetrack_core::flow::Destination;
use sidetrack_sys::{sockopt, udp};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

/// How long connecting to one address may take.
const CONNECT: Duration = Duration::from_secs(5);

/// Connects to the first address of a collector that answers.
///
/// # Errors
/// The name cannot be resolved, or no address answers.
pub(super) async fn stream(to: &Destination, mark: Option<u32>) -> io::Result<TcpStream> {
    let mut failed = None;
    for address in addresses(to).await? {
        let connected = timeout(CONNECT, connect(address, mark)).await;
        match connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = Some(at(address, &error)),
        }
    }
    Err(failed.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
}

async fn connect(address: SocketAddr, mark: Option<u32>) -> io::Result<TcpStream> {
    let socket = sockopt::stream_socket(&address)?;
    set_mark(&socket, mark)?;
    gate::start(&socket, Admitted::configured(address))?;
    let stream = TcpStream::from_std(socket.into())?;
    stream.writable().await?;
    match stream.take_error()? {
        Some(error) => Err(error),
        None => Ok(stream),
    }
}

/// A socket whose datagrams go to the first address of a collector to which there is a route, and the address.
///
/// # Errors
/// The name cannot be resolved, or there is no route.
pub(super) async fn datagrams(to: &Destination, mark: Option<u32>) -> io::Result<(UdpSocket, SocketAddr)> {
    let mut failed = None;
    for address in addresses(to).await? {
        let opened = udp::unbound(address).and_then(|socket| {
            set_mark(&socket, mark)?;
            gate::start_datagrams(&socket, Admitted::configured(address))?;
            UdpSocket::from_std(socket.into())
        });
        match opened {
            Ok(socket) => return Ok((socket, address)),
            Err(error) => failed = Some(at(address, &error)),
        }
    }
    Err(failed.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
}

/// Set before the connect: our rules would capture an unmarked packet.
fn set_mark(socket: impl AsFd, mark: Option<u32>) -> io::Result<()> {
    mark.map_or(Ok(()), |mark| sockopt::set_mark(socket, mark))
}

async fn addresses(to: &Destination) -> io::Result<Vec<SocketAddr>> {
    timeout(CONNECT, resolve(to)).await?.map_err(|failure| io::Error::other(failure.detail))
}

fn at(address: SocketAddr, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{address}: {error}"))
}
