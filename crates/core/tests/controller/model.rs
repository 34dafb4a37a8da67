//! A model of a switch, and a controller with it.

use sidetrack_core::openflow::{
    Controller, ControllerConfig, ControllerInput, ControllerOutput, PRIORITY_FLOW, SwitchPorts, Version,
};
use sidetrack_core::shunt::{Cause, Entry, EntryId, FastPathKind, PortNumber, Transport, Tuple};
use sidetrack_core::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Bytes of the frames that the model's packets are.
const FRAME: u64 = 114;

fn number(number: u8) -> PortNumber {
    PortNumber::new(number).expect("a number")
}

pub(crate) fn config(version: Version, run: u16) -> ControllerConfig {
    ControllerConfig {
        versions: BTreeSet::from([version]),
        ports: BTreeMap::from([
            (number(1), SwitchPorts { fast: 49, slow: 10 }),
            (number(2), SwitchPorts { fast: 50, slow: 11 }),
        ]),
        through: BTreeMap::new(),
        run,
        clear: false,
        pairs: true,
        master: None,
        shared: false,
        table: 0,
    }
}

pub(crate) fn entry(id: u64, port: u16) -> Entry {
    Entry {
        id: EntryId(id),
        tuple: Tuple::new(
            format!("192.0.2.1:{port}").parse().expect("address"),
            "198.51.100.2:5000".parse().expect("address"),
            Transport::Tcp,
            0,
        ),
        client_port: number(1),
        server_port: number(2),
        path: FastPathKind::OpenFlow,
        block: false,
        idle: Duration::from_secs(10),
    }
}

/// An entry of the model's table: what stands in the FLOW_MOD, and what it has counted.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub cookie: u64,
    pub priority: u16,
    pub pattern: Vec<u8>,
    pub packets: u64,
}

/// How the model behaves.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Manners {
    /// Entries it takes, of flows.
    pub room: Option<usize>,
    /// Says yes to barriers and adds nothing.
    pub lies: bool,
    /// Answers echoes, and no barrier.
    pub stalls: bool,
    /// Refuses Nicira's match.
    pub plain: bool,
    /// Another controller is its master.
    pub serves_another: bool,
}

/// A switch that speaks one version.
pub(crate) struct Switch {
    pub version: Version,
    pub manners: Manners,
    pub table: Vec<Held>,
    pub answers: Vec<u8>,
    pub heard: Vec<u8>,
    /// The generations of the controllers that became its master.
    pub masters: Vec<u64>,
}

fn header(version: Version, kind: u8, xid: u32, body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(8 + body.len()).expect("short");
    [&[version.number(), kind][..], &length.to_be_bytes(), &xid.to_be_bytes(), body].concat()
}

fn be(bytes: &[u8], at: usize, length: usize) -> u64 {
    bytes[at..at + length].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl Switch {
    pub(crate) fn new(version: Version) -> Self {
        Self {
            version,
            manners: Manners::default(),
            table: Vec::new(),
            answers: Vec::new(),
            heard: Vec::new(),
            masters: Vec::new(),
        }
    }

    pub(crate) fn is_1_3(&self) -> bool {
        self.version == Version::V1_3
    }

    pub(crate) fn answer(&mut self, kind: u8, xid: u32, body: &[u8]) {
        self.answers.extend(header(self.version, kind, xid, body));
    }

    pub(crate) fn hear(&mut self, bytes: &[u8]) {
        self.heard.extend_from_slice(bytes);
        while self.heard.len() >= 8 {
            let length = usize::try_from(be(&self.heard, 2, 2)).expect("short");
            let message: Vec<_> = self.heard.drain(..length).collect();
            self.obey(message[1], u32::try_from(be(&message, 4, 4)).expect("32 bits"), &message[8..]);
        }
    }

    pub(crate) fn obey(&mut self, kind: u8, xid: u32, body: &[u8]) {
        let barrier = if self.is_1_3() { 20 } else { 18 };
        let stats = if self.is_1_3() { 18 } else { 16 };
        match kind {
            0 => {
                let hello = [0, 1, 0, 8, 0, 0, 0, 1 << self.version.number()];
                self.answer(0, xid, &hello);
            }
            2 => self.answer(3, xid, body),
            5 => self.answer(6, xid, &[0; 24]),
            14 if self.manners.serves_another => self.answer(1, xid, &[0, 1, 0, 10]),
            14 => self.change(xid, body),
            24 => {
                self.masters.push(be(body, 8, 8));
                self.manners.serves_another = false;
                self.answer(25, xid, body);
            }
            kind if kind == barrier && !self.manners.stalls => self.answer(barrier + 1, xid, &[]),
            kind if kind == stats => {
                let list = self.list();
                self.answer(stats + 1, xid, &list);
            }
            _ => {}
        }
    }

    /// Cookie, mask, command, priority and pattern of a FLOW_MOD.
    pub(crate) fn parts(&self, body: &[u8]) -> (u64, u64, u64, u16, Vec<u8>) {
        if self.is_1_3() {
            let length = usize::try_from(be(body, 42, 2)).expect("short").next_multiple_of(8);
            let priority = u16::try_from(be(body, 22, 2)).expect("16 bits");
            (be(body, 0, 8), be(body, 8, 8), be(body, 17, 1), priority, body[40..40 + length].to_vec())
        } else {
            let priority = u16::try_from(be(body, 54, 2)).expect("16 bits");
            (be(body, 40, 8), 0, be(body, 48, 2), priority, body[..40].to_vec())
        }
    }

    pub(crate) fn change(&mut self, xid: u32, body: &[u8]) {
        let (cookie, mask, command, priority, pattern) = self.parts(body);
        let same = |held: &Held| held.priority == priority && held.pattern == pattern;
        if command != 0 {
            let gone = |held: &Held| match command {
                4 => same(held),
                _ => held.cookie & mask == cookie & mask,
            };
            let (gone, kept) = self.table.drain(..).partition(|held| gone(held));
            self.table = kept;
            let gone: Vec<Held> = gone;
            gone.iter().for_each(|held| self.removed(held, 2));
            return;
        }
        let nicira = self.is_1_3() && pattern.windows(4).any(|four| four == [0, 1, 26 << 1 | 1, 2]);
        if nicira && self.manners.plain {
            return self.answer(1, xid, &[0, 4, 0, 6]);
        }
        let replaced = self.table.iter().position(same);
        let flows = self.table.iter().filter(|held| held.priority == PRIORITY_FLOW).count();
        if replaced.is_none()
            && self.manners.room.is_some_and(|room| priority == PRIORITY_FLOW && flows >= room)
        {
            let full: [u8; 4] = if self.is_1_3() { [0, 5, 0, 1] } else { [0, 3, 0, 0] };
            return self.answer(1, xid, &full);
        }
        if let Some(at) = replaced {
            self.table.remove(at);
        }
        if !(self.manners.lies && priority == PRIORITY_FLOW) {
            self.table.push(Held { cookie, priority, pattern, packets: 0 });
        }
    }

    pub(crate) fn removed(&mut self, held: &Held, why: u8) {
        let counts = [held.packets.to_be_bytes(), (held.packets * FRAME).to_be_bytes()].concat();
        let head = [&held.cookie.to_be_bytes()[..], &held.priority.to_be_bytes(), &[why]].concat();
        let body = if self.is_1_3() {
            [&head[..], &[0; 13], &counts, &held.pattern].concat()
        } else {
            [&held.pattern[..], &head, &[0; 13], &counts].concat()
        };
        self.answer(11, 0, &body);
    }

    pub(crate) fn list(&self) -> Vec<u8> {
        let mut list = if self.is_1_3() { vec![0, 1, 0, 0, 0, 0, 0, 0] } else { vec![0, 1, 0, 0] };
        for held in &self.table {
            let counts = [held.cookie, held.packets, held.packets * FRAME].map(u64::to_be_bytes).concat();
            let priority = held.priority.to_be_bytes();
            let rest = if self.is_1_3() {
                [&[0; 10][..], &priority, &[0; 10], &counts, &held.pattern].concat()
            } else {
                [&[0; 2][..], &held.pattern, &[0; 8], &priority, &[0; 10], &counts].concat()
            };
            list.extend(u16::try_from(rest.len() + 2).expect("short").to_be_bytes());
            list.extend(rest);
        }
        list
    }

    pub(crate) fn flows(&self) -> impl Iterator<Item = &Held> {
        self.table.iter().filter(|held| held.priority == PRIORITY_FLOW)
    }
}

/// A controller, its switch, and what was told of each entry.
pub(crate) struct World {
    pub controller: Controller,
    pub switch: Switch,
    pub now: Instant,
    pub connected: bool,
    pub told: Vec<ControllerOutput>,
}

impl World {
    pub(crate) fn new(version: Version) -> Self {
        let mut world = Self::alone(version, 1);
        world.connect();
        world
    }

    pub(crate) fn alone(version: Version, run: u16) -> Self {
        Self::with(config(version, run), version)
    }

    pub(crate) fn with(config: ControllerConfig, version: Version) -> Self {
        let now = Instant::from_millis(1000);
        Self {
            controller: Controller::new(config, now),
            switch: Switch::new(version),
            now,
            connected: false,
            told: Vec::new(),
        }
    }

    pub(crate) fn connect(&mut self) {
        self.connected = true;
        self.tell(ControllerInput::Connected);
        self.settle();
    }

    pub(crate) fn disconnect(&mut self) {
        self.connected = false;
        (self.switch.answers, self.switch.heard) = (Vec::new(), Vec::new());
        self.tell(ControllerInput::Disconnected);
    }

    pub(crate) fn tell(&mut self, input: ControllerInput<'_>) {
        self.controller.handle(self.now, input);
        while let Some(output) = self.controller.poll() {
            match output {
                ControllerOutput::Send(bytes) if self.connected => self.switch.hear(&bytes),
                ControllerOutput::Send(_) => {}
                ControllerOutput::Close(why) => {
                    self.connected = false;
                    (self.switch.answers, self.switch.heard) = (Vec::new(), Vec::new());
                    self.told.push(ControllerOutput::Close(why));
                }
                other => self.told.push(other),
            }
        }
    }

    /// The switch's answers arrive, and what comes of them.
    pub(crate) fn settle(&mut self) {
        while !self.switch.answers.is_empty() {
            let answers = std::mem::take(&mut self.switch.answers);
            self.tell(ControllerInput::Bytes(&answers));
        }
    }

    pub(crate) fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(due) = self.controller.deadline().filter(|due| *due <= until) {
            self.now = due.max(self.now + Duration::from_millis(1));
            self.tell(ControllerInput::Tick);
            self.settle();
        }
        self.now = until;
    }

    pub(crate) fn install(&mut self, entry: &Entry) {
        self.tell(ControllerInput::Install(entry));
        self.settle();
    }

    pub(crate) fn remove(&mut self, id: u64) {
        self.tell(ControllerInput::Remove(EntryId(id), Cause::Withdrawn));
        self.settle();
    }

    pub(crate) fn take(&mut self) -> Vec<ControllerOutput> {
        std::mem::take(&mut self.told)
    }

    pub(crate) fn told_of_entries(&mut self) -> Vec<ControllerOutput> {
        let kinds = |output: &ControllerOutput| {
            !matches!(output, ControllerOutput::Ready(..) | ControllerOutput::Note(_))
        };
        self.take().into_iter().filter(kinds).collect()
    }
}
