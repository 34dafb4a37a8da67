//! A flow that passes through containers: one pump for each part of it, from the client to the first container,
//! between containers, and to the server. The parts are one flow with one record and one end. The part that
//! fails first gives the reason.

use super::carrying::Moving;
use super::containers::Joint;
use super::pump::{Ending, Ends, Law, Pump};
use crate::carry::Stream;
use crate::function::container::Guest;
use crate::live::{Clock, LiveFlow};
use sidetrack_core::chain::Chain;
use sidetrack_core::flow::EndReason;
use sidetrack_core::splice;
use std::cell::Cell;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

/// One part of a flow.
struct Part {
    pump: Pump<Stream>,
    /// The counts and the deadline of this part. It is not in any ledger.
    live: Arc<LiveFlow>,
    is_over: bool,
    /// The functions at its two ends, if there are any.
    client: Option<Arc<str>>,
    server: Option<Arc<str>>,
}

/// The parts of a flow with containers. Resolves when all parts have ended.
pub(super) struct Parts {
    parts: Vec<Part>,
    live: Arc<LiveFlow>,
    /// Bytes from the client and from the server that were already added to the flow's counts.
    counted: (u64, u64),
    /// Keep the containers running.
    _guests: Vec<Guest>,
}

/// The two sides of a part, the bytes read from them, and the functions between them.
struct Piece {
    sides: (Stream, Stream),
    early: (Vec<u8>, Vec<u8>),
    chain: Option<Box<Chain>>,
    client: Option<Arc<str>>,
}

impl Parts {
    /// Connects a client and a server through these containers; at least one.
    pub(super) fn new(
        (client, server): (Stream, Stream),
        moving: Moving,
        joints: Vec<Joint>,
        live: Arc<LiveFlow>,
        clock: Clock,
    ) -> Self {
        let Moving { early: (up, down), config, chain, wiring: _ } = moving;
        let ends = Rc::new(Ends::default());
        let handed = Rc::default();
        let mut maker = Maker { parts: Vec::new(), ends, handed, config, live: live.clone(), clock };
        let mut guests = Vec::new();
        let (mut side, mut said, mut chain, mut function) = (client, up, chain, None);
        for joint in joints {
            let piece = Piece {
                sides: (side, joint.into.into()),
                early: (said, joint.early),
                chain,
                client: function,
            };
            maker.add(piece, Some(joint.name.clone()));
            guests.push(joint.guest);
            (side, said, chain, function) = (joint.back.into(), joint.held, joint.chain, Some(joint.name));
        }
        let last = Piece { sides: (side, server), early: (said, down), chain, client: function };
        maker.add(last, None);
        Self { parts: maker.parts, live, counted: (0, 0), _guests: guests }
    }

    /// Adds the parts' new counts to the flow: bytes written to the server, and bytes written to the client.
    fn count(&mut self) {
        let (Some(first), Some(last)) = (self.parts.first(), self.parts.last()) else { return };
        let (up, down) = (last.live.bytes().0, first.live.bytes().1);
        let news = (up.saturating_sub(self.counted.0), down.saturating_sub(self.counted.1));
        if news != (0, 0) {
            self.live.count(news.0, news.1);
            self.live.touch(self.live.age());
            self.counted = (up, down);
        }
        if first.live.first_byte_time().is_some() {
            self.live.first_byte(self.live.age());
        }
    }

    fn end(&mut self, ending: Ending) -> Ending {
        for part in self.parts.iter_mut().filter(|part| !part.is_over) {
            part.pump.abort();
        }
        self.count();
        ending
    }
}

struct Maker {
    parts: Vec<Part>,
    ends: Rc<Ends>,
    /// Of the latest part: whether the function behind it has received everything.
    handed: Rc<Cell<bool>>,
    config: splice::Config,
    live: Arc<LiveFlow>,
    clock: Clock,
}

impl Maker {
    fn add(&mut self, piece: Piece, server: Option<Arc<str>>) {
        let Piece { sides, early, chain, client } = piece;
        let live = Arc::new(LiveFlow::new(self.live.id));
        let handed = Rc::new(Cell::new(false));
        let law = Law {
            ends: self.ends.clone(),
            client: client.clone(),
            server: server.clone(),
            handed: handed.clone(),
            hands: std::mem::replace(&mut self.handed, handed),
        };
        let pump = Pump::new(sides, early, self.config, live.clone(), self.clock).through(chain).under(law);
        self.parts.push(Part { pump, live, is_over: false, client, server });
    }
}

impl Part {
    /// Turns the end of this part into the end of the flow. A reset by a function is reported as the function's.
    fn translate(&self, ending: Ending) -> Ending {
        let function = match ending.reason {
            EndReason::ClientReset => &self.client,
            EndReason::ServerReset => &self.server,
            _ => &None,
        };
        match function {
            None => ending,
            Some(function) => {
                let said = ending.error.map(|error| format!(" ({error})")).unwrap_or_default();
                let words = format!("function '{function}': cut the flow{said}");
                Ending {
                    reason: EndReason::FunctionFailed,
                    error: Some(io::Error::other(words)),
                    wired: None,
                }
            }
        }
    }
}

impl Future for Parts {
    type Output = Ending;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ending> {
        let this = self.get_mut();
        this.live.set_waker(cx.waker());
        if let Some(reason) = this.live.ending() {
            for part in &this.parts {
                part.live.end(reason);
            }
        }
        let mut failed = None;
        for part in this.parts.iter_mut().filter(|part| !part.is_over) {
            if let Poll::Ready(ending) = Pin::new(&mut part.pump).poll(cx) {
                part.is_over = true;
                if ending.reason != EndReason::Ok && failed.is_none() {
                    failed = Some(part.translate(ending));
                }
            }
        }
        if let Some(ending) = failed {
            return Poll::Ready(this.end(ending));
        }
        if this.parts.iter().all(|part| part.is_over) {
            return Poll::Ready(this.end(Ending { reason: EndReason::Ok, error: None, wired: None }));
        }
        this.count();
        let deadline = this.parts.iter().filter(|part| !part.is_over).filter_map(|part| part.live.deadline());
        this.live.set_deadline(deadline.min(), EndReason::Idle);
        Poll::Pending
    }
}
