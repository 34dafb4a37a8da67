//! The state that the threads of the overlay share.

use super::control::Event;
use super::datagrams::{self, Datagrams, Ends};
use super::groups::Member;
use super::identity::Identity;
use super::paced::Lanes;
use super::packets::Interception;
use super::pool::Pool;
use super::sessions::Sessions;
use super::shape::Shapers;
use super::stream::Stream;
use super::tls::Tls;
use super::udp::Udp;
use crate::carry::{Admitted, Dialing, gate};
use crate::config;
use crate::live::{Clock, Ledger};
use anyhow::Context as _;
use arc_swap::ArcSwap;
use sidetrack_core::flow::FlowId;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Frame, Greeting, LinkKind, Purpose, VERSION};
use sidetrack_core::overlay::group::Groups;
use sidetrack_core::overlay::route::Graph;
use sidetrack_sys::sockopt;
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::timeout;

/// How long a neighbour may take to answer when it is dialled, and for its handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The same while it is unknown which of several legs works: the next one has its turn soon.
const LEG_TIMEOUT: Duration = Duration::from_millis(1500);

/// How long a peer that dialled us may take to send its first byte.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long data to a neighbour may stay unacknowledged. Hellos notice a dead link sooner; this ends connections that they do
/// not cover.
const USER_TIMEOUT: Duration = Duration::from_secs(10);

/// Size of the receive window of a link's connection, bytes: one round trip of 60 ms at 500 Mb/s. The kernel would
/// enlarge the window by itself, but more slowly than the sender's congestion control probes the rate of the path. It
/// would mistake our window for that rate, and need seconds to recover. The windows of sessions limit how much data
/// really waits.
const RECEIVE_ROOM: u32 = 4 << 20;

/// Most measurements by other nodes at a time.
const BENCHES_MAX: usize = 4;

/// The links that are up. Each has a number, and a link that comes up again gets a new one.
pub(super) type Links = Arc<BTreeMap<NodeId, u64>>;

/// Counters for status and metrics.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Sessions begun here.
    pub sessions_opened: AtomicU64,
    /// Sessions delivered here.
    pub sessions_delivered: AtomicU64,
    /// Sessions that went on over a new path.
    pub sessions_resumed: AtomicU64,
    /// Further paths that were opened for sessions of this node.
    pub paths_opened: AtomicU64,
    /// Sessions refused here.
    pub sessions_refused: AtomicU64,
    /// Flows that were relayed here.
    pub relayed: AtomicU64,
    /// Bytes of relayed flows, including frames.
    pub relayed_bytes: AtomicU64,
    /// Connections of peers that showed no member's key, spoke another protocol, or found no place for a handshake.
    pub strangers: AtomicU64,
}

/// Numbers the flows of the process.
pub(super) type NextId = Arc<dyn Fn() -> FlowId + Send + Sync>;

/// The state that the threads of the overlay share.
pub(super) struct Shared {
    /// This node and the other members.
    pub identity: Identity,
    /// Makes the TLS ends of connections.
    pub tls: Tls,
    /// The entries that say what may be delivered here.
    pub deliver: Vec<config::Deliver>,
    /// The configuration in force; each delivery is checked by its rules.
    pub config: Arc<ArcSwap<config::Config>>,
    /// The flows that are delivered here.
    pub ledger: Arc<Ledger>,
    /// Numbers these flows.
    pub next_id: NextId,
    /// The congestion control of links.
    congestion: Arc<str>,
    /// Our addresses to dial from.
    uplinks: Vec<IpAddr>,
    /// Counts the failed dials to each neighbour. While its best leg is unknown, the next dial tries the next leg.
    turns: Mutex<BTreeMap<NodeId, usize>>,
    /// Whether a warning about the congestion control was logged already.
    complained: AtomicBool,
    /// How sockets are dialled.
    pub dialing: ArcSwap<Dialing>,
    /// The known network.
    pub graph: ArcSwap<Graph>,
    /// The members of all groups.
    pub groups: ArcSwap<Groups>,
    /// The links that are up.
    pub links: watch::Sender<Links>,
    /// Idle connections, and the flows that wait for one.
    pub pool: Pool,
    /// Sessions with one end here.
    pub sessions: Sessions,
    /// Sends events to the control thread.
    pub control: mpsc::Sender<Event>,
    /// The clock of the cores.
    pub clock: Clock,
    /// Counters.
    pub counters: Arc<Counters>,
    /// Rates that an operator has set for links.
    pub shapers: Shapers,
    /// Permits for measurements by other nodes.
    pub benches: Arc<Semaphore>,
    /// Datagrams to and from neighbours.
    pub datagrams: Datagrams,
    /// The groups that this node has entries for, and whether it is a member.
    pub member: Member,
    /// Whole packets, if this node has rules for them.
    pub packets: Option<Arc<Interception>>,
    /// Flows of UDP that this node catches or delivers.
    pub udp: Udp,
    /// The event loop of the thread of flows, once it runs.
    pub flows: OnceLock<tokio::runtime::Handle>,
}

/// Returns the declared rates of this node's links, by neighbour, bits per second: of those links that `is_meant` names.
fn rates(
    overlay: &config::Overlay,
    is_meant: impl Fn(&config::OverlayLink) -> bool,
) -> BTreeMap<NodeId, u64> {
    let node =
        |name: &str| overlay.nodes.iter().find(|node| *node.name == *name).map(|node| node.key.node_id());
    let links = overlay.links.iter().filter(|link| is_meant(link));
    links.filter_map(|link| Some((node(link.other(&overlay.name)?)?, link.rate))).collect()
}

impl Shared {
    /// Returns the state of a new overlay node.
    ///
    /// # Errors
    /// Returns what is wrong with its key.
    pub(super) fn new(
        overlay: &config::Overlay,
        (config, next_id): (Arc<ArcSwap<config::Config>>, NextId),
        control: mpsc::Sender<Event>,
        datagrams: Vec<UdpSocket>,
    ) -> anyhow::Result<Self> {
        let (identity, clock) = (Identity::new(overlay)?, Clock::start());
        let datagrams = {
            let members = identity.members().map(|(node, _)| node).collect();
            let lanes = Lanes::new(rates(overlay, |link| link.bought))?;
            let mode = (overlay.trust, overlay.tolerant_rate);
            Datagrams::new(identity.own(), members, datagrams, control.clone(), clock, lanes, mode)?
                .with_legs(overlay)
        };
        Ok(Self {
            tls: Tls::new(&identity)?,
            identity,
            deliver: overlay.deliver.clone(),
            config,
            ledger: Arc::default(),
            next_id,
            congestion: overlay.congestion.clone(),
            uplinks: overlay.uplinks.clone(),
            turns: Mutex::default(),
            complained: AtomicBool::new(false),
            dialing: ArcSwap::default(),
            graph: ArcSwap::default(),
            groups: ArcSwap::default(),
            links: watch::Sender::new(Links::default()),
            pool: Pool::default(),
            sessions: Sessions::default(),
            control,
            shapers: Shapers::new(rates(overlay, |link| !link.bought)),
            benches: Arc::new(Semaphore::new(BENCHES_MAX)),
            datagrams,
            clock,
            counters: Arc::default(),
            member: Member::new(&overlay.groups),
            packets: None,
            udp: Udp::default(),
            flows: OnceLock::new(),
        })
    }

    /// Returns the number of the link to this neighbour, if it is up.
    pub(super) fn link(&self, neighbour: NodeId) -> Option<u64> {
        self.links.borrow().get(&neighbour).copied()
    }

    /// Waits until the link with this number is down.
    pub(super) async fn link_is_down(&self, neighbour: NodeId, number: u64) {
        let mut links = self.links.subscribe();
        // The sender lives as long as `self`, so an error cannot happen.
        let _ = links.wait_for(|links| links.get(&neighbour) != Some(&number)).await;
    }

    /// Whether a connection to this neighbour is on a leg that is dead or clearly worse than another.
    pub(super) fn is_left(&self, neighbour: NodeId, stream: &Stream) -> bool {
        stream.ends().is_some_and(|ends| self.datagrams.legs.is_left(neighbour, ends))
    }

    /// Waits until the link with this number is down, or the leg of a connection with these ends is left.
    pub(super) async fn connection_is_cut(&self, neighbour: NodeId, number: u64, ends: Option<Ends>) {
        let left = async {
            match ends {
                Some(ends) => self.datagrams.legs.left(neighbour, ends).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.link_is_down(neighbour, number) => {}
            () = left => {}
        }
    }

    /// Waits until the link is up, and returns its number.
    pub(super) async fn link_is_up(&self, neighbour: NodeId) -> u64 {
        let mut links = self.links.subscribe();
        loop {
            if let Some(number) = links.borrow_and_update().get(&neighbour) {
                return *number;
            }
            if links.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Sets the options of a link's socket.
    ///
    /// # Errors
    /// Returns the error of setsockopt. A congestion control that is not available is only logged, once.
    pub(super) fn prepare(&self, socket: impl std::os::fd::AsFd) -> std::io::Result<()> {
        use std::sync::atomic::Ordering::Relaxed;
        sockopt::set_tcp_nodelay(&socket, true)?;
        sockopt::set_tcp_user_timeout(&socket, Some(USER_TIMEOUT))?;
        // A large SO_RCVLOWAT makes the kernel enlarge the receive buffer. Unlike SO_RCVBUF, it does not switch off automatic
        // tuning, and it needs no privilege.
        sockopt::set_receive_low_water(&socket, RECEIVE_ROOM)?;
        sockopt::set_receive_low_water(&socket, 1)?;
        let got = sockopt::set_congestion(&socket, &self.congestion);
        if !matches!(&got, Ok(name) if **name == *self.congestion) && !self.complained.swap(true, Relaxed) {
            let real = sockopt::congestion(&socket).unwrap_or_default();
            tracing::warn!(
                wanted = %self.congestion, got = %real,
                "the links' congestion control is not to be had: lossy links will be slow; load its module and allow it: \
                 'modprobe tcp_{0}; sysctl -w net.ipv4.tcp_allowed_congestion_control=\"reno cubic {0}\"'",
                self.congestion
            );
        }
        Ok(())
    }

    /// Dials a neighbour.
    ///
    /// # Errors
    /// Returns the step that failed.
    pub(super) async fn dial(&self, to: NodeId, purpose: Purpose) -> anyhow::Result<Stream> {
        let addresses = self.identity.member(to).map(|member| &*member.addresses).unwrap_or_default();
        let legs = datagrams::candidates(&self.uplinks, addresses);
        // The best leg; while there is none, one after the other.
        let best = self.datagrams.legs.best(to).map(|(from, to)| (Some(from), to));
        let turn = lock(&self.turns).get(&to).copied().unwrap_or(0);
        let next = legs.get(turn.checked_rem(legs.len()).unwrap_or(0)).copied();
        let (from, address) = best.or(next).context("it has no address")?;
        let patience = if best.is_none() && legs.len() > 1 { LEG_TIMEOUT } else { HANDSHAKE_TIMEOUT };
        let tls = self.tls.dial(to)?;
        let dialled = timeout(patience, async {
            let neighbour = Admitted::configured(address);
            let tcp =
                self.connect(neighbour, from, true).await.with_context(|| format!("connect to {address}"))?;
            let (mut stream, _) = Stream::handshake(tcp, tls).await.context("TLS handshake")?;
            let greeting = Greeting { version: VERSION, kind: LinkKind::Reliable, purpose };
            stream.send(&Frame::Greeting(greeting)).await.context("greeting")?;
            self.shape(&mut stream, to, purpose);
            anyhow::Ok(stream)
        });
        let dialled = dialled.await;
        if !matches!(dialled, Ok(Ok(_))) {
            *lock(&self.turns).entry(to).or_default() = turn.wrapping_add(1);
        }
        dialled.with_context(|| format!("{address} did not answer in time"))?
    }

    /// Limits flows to the rate of their link. Control connections are not limited, so hellos and records never wait.
    fn shape(&self, stream: &mut Stream, neighbour: NodeId, purpose: Purpose) {
        if !matches!(purpose, Purpose::Control | Purpose::MovedControl) {
            stream.shape(self.shapers.of(neighbour));
        }
    }

    /// Connects to a neighbour (`is_link`) or to an allowed destination of a flow, from this address if there is one.
    ///
    /// # Errors
    /// Returns the error of `bind(2)` or `connect(2)`.
    pub(super) async fn connect(
        &self,
        to: Admitted,
        from: Option<IpAddr>,
        is_link: bool,
    ) -> std::io::Result<TcpStream> {
        let socket = sockopt::stream_socket(&to.address())?;
        if let Some(mark) = self.dialing.load().mark {
            sockopt::set_mark(&socket, mark)?;
        }
        if is_link {
            self.prepare(&socket)?;
        } else {
            sockopt::set_tcp_nodelay(&socket, true)?;
        }
        if let Some(from) = from {
            socket.bind(&SocketAddr::new(from, 0).into())?;
        }
        gate::start(&socket, to)?;
        let tcp = TcpStream::from_std(socket.into())?;
        tcp.writable().await?;
        match tcp.take_error()? {
            Some(error) => Err(error),
            None => Ok(tcp),
        }
    }

    /// Makes the handshake on a connection that a neighbour dialled.
    ///
    /// # Errors
    /// Returns the step that failed.
    pub(super) async fn accept(&self, tcp: TcpStream) -> anyhow::Result<(Stream, NodeId, Purpose)> {
        self.prepare(&tcp)?;
        let tls = self.tls.accept()?;
        let accepted = timeout(HANDSHAKE_TIMEOUT, async {
            // Not `readable()`: that may return without a byte, and a silent peer would keep its place longer.
            let first = timeout(SILENCE_TIMEOUT, tcp.peek(&mut [0])).await.context("it says nothing")??;
            anyhow::ensure!(first > 0, "it closed the connection without a byte");
            let (mut stream, peer) = Stream::handshake(tcp, tls).await.context("TLS handshake")?;
            match stream.frame().await.context("greeting")? {
                Frame::Greeting(Greeting { version: VERSION, kind: LinkKind::Reliable, purpose }) => {
                    self.shape(&mut stream, peer, purpose);
                    Ok((stream, peer, purpose))
                }
                Frame::Greeting(greeting) => {
                    anyhow::bail!("a greeting of another version or kind: {greeting:?}")
                }
                other => anyhow::bail!("{other:?} instead of a greeting"),
            }
        });
        accepted.await.context("no handshake in time")?
    }
}
