//! The controller's side of one switch: the handshake, entries that are confirmed by barriers, their ends and counts, and
//! what happens when the switch goes away and comes back.
//!
//! ```text
//!  DOWN --connected--> GREETING --HELLO--> ASKING --features--> LISTING --all entries--> READY
//!   ^                                                                                      |
//!   +---------------------- closed, silent, malformed, stalled ----------------------------+
//! ```
//!
//! A switch says nothing when it takes an entry; it says an ERROR when it does not. So each entry is two FLOW_MODs (one a
//! direction) and a BARRIER, and only the answer to that is a yes. A yes may be a lie: entries are listed every second, and
//! one that is not there has been lost. What a switch has when it connects is listed first and compared: entries of ours that
//! nobody wants any more are deleted, those of an earlier run that are wanted again are taken over with their counts.

use super::entries::{Cookie, End, Place, Row, State, Way};
use super::installing::{delete, ip_traffic};
use super::message::{Features, Message, Request, read, write};
use super::pattern::Pattern;
use super::wire::{Decoder, Version};
use super::{Command, FlowCounts, FlowMod};
use crate::shunt::{Both, Cause, Entry, EntryId, Obstacle, PortNumber};
use crate::time::Instant;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Of the entries that lead everything else to the firewall and back (NFShunt: OpenFlow's default).
pub const PRIORITY_PAIR: u16 = 32_768;
/// Of the entries of flows (NFShunt's).
pub const PRIORITY_FLOW: u16 = 33_000;

/// How often entries are listed for their counts.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// A switch that has said nothing for so long is asked whether it is there.
const SILENT: Duration = Duration::from_secs(5);
/// A switch that has not answered for so long is given up: the connection is closed, and it may connect anew.
const STALLED: Duration = Duration::from_secs(10);
/// How long entries of an earlier run wait to be wanted again.
const ORPHANED: Duration = Duration::from_secs(15);
/// Most entries that a list may show: an answer without end is not kept.
const LISTED_MAX: usize = 4_194_304;

/// Where a port of the shunt is on the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchPorts {
    /// The port where the hosts are.
    pub fast: u32,
    /// The port that leads to the firewall's interface.
    pub slow: u32,
}

/// What a controller is told at its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerConfig {
    /// Versions that may be spoken.
    pub versions: BTreeSet<Version>,
    /// The ports.
    pub ports: BTreeMap<PortNumber, SwitchPorts>,
    /// Tells the entries of this run of the program from those of others.
    pub run: u16,
    /// Everything the switch has is deleted when it first connects (`delete_flows_on_startup`).
    pub clear: bool,
    /// The entries that lead from fast to slow ports and back are ours to install (`default_no_shunting`).
    pub pairs: bool,
}

/// What happens to a controller.
#[derive(Clone, Copy, Debug)]
pub enum ControllerInput<'a> {
    /// A switch has connected; an older connection is over.
    Connected,
    /// The connection is over.
    Disconnected,
    /// The switch says.
    Bytes(&'a [u8]),
    /// Install an entry.
    Install(&'a Entry),
    /// Let go of it.
    Remove(EntryId, Cause),
    /// Every entry of a flow is to go, as fast as it can be said.
    Suspend,
    /// Ask for counts now.
    Count,
    /// Delete everything that the switch has.
    Clear,
    /// Time has passed.
    Tick,
}

/// What a controller wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControllerOutput {
    /// Send this to the switch.
    Send(Vec<u8>),
    /// Close the connection; why, in words.
    Close(String),
    /// The switch has been asked what it has, and entries can be installed.
    Ready(Version, Features),
    /// The switch confirmed an entry.
    Installed(EntryId),
    /// It did not take it.
    Failed(EntryId, Obstacle),
    /// What has passed until now.
    Counted(EntryId, Both),
    /// The entry is gone, and all that passed.
    Gone(EntryId, Cause, Both),
    /// Something a person should know.
    Note(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Down,
    Greeting,
    Asking,
    Listing,
    Ready,
}

/// A list of entries that is under way.
#[derive(Clone, Debug)]
struct Listing {
    xid: u32,
    asked: Instant,
    /// Entries that were confirmed when it was asked for: those it has to show.
    expected: BTreeSet<EntryId>,
    entries: BTreeMap<u64, FlowCounts>,
}

/// See the module.
#[derive(Debug)]
pub struct Controller {
    pub(super) config: ControllerConfig,
    decoder: Decoder,
    pub(super) stage: Stage,
    pub(super) version: Version,
    features: Features,
    /// The switch matches TCP flags and fragments (Nicira's extension).
    pub(super) flags: bool,
    cleared: bool,
    last_xid: u32,
    pub(super) rows: BTreeMap<EntryId, Row>,
    /// Whose a transaction is.
    pub(super) xids: BTreeMap<u32, EntryId>,
    /// Entries of an earlier run, with their counts, until they are wanted or too old.
    pub(super) orphans: BTreeMap<Place, FlowCounts>,
    orphaned_until: Instant,
    listing: Option<Listing>,
    count_at: Instant,
    heard: Instant,
    echo: Option<Instant>,
    /// When it connected.
    since: Instant,
    pub(super) outputs: VecDeque<ControllerOutput>,
}

impl Controller {
    /// Without a switch.
    pub fn new(config: ControllerConfig, now: Instant) -> Self {
        Self {
            config,
            decoder: Decoder::new(),
            stage: Stage::Down,
            version: Version::V1_0,
            features: Features { datapath: 0, tables: 0 },
            flags: true,
            cleared: false,
            last_xid: 0,
            rows: BTreeMap::new(),
            xids: BTreeMap::new(),
            orphans: BTreeMap::new(),
            orphaned_until: now,
            listing: None,
            count_at: now,
            heard: now,
            echo: None,
            since: now,
            outputs: VecDeque::new(),
        }
    }

    /// What is to be done next.
    pub fn poll(&mut self) -> Option<ControllerOutput> {
        self.outputs.pop_front()
    }

    /// When to call with [`ControllerInput::Tick`]; none while no switch is there.
    pub fn deadline(&self) -> Option<Instant> {
        let silent = self.echo.map_or(self.heard + SILENT, |asked| asked + STALLED);
        match self.stage {
            Stage::Down => None,
            Stage::Ready => Some(silent.min(self.count_at)),
            _ => Some(silent.min(self.since + STALLED)),
        }
    }

    /// Whether entries can be installed.
    pub fn is_ready(&self) -> bool {
        self.stage == Stage::Ready
    }

    /// Whether a RST that does not belong to the connection can be kept apart from one that does by what the switch matches.
    pub const fn matches_flags(&self) -> bool {
        self.flags && matches!(self.version, Version::V1_3)
    }

    /// Entries that the switch has or may have.
    pub fn entries(&self) -> usize {
        self.rows.len()
    }

    /// Something happened.
    pub fn handle(&mut self, now: Instant, input: ControllerInput<'_>) {
        match input {
            ControllerInput::Connected => self.connected(now),
            ControllerInput::Disconnected => self.disconnected(),
            ControllerInput::Bytes(bytes) => self.bytes(now, bytes),
            ControllerInput::Install(entry) => self.install(now, entry),
            ControllerInput::Remove(id, cause) => self.remove(now, id, End::Gone(cause)),
            ControllerInput::Suspend => self.suspend(),
            ControllerInput::Count => self.count(now),
            ControllerInput::Clear => self.clear(),
            ControllerInput::Tick => self.tick(now),
        }
    }

    fn connected(&mut self, now: Instant) {
        self.disconnected();
        self.stage = Stage::Greeting;
        self.decoder = Decoder::new();
        self.version = self.config.versions.last().copied().unwrap_or(Version::V1_0);
        self.flags = true;
        self.heard = now;
        self.since = now;
        let bitmap = self.config.versions.iter().fold(0, |bits, version| bits | 1 << version.number());
        self.send(&Request::Hello { bitmap });
    }

    fn disconnected(&mut self) {
        self.stage = Stage::Down;
        self.listing = None;
        self.echo = None;
        self.xids.clear();
        self.orphans.clear();
        for row in self.rows.values_mut() {
            row.unanswered();
        }
    }

    fn next_xid(&mut self) -> u32 {
        self.last_xid = self.last_xid.wrapping_add(1);
        self.last_xid
    }

    pub(super) fn send(&mut self, request: &Request) -> u32 {
        let xid = self.next_xid();
        match write(self.version, xid, request) {
            Ok(bytes) => self.outputs.push_back(ControllerOutput::Send(bytes)),
            Err(error) => self.outputs.push_back(ControllerOutput::Note(error.to_string())),
        }
        xid
    }

    fn close(&mut self, why: String) {
        self.disconnected();
        self.outputs.push_back(ControllerOutput::Close(why));
    }

    fn bytes(&mut self, now: Instant, bytes: &[u8]) {
        if self.stage == Stage::Down {
            return;
        }
        self.heard = now;
        self.echo = None;
        self.decoder.push(bytes);
        while self.stage != Stage::Down {
            let frame = match self.decoder.frame() {
                Ok(Some(frame)) => frame,
                Ok(None) => return,
                Err(error) => return self.close(error.to_string()),
            };
            match read(&frame) {
                Ok(message) => self.message(now, frame.xid, message),
                Err(error) => return self.close(error.to_string()),
            }
        }
    }

    fn message(&mut self, now: Instant, xid: u32, message: Message) {
        match (self.stage, message) {
            (Stage::Greeting, Message::Hello { version, bitmap }) => self.greeted(version, bitmap),
            (Stage::Greeting, Message::Error { .. }) => {
                self.close("the switch speaks no version of ours".into())
            }
            (_, Message::EchoRequest(data)) => {
                // With the number of the request.
                if let Ok(bytes) = write(self.version, xid, &Request::EchoReply(data)) {
                    self.outputs.push_back(ControllerOutput::Send(bytes));
                }
            }
            (Stage::Asking, Message::FeaturesReply(features)) => self.featured(now, features),
            (Stage::Listing | Stage::Ready, Message::FlowStatsReply { more, entries }) => {
                self.listed(now, xid, more, entries);
            }
            (Stage::Ready, Message::BarrierReply) => self.barrier(now, xid),
            (Stage::Ready, Message::FlowRemoved(removed)) => {
                let traffic = ip_traffic(removed.packets, removed.bytes);
                self.removed(now, removed.cookie, removed.why, traffic);
            }
            (_, Message::Error { kind, code }) => self.error(xid, kind, code),
            // What is not needed, or not at this moment.
            _ => {}
        }
    }

    fn greeted(&mut self, version: u8, bitmap: Option<u32>) {
        let ours = self.config.versions.iter().fold(0u32, |bits, version| bits | 1 << version.number());
        let common = match bitmap {
            Some(bits) => Version::negotiate(version, Some(bits & ours)),
            None => {
                Version::negotiate(version, None).filter(|version| self.config.versions.contains(version))
            }
        };
        let Some(common) = common else {
            self.send(&Request::Incompatible);
            return self
                .close(format!("the switch speaks OpenFlow {version:#04x} and no version that is allowed"));
        };
        self.version = common;
        self.stage = Stage::Asking;
        self.send(&Request::FeaturesRequest);
        // Packets without an entry are dropped by the switch: none is sent to us.
        self.send(&Request::SetConfig { flags: 0, miss_send_len: 0 });
    }

    fn featured(&mut self, now: Instant, features: Features) {
        self.features = features;
        self.stage = Stage::Listing;
        if self.config.clear && !self.cleared {
            self.clear();
        }
        self.cleared = true;
        self.list(now);
    }

    fn clear(&mut self) {
        if self.stage != Stage::Down {
            self.send(&Request::FlowMod(delete(Command::Delete, Pattern::default(), 0)));
        }
    }

    fn list(&mut self, now: Instant) {
        let (cookie, mask) = Cookie::any();
        let xid = self.send(&Request::FlowStats { cookie, mask });
        let expected = self.rows.values().filter(|row| row.state == State::Installed).map(|row| row.entry.id);
        let expected = expected.collect();
        self.listing = Some(Listing { xid, asked: now, expected, entries: BTreeMap::new() });
        self.count_at = now + COUNT_EVERY;
    }

    fn listed(&mut self, now: Instant, xid: u32, more: bool, entries: Vec<FlowCounts>) {
        let Some(listing) = self.listing.as_mut().filter(|listing| listing.xid == xid) else { return };
        let ours = entries.into_iter().filter(|entry| Cookie::read(entry.cookie).is_some());
        listing.entries.extend(ours.map(|entry| (entry.cookie, entry)));
        if listing.entries.len() > LISTED_MAX {
            return self.close(format!("the switch lists more than {LISTED_MAX} entries of ours"));
        }
        if more {
            return;
        }
        let Some(listing) = self.listing.take() else { return };
        if self.stage == Stage::Listing {
            self.stage = Stage::Ready;
            self.reconcile(now, listing.entries);
            return self.outputs.push_back(ControllerOutput::Ready(self.version, self.features));
        }
        self.counted(now, &listing);
    }

    /// What a list in the middle of work tells: counts, and entries that are not there although they were confirmed.
    fn counted(&mut self, now: Instant, listing: &Listing) {
        let ids: Vec<_> = self.rows.keys().copied().collect();
        for id in ids {
            let Some(row) = self.rows.get_mut(&id) else { continue };
            let before = row.traffic();
            let there = Way::BOTH.map(|way| {
                let shown = listing.entries.get(&Cookie { run: self.config.run, id, way }.number());
                if let Some(shown) = shown {
                    row.count(way, ip_traffic(shown.packets, shown.bytes));
                }
                shown.is_some()
            });
            let (installed, traffic) = (row.state == State::Installed, row.traffic());
            if installed && listing.expected.contains(&id) && there.contains(&false) {
                self.remove(now, id, End::Gone(Cause::Lost));
            } else if traffic != before {
                self.outputs.push_back(ControllerOutput::Counted(id, traffic));
            }
        }
    }

    /// Compares what a switch has when it connects with what is wanted.
    fn reconcile(&mut self, now: Instant, shown: BTreeMap<u64, FlowCounts>) {
        self.install_pairs();
        self.orphaned_until = now + ORPHANED;
        let mut shown = shown;
        let ids: Vec<_> = self.rows.keys().copied().collect();
        for id in ids {
            let Some(row) = self.rows.get_mut(&id) else { continue };
            let before = row.traffic();
            let there = Way::BOTH.map(|way| {
                let shown = shown.remove(&Cookie { run: self.config.run, id, way }.number());
                if let Some(shown) = shown {
                    row.count(way, ip_traffic(shown.packets, shown.bytes));
                }
                shown.is_some()
            });
            match row.state {
                // What passed while it was away; the next list may show nothing new.
                State::Installed if there == [true; 2] => {
                    let traffic = row.traffic();
                    if traffic != before {
                        self.outputs.push_back(ControllerOutput::Counted(id, traffic));
                    }
                }
                State::Installed => self.remove(now, id, End::Gone(Cause::Lost)),
                State::Adding { .. } => self.add(now, id),
                State::Removing { end, .. } => self.remove(now, id, end),
            }
        }
        self.orphans = shown.into_values().map(|old| (Place::of(&old.pattern), old)).collect();
    }

    fn install_pairs(&mut self) {
        if !self.config.pairs {
            return;
        }
        let ports: Vec<_> = self.config.ports.values().copied().collect();
        for (from, to) in ports.iter().flat_map(|port| [(port.fast, port.slow), (port.slow, port.fast)]) {
            self.send(&Request::FlowMod(FlowMod {
                command: Command::Add,
                pattern: Pattern { in_port: Some(from), ..Pattern::default() },
                cookie: Cookie::PAIR,
                cookie_mask: 0,
                priority: PRIORITY_PAIR,
                idle_timeout_s: 0,
                output: Some(to),
            }));
        }
    }

    /// One message takes all entries of flows off a switch of 1.3; 1.0 cannot say that, and each is deleted by itself.
    fn suspend(&mut self) {
        if self.stage == Stage::Ready && self.version == Version::V1_3 {
            let (cookie, cookie_mask) = Cookie::any_of(self.config.run);
            let all = delete(Command::Delete, Pattern::default(), 0);
            self.send(&Request::FlowMod(FlowMod { cookie, cookie_mask, ..all }));
        }
    }

    fn count(&mut self, now: Instant) {
        if self.stage == Stage::Ready && self.listing.is_none() {
            self.list(now);
        }
    }

    fn tick(&mut self, now: Instant) {
        if self.stage == Stage::Down {
            return;
        }
        if self.echo.is_some_and(|asked| now - asked >= STALLED) {
            return self.close("the switch does not answer".into());
        }
        if self.stage != Stage::Ready && now - self.since >= STALLED {
            return self.close("the switch does not finish its greeting".into());
        }
        if self.echo.is_none() && now - self.heard >= SILENT {
            self.echo = Some(now);
            self.send(&Request::EchoRequest);
        }
        if self.stage == Stage::Ready && now >= self.count_at {
            self.look(now);
        }
    }

    /// Answers that do not come, orphans, counts.
    fn look(&mut self, now: Instant) {
        self.count_at = now + COUNT_EVERY;
        let late = |row: &Row| matches!(row.state, State::Removing { .. }) && now - row.since >= STALLED;
        if self.rows.values().any(late)
            || self.listing.as_ref().is_some_and(|list| now - list.asked >= STALLED)
        {
            return self.close("the switch answers, but not what it is asked".into());
        }
        if now >= self.orphaned_until {
            self.delete_orphans();
        }
        if self.listing.is_none() && !self.rows.is_empty() {
            self.list(now);
        }
    }
}
