//! The task of one flow: its path is set up, then its bytes are moved. Written as a state machine by hand: an
//! `async fn` reserves room for all its stages side by side, and ten thousand idle flows need only the last one.

use super::containers::Joint;
use super::near::AskedDatagrams;
use super::parts::Parts;
use super::pump::{Ending, Pump, Wiring};
use super::setup::{Connect, Ready, Setup, SetupEnd, undecided};
use super::{Asking, AskingTunnel, Entry, Relays};
use crate::carry::{Client, Stream};
use crate::intercept::Listening;
use crate::intercept::hold::Held;
use crate::live::{Clock, LiveFlow, Multipath, Spread};
use crate::reactor::TcpStream;
use crate::worker::{FlowOfSession, Wired, Worker};
use sidetrack_core::chain::Chain;
use sidetrack_core::policy::Action;
use sidetrack_core::splice;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// A connection for [`Setup`].
pub struct Passage {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The listener that accepted it.
    pub listening: Arc<Listening>,
    /// The client's address.
    pub peer: SocketAddr,
    /// The client's HTTP CONNECT request. `None`: the interceptor finds the destination.
    pub connect: Option<Connect>,
    /// The client's connection waits to be accepted; the client itself is a place that is empty until then.
    pub held: Option<Rc<Held>>,
    /// Serve the flows of UDP that clients ask for. `None`: there are none.
    pub relays: Option<Relays>,
}

/// Sets up the path, moves the bytes, and ends the flow.
pub fn carry_on(passage: Passage, client: Client, entry: Entry) -> Carrying {
    Carrying { stage: Stage::Making(Box::pin(make(passage, client, entry))) }
}

/// The task made by [`carry_on`].
pub struct Carrying {
    pub(super) stage: Stage,
}

#[expect(clippy::large_enum_variant, reason = "all but the first moments of a flow are the large one")]
pub(super) enum Stage {
    /// The set-up. Its memory is freed before the long part of the flow's life begins.
    Making(Pin<Box<dyn Future<Output = Stage>>>),
    Moving(Carried),
    /// The client has asked for flows of UDP.
    Relaying(Pin<Box<dyn Future<Output = ()>>>),
    Over,
}

/// A flow whose path is set up.
pub(super) struct Carried {
    pub(super) motion: Motion,
    pub(super) entry: Entry,
    /// The SOCKS6 session it is part of.
    pub(super) part_of: Option<FlowOfSession>,
    /// A note for the record, used if the end has no detail of its own.
    pub(super) note: Option<Box<str>>,
    /// Counts what the flow does with its paths of the overlay, if it has several.
    pub(super) spread: Option<Arc<Spread>>,
}

impl Carried {
    /// Ends the flow, or lets it go on without this task.
    fn end(self, ending: Ending) -> Option<Arc<Wired>> {
        let Self { mut entry, part_of, note, spread, .. } = self;
        if let Some(handed) = ending.wired {
            let wired = entry.wired(*handed, note.map(Into::into))?;
            part_of.into_iter().for_each(|session| wired.keep(Box::new(session)));
            return Some(wired);
        }
        drop(part_of);
        let own = ending.error.map(|error| error.to_string()).or(note.map(Into::into));
        let parts = [own, spread.map(|spread| spread.to_string())];
        let detail = parts.into_iter().flatten().reduce(|own, spread| own + "; " + &spread);
        entry.end(ending.reason, detail);
        None
    }
}

impl Future for Carrying {
    /// The flow, if it goes on without this task.
    type Output = Option<Arc<Wired>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Arc<Wired>>> {
        let this = self.get_mut();
        loop {
            if let Stage::Moving(carried) = &mut this.stage
                && carried.leaves()
            {
                this.stage = Stage::Over;
            }
            let next = match &mut this.stage {
                Stage::Making(making) => ready!(making.as_mut().poll(cx)),
                Stage::Relaying(relaying) => {
                    ready!(relaying.as_mut().poll(cx));
                    Stage::Over
                }
                Stage::Moving(carried) => {
                    let ending = ready!(Pin::new(&mut carried.motion).poll(cx));
                    let Stage::Moving(carried) = std::mem::replace(&mut this.stage, Stage::Over) else {
                        return Poll::Ready(None);
                    };
                    return Poll::Ready(carried.end(ending));
                }
                Stage::Over => return Poll::Ready(None),
            };
            this.stage = next;
        }
    }
}

/// Runs the set-up, and returns what follows.
async fn make(passage: Passage, mut client: Client, mut entry: Entry) -> Stage {
    let Passage { worker, listening, peer, connect, held, relays } = passage;
    let setup = Setup::new(&worker, &listening, entry.live(), peer, connect);
    let made = setup.holding(held).run(&mut client).await;
    if entry.live().decided().is_none() {
        entry.live().decide(undecided(&listening, peer));
    }
    match made {
        SetupEnd::Ready(ready) => Stage::Moving(carried(client, ready, entry, &worker)),
        SetupEnd::Associate(handshake, mut request, peer) => {
            let mut shown = undecided(&listening, peer);
            shown.flow.user.clone_from(&request.user);
            entry.live().decide(shown);
            let session = request.session.take().map(|session| worker.flow_of(session));
            let asking =
                Asking { worker, listening, client, handshake: *handshake, request, peer, entry, session };
            relays.map_or(Stage::Over, |relays| Stage::Relaying((relays.associate)(asking)))
        }
        SetupEnd::Datagrams(asked) => {
            let AskedDatagrams { connect, near, peer } = *asked;
            let near = Some(Box::new(near));
            let asking = AskingTunnel { worker, listening, client, connect, peer, entry, near };
            relays.map_or(Stage::Over, |relays| Stage::Relaying((relays.tunnel)(asking)))
        }
        SetupEnd::Answered(reason, detail) => {
            entry.end(reason, detail);
            client.close_after_answer().await;
            Stage::Over
        }
        SetupEnd::Failed(failure) => {
            client.reset();
            entry.end(failure.reason, Some(failure.detail));
            Stage::Over
        }
    }
}

fn carried(mut client: Client, ready: Ready, entry: Entry, worker: &Worker) -> Carried {
    let Ready { server, early, config, way, session: part_of } = ready;
    let wiring = if way.has_functions() { None } else { wiring(worker, entry.live(), config) };
    let clock = worker.clock;
    let moving = Moving { early: (client.take_held(), early), config, chain: way.chain, wiring };
    let sides = (client.stream, server);
    let motion = if way.joints.is_empty() {
        moving.between(sides, entry.live(), clock)
    } else {
        moving.through(sides, way.joints, entry.live(), clock)
    };
    Carried { motion, entry, part_of, note: way.note.map(Into::into), spread: way.spread }
}

/// The way to the wire of a flow without functions, if it may go there.
pub(super) fn wiring(worker: &Worker, live: &LiveFlow, config: splice::Config) -> Option<Box<Wiring>> {
    let wires = worker.wires()?;
    let decided = live.decided()?;
    let Some(Action::Carry(carry)) = decided.action() else { return None };
    let after = worker.config().wire_after(carry)?;
    let is_multipath = live.multipath() != Multipath::default();
    (!is_multipath).then(|| Box::new(Wiring::new(wires.clone(), after, config)))
}

/// What is needed to start moving bytes.
pub(super) struct Moving {
    /// Bytes that were already read from the client and from the server.
    pub early: (Vec<u8>, Vec<u8>),
    pub config: splice::Config,
    /// The functions on the way.
    pub chain: Option<Box<Chain>>,
    /// The way to the wire, if the flow may go there.
    pub wiring: Option<Box<Wiring>>,
}

impl Moving {
    /// Moves bytes between two sides.
    pub(super) fn between(self, sides: (Stream, Stream), live: &Arc<LiveFlow>, clock: Clock) -> Motion {
        let Self { early, config, chain, wiring } = self;
        let live = live.clone();
        match sides {
            (Stream::Tcp(client), Stream::Tcp(server)) => {
                let pump = Pump::new((client, server), early, config, live, clock);
                Motion::Sockets(pump.through(chain).wiring(wiring))
            }
            sides => Motion::Any(Box::pin(Pump::new(sides, early, config, live, clock).through(chain))),
        }
    }

    /// Moves bytes through containers; at least one.
    fn through(
        self,
        sides: (Stream, Stream),
        joints: Vec<Joint>,
        live: &Arc<LiveFlow>,
        clock: Clock,
    ) -> Motion {
        Motion::Any(Box::pin(Parts::new(sides, self, joints, live.clone(), clock)))
    }
}

/// Moves a flow's bytes. The variant for two sockets decides the size of the enum, so everything else is in a
/// box.
#[expect(clippy::large_enum_variant, reason = "nearly all flows are between sockets")]
pub(super) enum Motion {
    Sockets(Pump<TcpStream>),
    Any(Pin<Box<dyn Future<Output = Ending>>>),
}

impl Future for Motion {
    type Output = Ending;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ending> {
        match self.get_mut() {
            Self::Sockets(pump) => Pin::new(pump).poll(cx),
            Self::Any(motion) => motion.as_mut().poll(cx),
        }
    }
}
