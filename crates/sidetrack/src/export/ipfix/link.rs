//! The socket to a collector: datagrams or a connection.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

/// How long a collector may take no byte before the connection is given up.
const STALLED: Duration = Duration::from_secs(10);

/// A socket to a collector.
pub(super) enum Link {
    /// Each message is a datagram to this address.
    Datagrams(UdpSocket, SocketAddr),
    /// Messages follow each other (RFC 7011 Sec. 10.4).
    Stream(TcpStream),
}

impl Link {
    /// Sends a message.
    ///
    /// # Errors
    /// As writing does; `TimedOut` if the collector reads nothing for a while.
    pub(super) async fn send(&mut self, message: &[u8]) -> io::Result<()> {
        match self {
            Self::Datagrams(socket, _) => socket.send(message).await.map(|_| ()),
            Self::Stream(stream) => timeout(STALLED, stream.write_all(message)).await?,
        }
    }

    /// Waits until the collector closes the connection, or until the kernel knows that no program receives the datagrams.
    /// Collectors send nothing; what comes is ignored.
    pub(super) async fn broken(&self) -> io::Error {
        let mut ignored = [0; 512];
        loop {
            let read = match self {
                Self::Datagrams(socket, _) => socket.recv(&mut ignored).await.map(|_| 1),
                Self::Stream(stream) => match stream.readable().await {
                    Ok(()) => stream.try_read(&mut ignored),
                    Err(error) => Err(error),
                },
            };
            match read {
                Ok(0) => {
                    return io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the collector has closed the connection",
                    );
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return error,
            }
        }
    }

    /// Ends the connection in order.
    ///
    /// # Errors
    /// As shutdown(2) does.
    pub(super) async fn end(&mut self) -> io::Result<()> {
        match self {
            Self::Datagrams(..) => Ok(()),
            Self::Stream(stream) => stream.shutdown().await,
        }
    }
}
