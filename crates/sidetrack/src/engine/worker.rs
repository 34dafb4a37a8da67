//! The threads of the engine: each receives frames, hands them to the engine and sends the results. It also handles
//! time-outs, records and requests to end flows.

mod count;
mod offload;
mod round;
mod routes;

use super::bell::Bell;
use super::decided::{self, Carried};
use super::driver::Driver;
use super::flows::Flows;
use super::offload::Offload;
use super::open::{Kept, Opened, Part};
use super::select::Select;
use super::strays::Strays;
use super::surroundings::Surroundings;
use crate::config::{EngineListener, Listener, ListenerKind};
use crate::live::work::{Work, WorkCounts};
use crate::live::{Ledger, profile::Stage};
use offload::{OffloadInputs, answer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidetrack_core::engine::{self, Engine, Listen, Schedule, Share};
use sidetrack_core::flow::EndReason;
use sidetrack_core::time::Instant;
use sidetrack_sys::bpf::Cookies;
use sidetrack_sys::sync::lock;
use sidetrack_sys::{pages, random};
use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

/// How often the counts of flows in flight are updated.
const COUNT_EVERY: Duration = Duration::from_secs(1);

/// How long a worker pauses when its interfaces return errors.
const REST: Duration = Duration::from_millis(100);

/// The workers of all engines of a node.
#[derive(Debug)]
pub struct Engines {
    threads: Mutex<Vec<(Arc<Bell>, JoinHandle<()>)>>,
    ledgers: Vec<Arc<Ledger>>,
    works: Vec<Arc<Work>>,
    internal: Arc<AtomicU64>,
    /// Dropped after the last worker has ended.
    _kept: Vec<Kept>,
}

impl Engines {
    /// Starts a thread for each part.
    ///
    /// # Errors
    /// Fails if the system provides no thread or no descriptor.
    pub fn start(opened: Opened, surroundings: &Surroundings) -> io::Result<Self> {
        let (mut threads, mut ledgers, mut works) = (Vec::new(), Vec::new(), Vec::new());
        for (number, part) in opened.parts.into_iter().enumerate() {
            let bell = part.bell.clone();
            let ledger = Arc::new(Ledger::default());
            let Some(mut worker) = Worker::new(part, surroundings, ledger.clone(), bell.clone()) else {
                continue;
            };
            let work = worker.work.clone();
            let thread =
                std::thread::Builder::new().name(format!("engine-{number}")).spawn(move || worker.run())?;
            threads.push((bell, thread));
            ledgers.push(ledger);
            works.push(work);
        }
        let internal = surroundings.internal.clone();
        Ok(Self { threads: Mutex::new(threads), ledgers, works, internal, _kept: opened.kept })
    }

    /// Returns the ledgers of the workers' flows.
    pub fn ledgers(&self) -> &[Arc<Ledger>] {
        &self.ledgers
    }

    /// Returns how many errors of their own the engines have counted.
    pub fn errors(&self) -> u64 {
        self.internal.load(Ordering::Relaxed)
    }

    /// Returns what the rounds of all workers have done, up to a second ago.
    pub fn work(&self) -> WorkCounts {
        self.works.iter().fold(WorkCounts::default(), |all, work| all.and(&work.counts()))
    }

    /// Ends every connection with a reset to both sides, and the workers.
    pub fn stop(&self) {
        let threads = std::mem::take(&mut *lock(&self.threads));
        for (bell, _) in &threads {
            bell.stop();
        }
        for (_, thread) in threads {
            if thread.join().is_err() {
                tracing::error!("a worker of the packet engine ended by a panic");
            }
        }
    }
}

/// One worker.
struct Worker {
    listener: Listener,
    settings: EngineListener,
    share: Share,
    mtu: u16,
    offload_memory: OffloadInputs,
    cookies: Option<(Arc<Cookies>, u32)>,
    /// The maps that decisions are written to. The first worker also has the connections that the kernel handles by them.
    decided: Option<Arc<decided::Shared>>,
    carried: Option<Carried>,
    surroundings: Surroundings,
    ledger: Arc<Ledger>,
    bell: Arc<Bell>,
    engine: Engine<Select>,
    strays: Strays,
    schedule: Schedule,
    work: Arc<Work>,
    driver: Box<dyn Driver>,
    unreachable: routes::Unreachable,
    /// The last round left time-outs or merged packets for the next one.
    has_left_over: bool,
    /// No packets can be received, and the log says so.
    failing: bool,
    /// Packets lost to full queues, and new connections that were shed, as far as the log has reported them.
    lost: u64,
    shed: u64,
    /// Connections that found no room, in all, and as last counted by the present engine.
    room: (u64, u64),
    /// Errors of the engine itself, as far as the log has reported them.
    internal: u64,
    counted: Instant,
}

/// Returns a secret that outsiders cannot guess.
fn seed() -> [u64; 4] {
    let bytes = random::bytes::<32>();
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    words
}

impl Worker {
    /// Returns an engine without connections.
    fn engine(&self) -> Engine<Select> {
        let Self { listener, settings, share, surroundings, .. } = self;
        let offload = self.offload_memory.offload(surroundings.clock);
        let decided = self.decided.clone();
        let engine = fresh(
            listener,
            settings,
            share,
            self.mtu,
            surroundings,
            &self.ledger,
            &self.bell,
            offload,
            decided,
        );
        answer(self.cookies.as_ref(), &engine, surroundings.clock);
        engine
    }

    /// Runs until the worker is asked to stop. A panic ends the connections, not the worker.
    fn run(&mut self) {
        while !self.bell.stopped() {
            let ended = catch_unwind(AssertUnwindSafe(|| self.turns()));
            if ended.is_err() {
                tracing::error!(listener = %self.listener.name, "a fault in the packet engine: its connections are lost");
                self.engine.callbacks_mut().flows.lost("a fault of the packet engine; the log has it");
                self.engine = self.engine();
            }
        }
        let now = self.surroundings.clock.now();
        if let Some(carried) = &mut self.carried {
            carried.stop(now, &mut *self.driver);
        }
        self.engine.shut_down(now, EndReason::Shutdown);
        self.send_own();
        self.driver.flush();
        self.note_records();
        let (counters, lost, rounds) = (self.engine.counters(), self.driver.lost(), *self.schedule.totals());
        let offload = self.engine.callbacks_mut().offload.as_ref().map(Offload::counters);
        let answered = self.cookies.as_ref().map(|(cookies, worker)| cookies.sent(*worker));
        tracing::debug!(listener = %self.listener.name, ?counters, ?offload, ?rounds, answered, lost, "a worker of the packet engine ends");
    }

    fn turns(&mut self) {
        while !self.bell.stopped() {
            let span = Stage::EngineLoop.enter();
            let now = self.surroundings.clock.now();
            let driver = &mut self.driver;
            // Before frames are taken: the counted segments must be among the frames that are taken from now on (`joining.rs`).
            if let Some(offload) = &mut self.engine.callbacks_mut().offload {
                offload.remember(|| driver.mark());
            }
            let taken = self.receive();
            self.handle(now, taken);
            Stage::EngineOffload.time(|| self.offload(now));
            if let Some(carried) = &mut self.carried {
                carried.turn(now, &self.surroundings.config.load_full(), &mut *self.driver);
            }
            if self.bell.heard() {
                self.end_unwanted(now);
            }
            if now >= self.counted + COUNT_EVERY {
                let since = std::mem::replace(&mut self.counted, now);
                self.count(now, since);
            }
            let busy = self.engine.callbacks_mut().offload.as_ref().is_some_and(Offload::is_busy);
            drop(span);
            if taken == 0 && !busy && !self.has_left_over {
                self.wait(now);
            }
        }
    }

    /// Takes the packets that wait. If receiving fails, logs it once and pauses.
    fn receive(&mut self) -> usize {
        match Stage::EngineReceive.time(|| self.driver.receive()) {
            Ok(taken) => {
                self.failing &= taken == 0;
                taken
            }
            Err(error) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(listener = %self.listener.name, %error, "no packets can be taken");
                }
                self.rest();
                0
            }
        }
    }

    fn send_own(&mut self) {
        while let Some((packet, hop)) = self.engine.poll() {
            self.driver.send(packet, hop);
        }
    }

    fn note_records(&mut self) {
        while let Some(record) = self.engine.poll_record() {
            let select = self.engine.callbacks_mut();
            if matches!(record.reason, EndReason::ConnectTimeout | EndReason::Unreachable)
                && let Some(server) = record.server()
            {
                select.hops.forget(server.ip());
            }
            select.flows.ended(&record);
        }
    }

    fn end_unwanted(&mut self, now: Instant) {
        if let Some(carried) = &mut self.carried {
            carried.end_unwanted(now, &mut *self.driver);
        }
        for id in self.engine.callbacks_mut().flows.unwanted() {
            self.engine.kill(now, id);
        }
        self.send_own();
        self.driver.flush();
        self.note_records();
    }

    /// Waits until a packet comes, a time-out is due, or the bell rings.
    fn wait(&mut self, now: Instant) {
        let offload = self.engine.callbacks_mut().offload.as_ref().and_then(Offload::deadline);
        let due = self
            .engine
            .deadline()
            .into_iter()
            .chain(offload)
            .chain(self.carried.as_ref().map(Carried::deadline))
            .min()
            .map_or(COUNT_EVERY, |at| at.since(now).min(COUNT_EVERY));
        let descriptors = self.driver.descriptors();
        let mut fds: Vec<_> = descriptors.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        fds.extend(self.unreachable.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let bell = self.bell.as_fd();
        fds.push(PollFd::new(&bell, PollFlags::IN));
        // An error means a signal, or a wake-up without cause: the next turn finds out.
        let _ = poll(&mut fds, Some(&timespec(due)));
        if fds.last().is_some_and(|bell| !bell.revents().is_empty()) {
            self.bell.waited();
        }
        self.unreachable.woken();
    }

    /// Waits until the bell rings, at most for a short time.
    fn rest(&self) {
        let bell = self.bell.as_fd();
        let _ = poll(&mut [PollFd::new(&bell, PollFlags::IN)], Some(&timespec(REST)));
        self.bell.waited();
    }
}

impl Worker {
    /// Returns a worker; none if the listener does not belong to the engine.
    fn new(part: Part, surroundings: &Surroundings, ledger: Arc<Ledger>, bell: Arc<Bell>) -> Option<Self> {
        let Part {
            listener,
            share,
            mtu,
            driver,
            strays,
            offload: offload_memory,
            cookies,
            interfaces,
            targets,
            decided,
            unreachable,
            is_first,
            bell: _,
        } = part;
        let ListenerKind::Engine(settings) = listener.kind.clone() else { return None };
        let offload_memory = OffloadInputs { offload_memory, interfaces, targets };
        let offload = offload_memory.offload(surroundings.clock);
        let whole = decided.clone();
        let engine = fresh(&listener, &settings, &share, mtu, surroundings, &ledger, &bell, offload, whole);
        answer(cookies.as_ref(), &engine, surroundings.clock);
        let carried = decided.clone().filter(|_| is_first).map(|decided| {
            let (next_id, config) = (surroundings.next_id.clone(), surroundings.config.load_full());
            let waker = Waker::from(bell.clone());
            Carried::new(decided, ledger.clone(), next_id, waker, config, surroundings.clock)
        });
        let (surroundings, counted) = (surroundings.clone(), Instant::ZERO);
        Some(Self {
            listener,
            settings,
            share,
            mtu,
            offload_memory,
            cookies,
            decided,
            carried,
            surroundings,
            ledger,
            bell,
            engine,
            strays,
            schedule: Schedule::default(),
            work: Arc::default(),
            driver,
            unreachable: routes::Unreachable::new(unreachable),
            has_left_over: false,
            failing: false,
            lost: 0,
            shed: 0,
            room: (0, 0),
            internal: 0,
            counted,
        })
    }
}

#[allow(clippy::too_many_arguments, reason = "all that an engine is made of")]
fn fresh(
    listener: &Listener,
    settings: &EngineListener,
    share: &Share,
    mtu: u16,
    surroundings: &Surroundings,
    ledger: &Arc<Ledger>,
    bell: &Arc<Bell>,
    offload: Option<Offload>,
    decided: Option<Arc<decided::Shared>>,
) -> Engine<Select> {
    let listen = listener.addresses.iter().map(|address| Listen {
        address: Some(address.ip()).filter(|ip| !ip.is_unspecified()),
        port: Some(address.port()),
    });
    let mut config = engine::Config::new(listen.collect(), share.clone(), seed());
    config.max_connections = settings.connections_max;
    config.cookies_elsewhere = settings.answer_by_xdp;
    config.offloads_handshakes = offload.as_ref().is_some_and(Offload::is_by_xdp);
    config.mtu = mtu;
    let waker = Waker::from(bell.clone());
    let flows = Flows::new(
        listener.name.clone(),
        ledger.clone(),
        surroundings.next_id.clone(),
        surroundings.chains.clone(),
        surroundings.admit.clone(),
        waker,
        surroundings.clock,
    );
    let rules = surroundings.config.clone();
    let select = Select::new(listener.clone(), settings.clone(), rules, flows, offload, decided);
    let engine = Engine::new(config, select, surroundings.clock.now());
    engine.tables().into_iter().for_each(|(address, bytes)| pages::prefer_huge(address, bytes));
    engine
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs().cast_signed(), tv_nsec: duration.subsec_nanos().into() }
}

#[cfg(test)]
mod tests {
    use super::super::driver::Arrived;
    use super::super::strays::Strays;
    use super::*;
    use crate::config::Config;
    use crate::live::Clock;
    use arc_swap::ArcSwap;
    use sidetrack_core::engine::checksum::Sum;
    use sidetrack_core::engine::packet::{Header, Ip, flags};
    use sidetrack_core::engine::{Checksums, Hop};
    use sidetrack_core::flow::FlowId;
    use std::collections::VecDeque;
    use std::os::fd::BorrowedFd;

    /// Packets to be received, and packets that were sent. An empty packet causes a panic.
    #[derive(Debug, Default)]
    struct Wire {
        coming: VecDeque<Vec<u8>>,
        sent: Vec<Vec<u8>>,
    }

    #[derive(Debug)]
    struct Faulty {
        wire: Arc<Mutex<Wire>>,
        at_hand: Vec<u8>,
    }

    impl Driver for Faulty {
        fn receive(&mut self) -> io::Result<usize> {
            let Some(packet) = self.wire.lock().unwrap().coming.pop_front() else { return Ok(0) };
            self.at_hand = packet;
            Ok(1)
        }

        fn arrived(&mut self, _frame: usize) -> Option<Arrived<'_>> {
            assert!(!self.at_hand.is_empty(), "the fault of the test");
            Some(Arrived { packet: &mut self.at_hand, hop: Hop(1), checksums: Checksums::Verified })
        }

        fn forward(&mut self, _frame: usize, _len: usize, _hop: Hop) {}

        fn send(&mut self, packet: &[u8], _hop: Hop) {
            self.wire.lock().unwrap().sent.push(packet.to_vec());
        }

        fn flush(&mut self) {}

        fn lost(&self) -> u64 {
            0
        }

        fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
            Vec::new()
        }
    }

    pub(super) fn segment(port: u16, flags: u8, seq: u32, ack: u32) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        let sum = Sum::ZERO.bytes(&packet).checksum();
        packet.splice(10..12, sum.to_be_bytes());
        packet.extend(port.to_be_bytes());
        packet.extend(80_u16.to_be_bytes());
        packet.extend(seq.to_be_bytes());
        packet.extend(ack.to_be_bytes());
        packet.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
        packet
    }

    fn worker(wire: &Arc<Mutex<Wire>>) -> (Worker, Arc<Ledger>, Arc<Bell>) {
        worker_with(Box::new(Faulty { wire: wire.clone(), at_hand: Vec::new() }))
    }

    pub(super) fn worker_with(driver: Box<dyn Driver>) -> (Worker, Arc<Ledger>, Arc<Bell>) {
        let text = "version = 1\n[[listen]]\nkind = 'engine'\naddress = '10.0.0.2:80'\ninterfaces = ['none']\nto = \
                    '10.9.9.9:80'\n";
        let config = Config::from_text("test.toml", text).unwrap();
        let (ledger, bell) = (Arc::new(Ledger::default()), Arc::new(Bell::new().unwrap()));
        let share = Share { addresses: vec!["10.0.0.2".parse().unwrap()], ports: 61_000..=61_009 };
        let strays = Strays::between(vec![share.clone()], &[]).pop().unwrap();
        let part = Part {
            listener: config.listeners[0].clone(),
            share,
            mtu: 1500,
            driver,
            strays,
            interfaces: Vec::new(),
            targets: None,
            offload: None,
            cookies: None,
            decided: None,
            unreachable: None,
            is_first: true,
            bell: bell.clone(),
        };
        let surroundings = Surroundings {
            config: Arc::new(ArcSwap::from_pointee(config)),
            clock: Clock::start(),
            next_id: Arc::new(|| FlowId(1)),
            chains: Arc::new(|_, _| sidetrack_core::chain::Chain::new(Vec::new(), Instant::ZERO)),
            admit: Arc::new(|_, _| Ok(None)),
            internal: Arc::default(),
        };
        let worker = Worker::new(part, &surroundings, ledger.clone(), bell.clone()).unwrap();
        (worker, ledger, bell)
    }

    /// Gives the worker a packet and waits until it has sent another one.
    fn answer(wire: &Arc<Mutex<Wire>>, bell: &Bell, packets: &[Vec<u8>]) -> Vec<u8> {
        let before = wire.lock().unwrap().sent.len();
        wire.lock().unwrap().coming.extend(packets.iter().cloned());
        bell.ring();
        let until = std::time::Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(packet) = wire.lock().unwrap().sent.get(before) {
                return packet.clone();
            }
            assert!(std::time::Instant::now() < until, "no answer");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_fault_ends_the_connections_with_a_reason_and_the_worker_goes_on() {
        let wire = Arc::new(Mutex::new(Wire::default()));
        let (mut worker, ledger, bell) = worker(&wire);
        let thread = std::thread::spawn(move || worker.run());
        let syn_ack = answer(&wire, &bell, &[segment(4000, flags::SYN, 100, 0)]);
        let header =
            |bytes: &[u8]| Header::parse(bytes, &Ip::parse(bytes).unwrap(), Checksums::Verify).unwrap();
        let ack = header(&syn_ack).seq.0.wrapping_add(1);
        let syn = answer(&wire, &bell, &[segment(4000, flags::ACK, 101, ack)]);
        assert_eq!(header(&syn).tuple.local_addr(), "10.9.9.9:80".parse().unwrap(), "the server is asked");
        assert_eq!(ledger.len(), 1);
        // First the packet that causes a panic, then a new client.
        let next = answer(&wire, &bell, &[Vec::new(), segment(4001, flags::SYN, 7, 0)]);
        assert_eq!(header(&next).flags, flags::SYN | flags::ACK, "the next client is served");
        let (ended, _) = ledger.take_ended();
        let reasons: Vec<_> = ended.iter().map(|ended| ended.reason).collect();
        assert_eq!((reasons, ledger.len()), (vec![EndReason::Internal], 0));
        bell.stop();
        thread.join().unwrap();
    }
}
