//! Ports of this host that lead to servers of the command: `run --publish`.

use super::notices;
use crate::app::ports::explain;
use crate::live::{Decided, Ended, Ledger, LiveFlow};
use crate::worker::Shared;
use anyhow::Context;
use sidetrack_core::flow::{Destination, EndReason, Flow, Host, Intercept, Protocol, Side};
use sidetrack_sys::inside::InsideSockets;
use sidetrack_sys::ports::PortKind;
use sidetrack_sys::sockopt::{self, ListenOptions};
use std::future::poll_fn;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// The name of the listener in records.
pub(super) const LISTENER: &str = "publish";

/// Most connections of all published ports at the same time. Further ones wait.
const CONNECTIONS_MAX: usize = 1024;

/// Bytes that are read at a time.
const BUFFER: usize = 64 * 1024;

/// How long connections may take to end after the command.
const PATIENCE: Duration = Duration::from_secs(1);

/// An address of this host, and the port of the server in the command's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Publish {
    /// Where clients connect to. Port 0: the kernel chooses one.
    pub at: SocketAddr,
    /// The port of the command's server.
    pub port: u16,
}

/// A port that is bound.
pub(super) struct Bound {
    listener: TcpListener,
    publish: Publish,
}

/// Binds all ports, before the command is started.
///
/// # Errors
/// Which address cannot be bound, and who has it.
pub(super) fn bind(all: &[Publish]) -> anyhow::Result<Vec<Bound>> {
    let bind = |publish: &Publish| {
        let listener = sockopt::listen(publish.at, &ListenOptions::default())
            .map_err(|error| explain(error, PortKind::Tcp, publish.at))
            .with_context(|| format!("--publish: cannot listen on {}", publish.at))?;
        if publish.at.port() == 0 {
            let (at, port) = (listener.local_addr()?, publish.port);
            notices::write(&format!("sidetrack: {at} leads to port {port} of the command\n"));
        }
        Ok(Bound { listener, publish: *publish })
    };
    all.iter().map(bind).collect()
}

/// The published ports at work.
pub(super) struct Published {
    ledger: Arc<Ledger>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Published {
    /// Serves the ports by tasks of this runtime.
    ///
    /// # Errors
    /// The runtime cannot watch a socket.
    pub(super) fn start(
        bound: Vec<Bound>,
        inside: Option<InsideSockets>,
        shared: &Arc<Shared>,
    ) -> io::Result<Self> {
        let ledger = Arc::<Ledger>::default();
        let Some(inside) = inside.map(Arc::new) else { return Ok(Self { ledger, tasks: Vec::new() }) };
        let places = Arc::new(tokio::sync::Semaphore::new(CONNECTIONS_MAX));
        let serve = |Bound { listener, publish }| {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let port = Port {
                inside: inside.clone(),
                port: publish.port,
                ledger: ledger.clone(),
                shared: shared.clone(),
            };
            let places = places.clone();
            Ok(tokio::spawn(async move {
                loop {
                    let Ok(place) = places.clone().acquire_owned().await else { return };
                    let Ok((client, peer)) = listener.accept().await else {
                        // No descriptor is left: one becomes free soon.
                        tokio::time::sleep(Duration::from_millis(10)).await;
                        continue;
                    };
                    let port = port.clone();
                    tokio::spawn(async move {
                        port.serve(client, peer).await;
                        drop(place);
                    });
                }
            }))
        };
        let tasks = bound.into_iter().map(serve).collect::<io::Result<_>>()?;
        Ok(Self { ledger, tasks })
    }

    /// The flows of these ports.
    pub(super) fn ledger(&self) -> Arc<Ledger> {
        self.ledger.clone()
    }

    /// Ends all connections, after the command.
    pub(super) async fn finish(self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
        for flow in self.ledger.snapshot() {
            flow.end(EndReason::Shutdown);
        }
        let until = tokio::time::Instant::now() + PATIENCE;
        while !self.ledger.is_empty() && tokio::time::Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// What the connections of one port share.
#[derive(Clone)]
struct Port {
    inside: Arc<InsideSockets>,
    port: u16,
    ledger: Arc<Ledger>,
    shared: Arc<Shared>,
}

/// How a connection ended.
type End = (EndReason, Option<String>);

impl Port {
    /// Serves one connection. It is a flow with a record.
    async fn serve(&self, client: TcpStream, peer: SocketAddr) {
        let live = Arc::new(LiveFlow::new(self.shared.next_flow_id()));
        let slot = self.ledger.enter(live.clone());
        let flow = Flow {
            protocol: Protocol::Tcp,
            intercept: Intercept::Reverse,
            listener: LISTENER.into(),
            client: peer,
            orig_dst: Destination { host: Host::Ip(Ipv4Addr::LOCALHOST.into()), port: self.port, zone: 0 },
            host: None,
            process: None,
            user: None,
        };
        live.decide(Decided::new(flow, None));
        let (reason, detail) = self.carry(client, &live).await;
        let duration = live.age();
        let detail = detail.map(Into::into);
        self.ledger.leave(slot, Ended { flow: live, reason, detail, duration });
    }

    async fn carry(&self, client: TcpStream, live: &LiveFlow) -> End {
        let (inside, port) = (self.inside.clone(), self.port);
        let connected = tokio::task::spawn_blocking(move || {
            let v4 = inside.connect((Ipv4Addr::LOCALHOST, port).into());
            // A server may listen for IPv6 alone.
            v4.or_else(|error| inside.connect((Ipv6Addr::LOCALHOST, port).into()).map_err(|_| error))
        });
        let server = match connected.await {
            Ok(Ok(server)) => server,
            Ok(Err(error)) => {
                let _ = client.set_zero_linger();
                return of_connect(&error, port);
            }
            Err(error) => return (EndReason::Internal, Some(error.to_string())),
        };
        let server = match server.set_nonblocking(true).and_then(|()| TcpStream::from_std(server)) {
            Ok(server) => server,
            Err(error) => return (EndReason::Internal, Some(error.to_string())),
        };
        live.connected(live.age());
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        let mut up = pin!(one_way(from_client, to_server, live, Side::Client));
        let mut down = pin!(one_way(from_server, to_client, live, Side::Server));
        let both = async { tokio::try_join!(&mut up, &mut down).map(drop) };
        let asked = poll_fn(|cx| {
            live.set_waker(cx.waker());
            live.ending().map_or(Poll::Pending, Poll::Ready)
        });
        tokio::select! {
            ended = both => match ended {
                Ok(()) => (EndReason::Ok, None),
                Err((side, error)) => {
                    let reason = if side == Side::Client { EndReason::ClientReset } else { EndReason::ServerReset };
                    (reason, Some(error.to_string()))
                }
            },
            reason = asked => (reason, None),
        }
    }
}

fn of_connect(error: &io::Error, port: u16) -> End {
    if error.kind() == io::ErrorKind::ConnectionRefused {
        return (EndReason::Refused, Some(format!("no server of the command listens at port {port}")));
    }
    (EndReason::ConnectTimeout, Some(format!("port {port} of the command: {error}")))
}

/// Copies from one side to the other until its end.
async fn one_way(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    live: &LiveFlow,
    side: Side,
) -> Result<(), (Side, io::Error)> {
    let other = if side == Side::Client { Side::Server } else { Side::Client };
    let mut buffer = vec![0; BUFFER];
    loop {
        let n = from.read(&mut buffer).await.map_err(|error| (side, error))?;
        if n == 0 {
            // The other side may be gone already.
            let _ = to.shutdown().await;
            return Ok(());
        }
        to.write_all(&buffer[..n]).await.map_err(|error| (other, error))?;
        let bytes = n as u64;
        if side == Side::Client {
            live.count(bytes, 0);
        } else {
            live.first_byte(live.age());
            live.count(0, bytes);
        }
        live.touch(live.age());
    }
}
