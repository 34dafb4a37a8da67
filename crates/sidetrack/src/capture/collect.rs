//! The thread that reads packets, finds their flows, and serves viewers.

use super::packets::{Packets, Waiting};
use super::viewer::{Flows, Known, Viewer};
use super::{Captures, Settings};
use crate::live::legs::{self, Note};
use crate::live::{Clock, Ledger, LiveFlow};
use sidetrack_core::capture::{Ends, Leg, Table, look};
use sidetrack_core::flow::{Intercept, Protocol, Side};
use sidetrack_sys::capture::{self, Ring};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the thread waits for packets before it serves viewers.
const WAIT: Duration = Duration::from_millis(50);

/// How often the running flows are looked through.
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub(super) struct Collector {
    rings: Vec<Ring>,
    ledgers: Vec<Arc<Ledger>>,
    settings: Settings,
    clock: Clock,
    packets: Packets,
    table: Table,
    flows: Flows,
    viewers: Vec<Viewer>,
    lost: u64,
    looked: Option<Instant>,
}

impl Collector {
    pub(super) fn new(rings: Vec<Ring>, ledgers: Vec<Arc<Ledger>>, settings: Settings) -> Self {
        Self {
            rings,
            ledgers,
            settings,
            clock: Clock::start(),
            packets: Packets::default(),
            table: Table::default(),
            flows: Flows::new(),
            viewers: Vec::new(),
            lost: 0,
            looked: None,
        }
    }

    /// Runs until there is nothing to do.
    pub(super) fn run(mut self, captures: &Captures) {
        // It lets the threads of flows finish first, and gets an ordinary share all the same: with none, a busy machine could not be
        // looked into. If this is not permitted, it interrupts them when it wakes.
        let _ = sidetrack_sys::scheduling::become_batch();
        while captures.serve(&mut self.viewers, &mut self.rings) {
            let rings: Vec<&Ring> = self.rings.iter().collect();
            if capture::wait(&rings, WAIT).is_err() {
                std::thread::sleep(WAIT);
            }
            // Before the packets are read: what the kernel had at this time is read then.
            let now = Instant::now();
            self.read(now);
            self.learn();
            self.packets.look_up(now, &self.table);
            self.show(now);
            self.packets.forget(self.settings.ring_bytes);
        }
    }

    fn read(&mut self, now: Instant) {
        let Self { rings, packets, settings, .. } = self;
        let snap = usize::try_from(settings.snap_bytes).unwrap_or(usize::MAX);
        for (number, ring) in rings.iter_mut().enumerate() {
            ring.take(|packet| {
                let Some(looked) = look(packet.data) else { return };
                packets.came(Waiting {
                    since: now,
                    time_ns: packet.time_ns,
                    interface: (number, packet.interface),
                    is_outgoing: packet.is_outgoing,
                    data: packet.data[..packet.data.len().min(snap)].to_vec(),
                    length: packet.length,
                    looked,
                });
            });
            self.lost += ring.take_lost();
        }
    }

    /// Takes notes of the data path, and looks through the running flows.
    fn learn(&mut self) {
        let now = self.clock.now();
        for note in legs::take() {
            match note {
                Note::Begun(flow) => drop(self.flows.insert(flow.id, flow)),
                Note::Leg(flow, leg) => drop(self.table.note(now, flow, leg)),
            }
        }
        if self.looked.is_some_and(|at| at.elapsed() < LOOK_EVERY) {
            return;
        }
        let is_first = self.looked.replace(Instant::now()).is_none();
        let running: Vec<_> = self.ledgers.iter().flat_map(|ledger| ledger.snapshot()).collect();
        for flow in &running {
            self.flows.insert(flow.id, flow.clone());
            if is_first {
                // Its owner tells the connections with the measurements.
                flow.want_tcp();
            }
            self.note_seen(flow);
        }
        let live: HashSet<_> = running.iter().map(|flow| flow.id).collect();
        self.table.sweep(now, |flow| live.contains(&flow));
        let known: HashSet<_> = self.table.all_flows().collect();
        self.flows.retain(|id, flow| live.contains(id) || known.contains(id) || flow.age() < Table::KEPT);
        self.viewers.iter_mut().for_each(|viewer| viewer.sweep(&self.table));
    }

    /// Notes the client's leg of a flow without a socket of ours: the kernel, the packet engine or a shared socket of UDP has it.
    fn note_seen(&mut self, flow: &LiveFlow) {
        let Some(decided) = flow.decided() else { return };
        let known = &decided.flow;
        let is_elsewhere = known.protocol == Protocol::Udp
            || matches!(
                known.intercept,
                Intercept::Kernel | Intercept::Engine | Intercept::Redirect | Intercept::Tproxy
            );
        let Some(to) = known.orig_dst.socket_addr().filter(|_| is_elsewhere) else { return };
        let ends = Ends { protocol: known.protocol, from: known.client, to };
        if !self.table.knows(&ends) {
            self.table.note(self.clock.now(), flow.id, Leg { side: Side::Client, ends, asked: None });
        }
    }

    fn show(&mut self, now: Instant) {
        let Self { rings, packets, table, flows, viewers, lost, .. } = self;
        let name = |(ring, index): (usize, i32)| {
            let name = rings.get(ring).and_then(|ring| ring.interface_name(index));
            name.unwrap_or_else(|| format!("interface {index}"))
        };
        let known = Known { packets, table, flows, name: &name, lost: *lost, now };
        viewers.retain_mut(|viewer| viewer.look(&known));
    }
}
