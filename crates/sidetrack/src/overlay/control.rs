//! The control thread: hellos, link state and paths. It shares no connection, queue or thread with flows, so that load
//! does not make a link look dead.

use super::control_dial::{dial, redial};
use super::datagrams::{Ends, LABEL, recover};
use super::identity::Identity;
use super::paced;
use super::setting::{LinkSetting, LinkSettingView};
use super::shared::Shared;
use super::status::{self, Status};
use super::stream::{ParkedStream, Stream};
use sidetrack_core::overlay::frame::{Frame, Hello, Packet};
use sidetrack_core::overlay::hello::{self, Lane, Lanes};
use sidetrack_core::overlay::node::{self, Input, Node, Output, echo_request};
use sidetrack_core::overlay::route::Graph;
use sidetrack_core::overlay::{Keys, NodeId, Signature, disseminate, realtime};
use sidetrack_sys::sockopt;
use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::yield_now;
use tokio::time::{sleep_until, timeout};

/// Most events that wait for the control thread; a sender waits when the queue is full.
pub(super) const EVENTS_MAX: usize = 4096;

/// Most frames that wait for one neighbour. Further ones are dropped; the cores send them again.
const FRAMES_MAX: usize = 1024;

/// Longest time for sending a frame; after that the connection counts as broken.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// Most echo requests in flight.
const PINGS_MAX: usize = 1024;

/// On the control connection, a lost hello is retransmitted. So a link counts as dead there only after several
/// retransmissions in a row; in datagrams, after four lost hellos. An end whose process has ended closes the connection,
/// and is noticed at once. An end that lacks processor time is not given up as long as its kernel acknowledges our data.
const HELLO: hello::Config = hello::Config {
    stream: hello::Pace { interval: Duration::from_millis(65), missed: 8 },
    datagrams: Some(hello::Pace { interval: Duration::from_millis(28), missed: 4 }),
    starved: Duration::from_secs(2),
    up_after: 2,
};

/// An event for the control thread.
pub(super) enum Event {
    /// A control connection is open.
    Connected {
        /// The neighbour.
        neighbour: NodeId,
        /// The connection.
        stream: Box<ParkedStream>,
        /// True if we dialled it.
        dialled: bool,
        /// Resolves when the connection is no longer used.
        gone: oneshot::Sender<()>,
    },
    /// A frame came.
    Frame(NodeId, u64, Frame),
    /// A hello came in a datagram of the link that this connection belongs to.
    Datagram(NodeId, u64, Hello),
    /// Another datagram of that link came.
    Alive(NodeId, u64),
    /// A connection is open that replaces the control connection of a link. The link stays as it is.
    Moved {
        /// The neighbour.
        neighbour: NodeId,
        /// The connection.
        stream: Box<ParkedStream>,
        /// True if we dialled it.
        dialled: bool,
    },
    /// The legs of the link with this number have changed.
    Legs(NodeId, u64),
    /// A control connection has ended: the link with this number, and the number of the connection on it.
    Gone(NodeId, u64, u64),
    /// Flows to this neighbour wait for connections that it must dial.
    Want(NodeId),
    /// An operator changes the link to this neighbour; the answer is what is in force then.
    SetLink(NodeId, LinkSetting, oneshot::Sender<LinkSettingView>),
    /// A request for the status.
    Status(oneshot::Sender<Status>),
    /// This node has joined or left a group.
    Groups,
    /// A request to ping a node.
    Ping(NodeId, oneshot::Sender<Result<Echo, String>>),
}

/// An answered ping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Echo {
    /// The path there; the answer takes the same path back.
    pub path: Vec<NodeId>,
    /// The round trip.
    pub rtt: Duration,
}

struct Connection {
    /// The number of the link. A connection that replaces another one keeps it.
    number: u64,
    /// The number of the connection itself.
    serial: u64,
    dialled: bool,
    ends: Option<Ends>,
    /// A connection that will replace this one is being dialled.
    is_moving: bool,
    frames: mpsc::Sender<Frame>,
    /// A copy of the socket, to ask the kernel about it.
    socket: Option<OwnedFd>,
    _gone: oneshot::Sender<()>,
}

struct Pinged {
    since: Instant,
    path: Vec<NodeId>,
    reply: oneshot::Sender<Result<Echo, String>>,
}

/// Our keys in the form that the core needs.
struct OwnKeys(Arc<Shared>);

impl Keys for OwnKeys {
    fn sign(&self, bytes: &[u8]) -> Signature {
        self.0.identity.sign(bytes)
    }

    fn verify(&self, node: NodeId, bytes: &[u8], signature: &Signature) -> bool {
        self.0.identity.verify(node, bytes, signature)
    }
}

/// The state of the control thread.
struct Control {
    shared: Arc<Shared>,
    node: Node<OwnKeys>,
    events: mpsc::Sender<Event>,
    connections: BTreeMap<NodeId, Connection>,
    /// The neighbours with a connection. A dialling task waits while there is one.
    connected: watch::Sender<BTreeSet<NodeId>>,
    pings: BTreeMap<u64, Pinged>,
    /// What operators have set for links.
    settings: BTreeMap<NodeId, LinkSettingView>,
    links_changed_unix_ms: u64,
    next_number: u64,
    began: Instant,
}

/// Runs the control thread until `stop`.
pub(super) async fn run(
    shared: Arc<Shared>,
    mut inbox: mpsc::Receiver<Event>,
    mut stop: watch::Receiver<bool>,
) {
    let mut control = Control::new(shared.clone());
    for neighbour in shared.identity.dialled() {
        tokio::spawn(dial(shared.clone(), neighbour, control.connected.subscribe()));
    }
    control.tell(Input::Groups(shared.member.joined()));
    loop {
        let deadline = control.node.deadline();
        let now = shared.clock.now();
        let tick = async {
            match deadline {
                Some(at) => sleep_until(tokio::time::Instant::now() + at.since(now)).await,
                None => pending().await,
            }
            // A neighbour whose frames wait in a socket must not look silent. The first turn of the loop finds the
            // sockets that can be read; in the second, their tasks read them.
            yield_now().await;
            yield_now().await;
        };
        tokio::select! {
            // Hellos first: an event may wait, a hello may not.
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
        let (epoch, _) = shared.datagrams.numbering();
        let topology = shared.identity.topology().clone();
        let config = node::Config { hello: HELLO, epoch, topology, ..node::Config::new(disseminate) };
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
        let (_, next) = self.shared.datagrams.numbering();
        self.node.set_next_packet(next);
        self.node.handle(self.shared.clock.now(), input);
        self.drain();
    }

    /// Handles all events that wait now.
    fn take_what_came(&mut self, inbox: &mut mpsc::Receiver<Event>) {
        for _ in 0..EVENTS_MAX {
            match inbox.try_recv() {
                Ok(event) => self.event(event),
                Err(_) => break,
            }
        }
    }

    /// Checks silent neighbours: one that lacks processor time may be silent, but its kernel still acknowledges our data.
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
            Event::Moved { neighbour, stream, dialled } => self.replace(neighbour, *stream, dialled),
            Event::Legs(neighbour, number) => {
                if self.is_current(neighbour, number) {
                    self.move_off(neighbour);
                }
            }
            Event::Gone(neighbour, number, serial) => {
                let is_last = |connection: &Connection| connection.serial == serial;
                if self.is_current(neighbour, number) && self.connections.get(&neighbour).is_some_and(is_last)
                {
                    self.disconnect(neighbour);
                }
            }
            Event::Want(neighbour) => self.send(neighbour, Frame::Want { connections: 1 }),
            Event::Status(reply) => {
                // The asking task may have ended.
                let settings = self.settings.values().cloned().collect();
                let status = status::of(&self.shared, &self.node, self.began.elapsed());
                let links_changed_unix_ms = self.links_changed_unix_ms;
                let _ = reply.send(Status { settings, links_changed_unix_ms, ..status });
            }
            Event::SetLink(neighbour, setting, reply) => {
                let _ = reply.send(self.set_link(neighbour, &setting));
            }
            Event::Groups => self.tell(Input::Groups(self.shared.member.joined())),
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
        self.shared.shapers.set(neighbour, rate);
        paced::limit(&self.shared, neighbour, rate);
        self.shared.datagrams.set_loss(neighbour, (view.loss_percent * 10_000.0) as u32);
        if view.down {
            self.disconnect(neighbour);
        }
        // While the link is kept down, the dialling task waits as if there were a connection.
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

    fn connect(&mut self, neighbour: NodeId, stream: ParkedStream, dialled: bool, gone: oneshot::Sender<()>) {
        if self.is_kept_down(neighbour) || !self.shared.identity.may_have_link(neighbour) {
            return;
        }
        let own = self.shared.identity.own();
        if let Some(old) = self.connections.get(&neighbour) {
            // Both ends dialled at the same time: both keep the connection that the lower node dialled.
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
        let (serial, ends, is_moving) = (number, stream.ends(), false);
        let connection = Connection { number, serial, dialled, ends, is_moving, frames, socket, _gone: gone };
        self.connections.insert(neighbour, connection);
        if let Ok(material) = stream.exported(LABEL) {
            let member = self.shared.identity.member(neighbour);
            let addresses = member.map(|member| &*member.addresses).unwrap_or_default();
            self.shared.datagrams.enter(neighbour, number, &material, (addresses, dialled));
        }
        self.connected.send_modify(|connected| {
            connected.insert(neighbour);
        });
        tokio::spawn(converse(stream, neighbour, (number, serial), outbox, self.events.clone()));
        self.tell(Input::LinkOpened(neighbour));
    }

    /// Dials a connection over the best leg, if the control connection is on a leg that is left.
    fn move_off(&mut self, neighbour: NodeId) {
        let legs = &self.shared.datagrams.legs;
        let is_left = |ends: Ends| legs.is_left(neighbour, ends) && legs.best(neighbour).is_some();
        if let Some(connection) = self.connections.get_mut(&neighbour)
            && connection.dialled
            && !connection.is_moving
            && connection.ends.is_some_and(is_left)
        {
            connection.is_moving = true;
            tokio::spawn(redial(self.shared.clone(), neighbour, connection.number));
        }
    }

    /// Replaces the control connection that the link has.
    fn replace(&mut self, neighbour: NodeId, stream: ParkedStream, dialled: bool) {
        let Some(connection) = self.connections.get_mut(&neighbour) else { return };
        // Only the end that dialled the link moves it. A neighbour that restarted sends another purpose.
        if connection.dialled != dialled {
            return;
        }
        let stream = match stream.unpark() {
            Ok(stream) => stream,
            Err(error) => return tracing::error!(%error, "cannot watch a control connection"),
        };
        let (frames, outbox) = mpsc::channel(FRAMES_MAX);
        let serial = self.next_number;
        self.next_number += 1;
        (connection.serial, connection.is_moving) = (serial, false);
        (connection.ends, connection.socket) = (stream.ends(), stream.watched().ok());
        // Dropping the sender ends the earlier connection. Records that were on their way there are sent again.
        connection.frames = frames;
        let number = connection.number;
        tokio::spawn(converse(stream, neighbour, (number, serial), outbox, self.events.clone()));
        tracing::info!(neighbour = %self.shared.identity.name(neighbour), "overlay link moved to another leg");
        // The best leg may have changed in the meantime.
        self.move_off(neighbour);
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
            // If its queue is full, the neighbour also misses hellos, and its link goes down.
            let _ = connection.frames.try_send(frame);
        }
    }

    fn hello(&mut self, to: NodeId, hello: Hello, lanes: Lanes) {
        if let (Some(link), Some(quality)) = (self.shared.datagrams.link(to), self.node.quality(to)) {
            link.one_way_us.store(quality.rtt_us / 2, Relaxed);
            let round_trip = Duration::from_micros(quality.rtt_us.into());
            recover(&self.shared, &link, realtime::Input::RoundTrip(round_trip));
        }
        if lanes.has(Lane::Stream) {
            self.send(to, Frame::Hello(hello));
        }
        if lanes.has(Lane::Datagram) {
            // A hello that cannot be sent counts as one that was lost.
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
                    // A silent connection is replaced by a new one.
                    self.disconnect(neighbour);
                }
                Output::RoutesChanged => {
                    let graph = self.node.graph().clone();
                    if !links(&graph).eq(links(&self.shared.graph.load())) {
                        self.links_changed_unix_ms = unix_ms();
                    }
                    self.shared.graph.store(graph);
                }
                Output::GroupsChanged => self.shared.groups.store(self.node.groups().clone()),
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

/// Reads and writes one control connection until it ends or the control thread drops it.
async fn converse(
    mut stream: Stream,
    neighbour: NodeId,
    (number, serial): (u64, u64),
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
    // The control thread ends before its tasks; an error only means that.
    let _ = events.send(Event::Gone(neighbour, number, serial)).await;
}

/// Returns the links of the graph without their costs.
fn links(graph: &Graph) -> impl Iterator<Item = (NodeId, NodeId)> {
    graph.links().map(|(a, b, _)| (a, b))
}

/// Returns the wall clock time, milliseconds since 1970.
fn unix_ms() -> u64 {
    let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(wall.as_millis()).unwrap_or_default()
}

/// Returns the names of the nodes on a path.
pub(super) fn names(identity: &Identity, path: &[NodeId]) -> Vec<String> {
    path.iter().map(|node| identity.name(*node)).collect()
}
