//! Sends flows to a collector of IPFIX.
//!
//! ```text
//!            dial                 all sent, closed
//!   WAITING ------> OPEN session ------------------> over
//!      ^             |
//!      +-------------+ the connection broke, or no program receives: a new session, after a pause
//! ```

mod link;
mod told;

use super::backoff::Backoff;
use super::lane::{Drop, Lane};
use super::{Around, chance, dial};
use crate::config::Ipfix;
use crate::live::Batch;
use crate::record::FlowRecord;
use link::Link;
use sidetrack_core::flow::Protocol;
use sidetrack_core::ipfix::{Session, Settings};
use sidetrack_core::time::Instant;
use sidetrack_sys::udp;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use told::Told;

/// Most bytes of a message on a connection: small enough that a report is soon with the collector.
const STREAM_MESSAGE: usize = 16 << 10;

/// Headers of IP and UDP, bytes.
const HEADERS: [usize; 2] = [20 + 8, 40 + 8];

/// Sends until the queue is closed, and everything in it is sent.
pub(super) async fn run(lane: Arc<Lane>, settings: Ipfix, around: Around) {
    let mut backoff = Backoff::default();
    let mut sender = Sender {
        told: Told::new(settings.active),
        began: std::time::Instant::now(),
        lane: lane.clone(),
        settings,
        around,
    };
    loop {
        let sent_before = lane.counts().sent;
        let error = match sender.open().await {
            Ok(mut open) => match sender.serve(&mut open).await {
                Ok(()) => return,
                Err(error) => error,
            },
            Err(error) => error,
        };
        lane.failed(&error);
        lane.drop_held(Drop::Lost);
        if lane.queue.is_closed() {
            return;
        }
        if lane.counts().sent > sent_before {
            backoff.reset();
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.next(chance())) => {}
            () = lane.queue.closing() => {}
        }
    }
}

/// A transport session.
struct Open {
    link: Link,
    session: Session,
}

struct Sender {
    lane: Arc<Lane>,
    settings: Ipfix,
    around: Around,
    told: Told,
    began: std::time::Instant,
}

/// Largest message in one packet to this address.
fn room(to: SocketAddr) -> io::Result<usize> {
    let mtu = usize::try_from(udp::route_mtu(to)?).unwrap_or(0);
    Ok(mtu.saturating_sub(HEADERS[usize::from(to.is_ipv6())]))
}

fn unix_s() -> u32 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // The field has 32 bits and wraps in 2106 (RFC 7011 Sec. 3.1).
    (since.as_secs() & u64::from(u32::MAX)) as u32
}

impl Sender {
    async fn open(&self) -> io::Result<Open> {
        let Ipfix { collector, transport, domain, refresh, enterprise, .. } = &self.settings;
        let mark = self.around.mark;
        let (link, message_bytes, refresh) = match transport {
            Protocol::Tcp => (Link::Stream(dial::stream(collector, mark).await?), STREAM_MESSAGE, None),
            Protocol::Udp => {
                let (socket, to) = dial::datagrams(collector, mark).await?;
                (Link::Datagrams(socket, to), room(to)?, Some(*refresh))
            }
        };
        let settings = Settings { domain: *domain, message_bytes, refresh, enterprise: *enterprise };
        Ok(Open { link, session: Session::new(settings) })
    }

    fn now(&self) -> Instant {
        Instant::ZERO + self.began.elapsed()
    }

    /// Sends what comes, until the queue is closed and empty.
    ///
    /// # Errors
    /// The connection broke, or no program receives the datagrams.
    async fn serve(&mut self, open: &mut Open) -> io::Result<()> {
        let lane = self.lane.clone();
        let mut look = tokio::time::interval(self.told.look_every().unwrap_or(Duration::from_secs(3600)));
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                // First: what is written to a connection that the collector has closed is lost.
                error = open.link.broken() => return Err(error),
                batch = lane.queue.next() => match batch {
                    Some(batch) => self.ended(&batch, open).await?,
                    None => return open.link.end().await,
                },
                _ = look.tick() => self.running(open).await?,
            }
        }
    }

    /// Reports flows that have ended.
    async fn ended(&mut self, batch: &Batch, open: &mut Open) -> io::Result<()> {
        self.lane.hold(batch.len() as u64);
        for past in batch.iter() {
            let ended = past.to_ended();
            let decided = ended.flow.decided();
            let record = FlowRecord::ended(&ended, decided.as_deref());
            let dialled = ended.flow.trace().dialled;
            open.session.add(self.now(), unix_s(), &self.told.ended(&record, dialled));
            self.send(open).await?;
        }
        if self.lane.queue.flows() == 0 {
            open.session.flush(unix_s());
        }
        self.send(open).await
    }

    /// Reports flows that go on for longer than the active time-out.
    async fn running(&mut self, open: &mut Open) -> io::Result<()> {
        if self.told.look_every().is_none() {
            return Ok(());
        }
        let ledgers = self.around.ledgers.clone();
        for flow in ledgers.iter().flat_map(|ledger| ledger.snapshot()) {
            let decided = flow.decided();
            let is_decided = decided.as_ref().is_some_and(|decided| decided.verdict.is_some());
            if !is_decided || !self.told.is_due(flow.id.0, flow.opened) {
                continue;
            }
            self.lane.hold(1);
            let record = FlowRecord::live(&flow, decided.as_deref());
            open.session.add(self.now(), unix_s(), &self.told.running(&record, flow.trace().dialled));
            self.send(open).await?;
        }
        self.told.forget_gone();
        open.session.flush(unix_s());
        self.send(open).await
    }

    /// Sends the messages that are complete.
    async fn send(&self, open: &mut Open) -> io::Result<()> {
        while let Some(message) = open.session.poll() {
            match open.link.send(&message.bytes).await {
                Ok(()) => self.lane.sent(message.records.into()),
                Err(error) if udp::is_too_long(&error) => {
                    // The kernel has learnt of a smaller MTU since.
                    self.lane.dropped(Drop::Lost, message.records.into());
                    if let Link::Datagrams(_, to) = &open.link {
                        open.session.limit(room(*to)?);
                    }
                }
                Err(error) => {
                    self.lane.dropped(Drop::Lost, message.records.into());
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}
