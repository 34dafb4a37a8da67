//! The direct carrier of datagrams to many destinations: one unconnected socket for each address family.

use super::{Came, Datagrams, Lost, Remote, failure, lost, receive, unbound};
use crate::carry::{Dialing, Failure};
use crate::reactor::UdpSocket;
use sidetrack_core::association::Dropped;
use sidetrack_core::flow::EndReason;
use sidetrack_sys::udp::batch::{Batch, Target};
use sidetrack_sys::{sockopt, udp};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::{Context, Poll};

/// The sockets of one client. Each has the same port towards all servers.
#[derive(Debug)]
pub struct Direct {
    dialing: Arc<Dialing>,
    v4: Option<UdpSocket>,
    v6: Option<UdpSocket>,
}

impl Direct {
    /// Makes a path without sockets: each is opened for the first datagram of its family.
    pub const fn new(dialing: Arc<Dialing>) -> Self {
        Self { dialing, v4: None, v6: None }
    }

    /// A path with these sockets of an earlier process.
    ///
    /// # Errors
    /// The kernel cannot watch one.
    pub fn with(dialing: Arc<Dialing>, sockets: Vec<OwnedFd>) -> io::Result<Self> {
        let mut direct = Self::new(dialing);
        for socket in sockets.into_iter().map(std::net::UdpSocket::from) {
            let place = if socket.local_addr()?.is_ipv4() { &mut direct.v4 } else { &mut direct.v6 };
            *place = Some(UdpSocket::new(socket)?);
        }
        Ok(direct)
    }

    fn socket(&mut self, to: SocketAddr) -> io::Result<&UdpSocket> {
        let (place, any) = match to {
            SocketAddr::V4(_) => (&mut self.v4, SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))),
            SocketAddr::V6(_) => (&mut self.v6, SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))),
        };
        if place.is_none() {
            let socket = unbound(&self.dialing, to)?;
            // Bound before it is watched: a socket that is not bound reports an end.
            socket.bind(&any.into())?;
            udp::batch::receive_trains(&socket);
            udp::errors::report(&socket, to)?;
            *place = Some(UdpSocket::new(socket.into())?);
        }
        place.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Datagrams for Direct {
    fn send(&mut self, to: &Remote, payload: &[u8]) -> Result<(), Lost> {
        let Remote::Address(admitted) = to else {
            let failure = Failure::new(EndReason::Internal, "a name is resolved before it is carried");
            return Err(Lost { why: Dropped::Unsent, failure, fits_bytes: None });
        };
        let to = admitted.address();
        let socket = self.socket(to).map_err(|error| lost(&error, to))?;
        socket.send_one(payload, Some(&Target { to, from: None })).map_err(|error| lost(&error, to))
    }

    fn sockets(&self) -> Option<Vec<BorrowedFd<'_>>> {
        Some([&self.v4, &self.v6].into_iter().flatten().map(AsFd::as_fd).collect())
    }

    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        batch: &mut Batch,
        take: &mut dyn FnMut(Came<'_>),
    ) -> Poll<Result<(), Failure>> {
        let mut all = Poll::Pending;
        for socket in [&self.v4, &self.v6].into_iter().flatten() {
            let ready = receive(socket, cx, batch, |came| {
                // A failure only says that an error waits in the queue of errors.
                if let Ok((batch, count)) = came {
                    pass(batch, count, take);
                }
            });
            while let Some(error) = socket.next_error() {
                let to = sockopt::canonical(error.to);
                take(Came::Error { to: Some(to), failure: failure(&error.error, to), said: error.said });
            }
            if ready.is_ready() {
                all = Poll::Ready(Ok(()));
            }
        }
        all
    }
}

fn pass(batch: &Batch, count: usize, take: &mut dyn FnMut(Came<'_>)) {
    for at in 0..count {
        let from = batch.addresses(at).0.map(sockopt::canonical);
        if from.is_none() {
            continue;
        }
        for payload in batch.datagrams(at) {
            take(Came::Datagram { from, payload });
        }
    }
}
