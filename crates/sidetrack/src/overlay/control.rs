//! The control thread: hellos, link state and paths. It shares no connection, queue or thread with flows, so that no load
//! makes a link look dead.

use super::datagrams::LABEL;
use super::identity::Identity;
use super::setting::{LinkSetting, LinkSettingView};
use super::shared::Shared;
use super::status::{self, Status};
use super::stream::{Parked, Stream};
use sidetrack_core::overlay::frame::{Frame, Hello, Packet, Purpose};
use sidetrack_core::overlay::hello::{self, Lane, Lanes};
use sidetrack_core::overlay::node::{self, Input, Node, Output, echo_request};
use sidetrack_core::overlay::route::Graph;
use sidetrack_core::overlay::{Keys, NodeId, Signature, disseminate};
use sidetrack_sys::sockopt;
use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::yield_now;
use tokio::time::{sleep, sleep_until, timeout};

/// Events that wait for the control thread; whoever is faster waits.
pub const EVENTS_MAX: usize = 4096;

/// Frames that wait for one neighbour; what comes on top is dropped, and said again by the cores.
const FRAMES_MAX: usize = 1024;

/// How long a frame may take to leave before the connection counts as broken.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// Rests between attempts to dial a neighbour.
const REST_FIRST: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(2);

/// A connection that ended so soon has never served.
const SHORT_LIVED: Duration = Duration::from_millis(100);

/// Echo requests in flight.
const PINGS_MAX: usize = 1024;

/// On the control connection a lost hello comes with the next, so that only after several retransmissions in a row a link
/// counts as dead; in datagrams, after four. An end that is gone closes the connection, and is noticed at once; one that
/// lacks the time to speak is waited for as long as its kernel acknowledges what we say.
const HELLO: hello::Config = hello::Config {
    stream: hello::Pace { interval: Duration::from_millis(65), missed: 8 },
    datagrams: Some(hello::Pace { interval: Duration::from_millis(28), missed: 4 }),
    starved: Duration::from_secs(2),
    up_after: 2,
};

/// What the control thread is told.
pub enum Event {
    /// A control connection stands.
    Connected {
        /// The neighbour.
        neighbour: NodeId,
        /// The connection.
        stream: Box<Parked>,
        /// Whether we dialled it.
        dialled: bool,
        /// Resolves when the connection is of no use any more.
        gone: oneshot::Sender<()>,
    },
    /// A frame came.
    Frame(NodeId, u64, Frame),
    /// A hello came in a datagram of the link that this connection belongs to.
    Datagram(NodeId, u64, Hello),
    /// Another datagram of it came.
    Alive(NodeId, u64),
    /// A control connection is gone.
    Gone(NodeId, u64),
    /// Flows to this neighbour wait for connections that it must dial.
    Want(NodeId),
    /// Somebody wants the link to this neighbour to be treated differently; hears what is in force then.
    SetLink(NodeId, LinkSetting, oneshot::Sender<LinkSettingView>),
    /// Somebody wants to know.
    Status(oneshot::Sender<Status>),
    /// Somebody pings a node.
    Ping(NodeId, oneshot::Sender<Result<Echo, String>>),
}

/// An answered ping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Echo {
    /// The path there; the same back.
    pub path: Vec<NodeId>,
    /// The round trip.
    pub rtt: Duration,
}

struct Connection {
    number: u64,
    dialled: bool,
    frames: mpsc::Sender<Frame>,
    /// The same socket, to ask its kernel.
    socket: Option<OwnedFd>,
    _gone: oneshot::Sender<()>,
}

struct Pinged {
    since: Instant,
    path: Vec<NodeId>,
    reply: oneshot::Sender<Result<Echo, String>>,
}

/// Our keys, as the core wants them.
struct OwnKeys(Arc<Shared>);

impl Keys for OwnKeys {
    fn sign(&self, bytes: &[u8]) -> Signature {
        self.0.identity.sign(bytes)
    }

    fn verify(&self, node: NodeId, bytes: &[u8], signature: &Signature) -> bool {
        self.0.identity.verify(node, bytes, signature)
    }
}

/// See the module.
struct Control {
    shared: Arc<Shared>,
    node: Node<OwnKeys>,
    events: mpsc::Sender<Event>,
    connections: BTreeMap<NodeId, Connection>,
    /// Whoever dials waits while there is a connection.
    connected: watch::Sender<BTreeSet<NodeId>>,
    pings: BTreeMap<u64, Pinged>,
    /// What somebody wants of links.
    settings: BTreeMap<NodeId, LinkSettingView>,
    links_changed_unix_ms: u64,
    next_number: u64,
    began: Instant,
}

/// Runs until `stop`.
pub async fn run(shared: Arc<Shared>, mut inbox: mpsc::Receiver<Event>, mut stop: watch::Receiver<bool>) {
    let mut control = Control::new(shared.clone());
    for (neighbour, _) in shared.identity.dialled() {
        tokio::spawn(dial(shared.clone(), neighbour, control.connected.subscribe()));
    }
    control.drain();
    loop {
        let deadline = control.node.deadline();
        let now = shared.clock.now();
        let tick = async {
            match deadline {
                Some(at) => sleep_until(tokio::time::Instant::now() + at.since(now)).await,
                None => pending().await,
            }
            // Nobody is to be taken for silent whose words wait in a socket: the first turn of the loop finds the sockets
            // that can be read, the second has their tasks read them.
            yield_now().await;
            yield_now().await;
        };
        tokio::select! {
            // Hellos first: an event may wait, they may not.
            biased;
            () = tick => {
                control.take_what_came(&mut inbox);
                control.look_for_life();
                control.tell(Input::Tick);
            }
            event = inbox.recv() => match event {
                Some(event) => control.event(event),
                None => return,
            },
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

impl Control {
    fn new(shared: Arc<Shared>) -> Self {
        let members = shared.identity.members().map(|(node, _)| node).collect();
        let disseminate = disseminate::Config::new(shared.identity.own(), members, unix_ms().max(1));
        let config = node::Config { hello: HELLO, ..node::Config::new(disseminate) };
        Self {
            node: Node::new(config, OwnKeys(shared.clone()), shared.clock.now()),
            events: shared.control.clone(),
            shared,
            connections: BTreeMap::new(),
            connected: watch::Sender::default(),
            pings: BTreeMap::new(),
            settings: BTreeMap::new(),
            links_changed_unix_ms: 0,
            next_number: 1,
            began: Instant::now(),
        }
    }

    fn tell(&mut self, input: Input) {
        self.node.handle(self.shared.clock.now(), input);
        self.drain();
    }

    /// Takes all that waits now.
    fn take_what_came(&mut self, inbox: &mut mpsc::Receiver<Event>) {
        for _ in 0..EVENTS_MAX {
            match inbox.try_recv() {
                Ok(event) => self.event(event),
                Err(_) => break,
            }
        }
    }

    /// Whoever is silent may lack the time to speak: its kernel still acknowledges what we say.
    fn look_for_life(&mut self) {
        let suspects: Vec<_> = self.node.suspects(self.shared.clock.now()).collect();
        for neighbour in suspects {
            let socket = self.connections.get(&neighbour).and_then(|connection| connection.socket.as_ref());
            if let Some(info) = socket.and_then(|socket| sockopt::tcp_info(socket).ok()) {
                self.tell(Input::Alive(neighbour, info.last_ack));
            }
        }
    }

    fn is_current(&self, neighbour: NodeId, number: u64) -> bool {
        self.connections.get(&neighbour).is_some_and(|connection| connection.number == number)
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Connected { neighbour, stream, dialled, gone } => {
                self.connect(neighbour, *stream, dialled, gone);
            }
            Event::Frame(neighbour, number, frame) => {
                if !self.is_current(neighbour, number) {
                    return;
                }
                match frame {
                    Frame::Want { connections } => self.shared.pool.want(neighbour, connections),
                    frame => self.tell(Input::Frame(neighbour, frame)),
                }
            }
            Event::Datagram(neighbour, number, hello) => {
                if self.is_current(neighbour, number) {
                    self.tell(Input::Datagram(neighbour, hello));
                }
            }
            Event::Alive(neighbour, number) => {
                if self.is_current(neighbour, number) {
                    self.tell(Input::Alive(neighbour, Duration::ZERO));
                }
            }
            Event::Gone(neighbour, number) => {
                if self.is_current(neighbour, number) {
                    self.disconnect(neighbour);
                }
            }
            Event::Want(neighbour) => self.send(neighbour, Frame::Want { connections: 1 }),
            Event::Status(reply) => {
                // Whoever asked may be gone.
                let settings = self.settings.values().cloned().collect();
                let status = status::of(&self.shared, &self.node, self.began.elapsed());
                let links_changed_unix_ms = self.links_changed_unix_ms;
                let _ = reply.send(Status { settings, links_changed_unix_ms, ..status });
            }
            Event::SetLink(neighbour, setting, reply) => {
                let _ = reply.send(self.set_link(neighbour, &setting));
            }
            Event::Ping(to, reply) => self.ping(to, reply),
        }
    }

    fn set_link(&mut self, neighbour: NodeId, setting: &LinkSetting) -> LinkSettingView {
        let name = self.shared.identity.name(neighbour);
        let empty = || LinkSettingView { neighbour: name, ..LinkSettingView::default() };
        let view = self.settings.entry(neighbour).or_insert_with(empty);
        view.change(setting);
        let view = view.clone();
        if view.is_usual() {
            self.settings.remove(&neighbour);
        }
        let cost = (view.cost_ms > 0.0).then_some((view.cost_ms * 1000.0).ceil() as u32);
        self.tell(Input::Cost(neighbour, cost));
        let rate = (view.rate_mbit > 0.0).then_some((view.rate_mbit * 1e6).ceil() as u64);
        self.shared.shapers.of(neighbour).set(rate);
        self.shared.datagrams.set_loss(neighbour, (view.loss_percent * 10_000.0) as u32);
        if view.down {
            self.disconnect(neighbour);
        }
        // Whoever dials waits as if there were a connection.
        let has_one = view.down || self.connections.contains_key(&neighbour);
        self.connected.send_modify(|connected| {
            if has_one {
                connected.insert(neighbour)
            } else {
                connected.remove(&neighbour)
            };
        });
        view
    }

    fn is_kept_down(&self, neighbour: NodeId) -> bool {
        self.settings.get(&neighbour).is_some_and(|setting| setting.down)
    }

    fn connect(&mut self, neighbour: NodeId, stream: Parked, dialled: bool, gone: oneshot::Sender<()>) {
        if self.is_kept_down(neighbour) {
            return;
        }
        let own = self.shared.identity.own();
        if let Some(old) = self.connections.get(&neighbour) {
            // Both have dialled at a time: both keep the one that the lower of them dialled.
            if old.dialled != dialled && old.dialled == (own < neighbour) {
                return;
            }
            self.disconnect(neighbour);
        }
        let stream = match stream.unpark() {
            Ok(stream) => stream,
            Err(error) => return tracing::error!(%error, "cannot watch a control connection"),
        };
        let number = self.next_number;
        self.next_number += 1;
        let (frames, outbox) = mpsc::channel(FRAMES_MAX);
        let socket = stream.watched().ok();
        self.connections.insert(neighbour, Connection { number, dialled, frames, socket, _gone: gone });
        if let Ok(material) = stream.exported(LABEL) {
            let address = self.shared.identity.member(neighbour).and_then(|member| member.address);
            self.shared.datagrams.enter(neighbour, number, &material, address);
        }
        self.connected.send_modify(|connected| {
            connected.insert(neighbour);
        });
        tokio::spawn(converse(stream, neighbour, number, outbox, self.events.clone()));
        self.tell(Input::LinkOpened(neighbour));
    }

    fn disconnect(&mut self, neighbour: NodeId) {
        if self.connections.remove(&neighbour).is_some() {
            self.shared.datagrams.leave(neighbour);
            let is_kept_down = self.is_kept_down(neighbour);
            self.connected.send_modify(|connected| {
                if !is_kept_down {
                    connected.remove(&neighbour);
                }
            });
            self.tell(Input::LinkClosed(neighbour));
        }
    }

    fn send(&mut self, to: NodeId, frame: Frame) {
        if let Some(connection) = self.connections.get(&to) {
            // A neighbour that takes nothing will miss hellos, too, and lose its link.
            let _ = connection.frames.try_send(frame);
        }
    }

    fn hello(&mut self, to: NodeId, hello: Hello, lanes: Lanes) {
        if lanes.has(Lane::Stream) {
            self.send(to, Frame::Hello(hello));
        }
        if lanes.has(Lane::Datagram) {
            // One that cannot be sent is one that does not arrive.
            let _ = self.shared.datagrams.send(to, &Frame::Hello(hello));
        }
    }

    fn drain(&mut self) {
        while let Some(output) = self.node.poll() {
            match output {
                Output::Send(to, frame) => self.send(to, frame),
                Output::Hello(to, hello, lanes) => self.hello(to, hello, lanes),
                Output::LinkUp(neighbour) => {
                    let number = self.next_number;
                    self.next_number += 1;
                    self.change_links(|links| {
                        links.insert(neighbour, number);
                    });
                    tracing::info!(neighbour = %self.shared.identity.name(neighbour), "overlay link up");
                }
                Output::LinkDown(neighbour) => {
                    self.change_links(|links| {
                        links.remove(&neighbour);
                    });
                    tracing::warn!(neighbour = %self.shared.identity.name(neighbour), "overlay link down");
                    // A connection that fell silent is made anew.
                    self.disconnect(neighbour);
                }
                Output::RoutesChanged => {
                    let graph = self.node.graph().clone();
                    if !links(&graph).eq(links(&self.shared.graph.load())) {
                        self.links_changed_unix_ms = unix_ms();
                    }
                    self.shared.graph.store(graph);
                }
                Output::Deliver(packet) => self.echoed(&packet),
            }
        }
    }

    fn change_links(&self, change: impl FnOnce(&mut BTreeMap<NodeId, u64>)) {
        self.shared.links.send_modify(|links| change(Arc::make_mut(links)));
    }

    fn ping(&mut self, to: NodeId, reply: oneshot::Sender<Result<Echo, String>>) {
        self.pings.retain(|_, ping| !ping.reply.is_closed());
        let Some(route) = self.node.route(to, &BTreeSet::new()) else {
            let _ = reply.send(Err(format!("there is no path to {}", self.shared.identity.name(to))));
            return;
        };
        if self.pings.len() >= PINGS_MAX {
            let _ = reply.send(Err("too many pings at a time".to_owned()));
            return;
        }
        let number = self.next_number;
        self.next_number += 1;
        let path = route.path.nodes().to_vec();
        self.pings.insert(number, Pinged { since: Instant::now(), path, reply });
        self.tell(Input::Packet(echo_request(route.path, number.to_be_bytes().to_vec())));
    }

    fn echoed(&mut self, packet: &Packet) {
        let Ok(number) = <[u8; 8]>::try_from(&*packet.payload) else { return };
        if let Some(ping) = self.pings.remove(&u64::from_be_bytes(number)) {
            let _ = ping.reply.send(Ok(Echo { path: ping.path, rtt: ping.since.elapsed() }));
        }
    }
}

/// Reads and writes one control connection until it is gone or nobody has anything to say on it.
async fn converse(
    mut stream: Stream,
    neighbour: NodeId,
    number: u64,
    mut outbox: mpsc::Receiver<Frame>,
    events: mpsc::Sender<Event>,
) {
    loop {
        tokio::select! {
            biased;
            frame = outbox.recv() => {
                let Some(frame) = frame else { break };
                if !matches!(timeout(SEND_TIMEOUT, stream.send(&frame)).await, Ok(Ok(()))) {
                    break;
                }
            }
            frame = stream.frame() => match frame {
                Ok(frame) => {
                    if events.send(Event::Frame(neighbour, number, frame)).await.is_err() {
                        break;
                    }
                }
                Err(error) => {
                    tracing::debug!(%neighbour, %error, "control connection");
                    break;
                }
            },
        }
    }
    // The control thread ends before its tasks: then nobody needs to know.
    let _ = events.send(Event::Gone(neighbour, number)).await;
}

/// Keeps a control connection to a neighbour that has an address.
async fn dial(shared: Arc<Shared>, neighbour: NodeId, mut connected: watch::Receiver<BTreeSet<NodeId>>) {
    let mut rest = REST_FIRST;
    let mut told = String::new();
    loop {
        if connected.wait_for(|connected| !connected.contains(&neighbour)).await.is_err() {
            return;
        }
        let parked = match shared.dial(neighbour, Purpose::Control).await {
            Ok(stream) => stream.park().map_err(anyhow::Error::from),
            Err(error) => Err(error),
        };
        match parked {
            Ok(stream) => {
                let (gone, is_gone) = oneshot::channel();
                let stream = Box::new(stream);
                let event = Event::Connected { neighbour, stream, dialled: true, gone };
                if shared.control.send(event).await.is_err() {
                    return;
                }
                // An error is what a dropped sender looks like: the news we wait for.
                let since = Instant::now();
                let _ = is_gone.await;
                told.clear();
                // Whoever closes at once does not want us: a link that is kept down at the other end, say.
                let is_refused = since.elapsed() < SHORT_LIVED;
                rest = if is_refused { (rest * 2).min(REST_MAX) } else { REST_FIRST };
                if is_refused {
                    sleep(rest).await;
                }
            }
            Err(error) => {
                let error = format!("{error:#}");
                if error != told {
                    let name = shared.identity.name(neighbour);
                    tracing::warn!(neighbour = %name, %error, "cannot reach a neighbour; trying on");
                    told = error;
                }
                sleep(rest).await;
                rest = (rest * 2).min(REST_MAX);
            }
        }
        sleep(rest.min(REST_FIRST)).await;
    }
}

/// The links there are, whatever they cost.
fn links(graph: &Graph) -> impl Iterator<Item = (NodeId, NodeId)> {
    graph.links().map(|(a, b, _)| (a, b))
}

/// The wall clock.
fn unix_ms() -> u64 {
    let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(wall.as_millis()).unwrap_or_default()
}

/// Names of nodes on a path.
pub fn names(identity: &Identity, path: &[NodeId]) -> Vec<String> {
    path.iter().map(|node| identity.name(*node)).collect()
}
