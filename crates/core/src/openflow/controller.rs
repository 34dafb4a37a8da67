//! The controller of one switch: the handshake, entries that are confirmed by barriers, their ends and counters, and
//! what happens when the switch disconnects and comes back.
//!
//! ```text
//!  DOWN --connected--> GREETING --HELLO--> ASKING --features--> LISTING --all entries--> READY
//!   ^                                                                                      |
//!   +---------------------- closed, silent, malformed, stalled ----------------------------+
//! ```
//!
//! A switch does not answer when it accepts an entry; it sends an ERROR when it does not. So each entry is two
//! FLOW_MODs (one per direction) and a BARRIER, and only the answer to the barrier confirms it. The confirmation may
//! be false, so the controller lists the entries every second. An entry that is missing in the list has been lost.
//!
//! When a switch connects, the controller first lists its entries and compares them. It deletes its own entries if
//! they are not wanted any more. It takes over entries of an earlier run that are wanted again, with their counters.

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

/// Priority of the entries that forward all other traffic to the firewall and back (NFShunt: OpenFlow's default).
pub const PRIORITY_PAIR: u16 = 32_768;
/// Priority of the entries of flows (as in NFShunt).
pub const PRIORITY_FLOW: u16 = 33_000;

/// The interval at which entries are listed for their counters.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// A switch that has sent nothing for this time gets an echo request.
const SILENT: Duration = Duration::from_secs(5);
/// If a switch does not answer for this time, the connection is closed. The switch may connect again.
const STALLED: Duration = Duration::from_secs(10);
/// How long entries of an earlier run are kept, in case they are wanted again.
const ORPHANED: Duration = Duration::from_secs(15);
/// Most entries in a list. This limits memory if a switch sends an endless answer.
const LISTED_MAX: usize = 4_194_304;

/// The two switch ports of a port of the shunt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchPorts {
    /// The port of the hosts.
    pub fast: u32,
    /// The port of the firewall's interface.
    pub slow: u32,
}

/// The configuration of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerConfig {
    /// The allowed versions.
    pub versions: BTreeSet<Version>,
    /// The ports.
    pub ports: BTreeMap<PortNumber, SwitchPorts>,
    /// The switch's port that leads to each port of the shunt on another switch.
    pub through: BTreeMap<PortNumber, u32>,
    /// Distinguishes the entries of this run of the program from those of other runs.
    pub run: u16,
    /// Delete all entries of the switch when it first connects (`delete_flows_on_startup`).
    pub clear: bool,
    /// Install the entries that forward between fast and slow ports (`default_no_shunting`).
    pub pairs: bool,
    /// Become the switch's master at each connection (1.3). The number is the generation at the start of the program,
    /// in milliseconds since 1970; it grows with the time.
    pub master: Option<u64>,
    /// Other controllers have entries on the switch: remove only our own, and only from our table.
    pub shared: bool,
    /// The table of our entries (1.3).
    pub table: u8,
}

/// An event for a controller.
#[derive(Clone, Copy, Debug)]
pub enum ControllerInput<'a> {
    /// A switch has connected. An older connection is over.
    Connected,
    /// The connection is over.
    Disconnected,
    /// Bytes from the switch.
    Bytes(&'a [u8]),
    /// Install an entry for both directions.
    Install(&'a Entry),
    /// Install an entry for one direction. The other one is that of another switch.
    InstallOne(&'a Entry, Way),
    /// Remove an entry.
    Remove(EntryId, Cause),
    /// Remove the entries of all flows as fast as possible.
    Suspend,
    /// Request the counters now.
    Count,
    /// Delete all entries of the switch.
    Clear,
    /// The deadline may have passed.
    Tick,
}

/// What a controller wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControllerOutput {
    /// Send this to the switch.
    Send(Vec<u8>),
    /// Close the connection, for this reason in words.
    Close(String),
    /// The switch has listed its entries, and new entries can be installed.
    Ready(Version, Features),
    /// The switch confirmed an entry.
    Installed(EntryId),
    /// The switch has refused an entry.
    Failed(EntryId, Obstacle),
    /// The traffic of an entry so far.
    Counted(EntryId, Both),
    /// The switch has removed an entry: the cause, and all its traffic.
    Gone(EntryId, Cause, Both),
    /// A message for the operator.
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

/// A list of entries that was requested.
#[derive(Clone, Debug)]
struct Listing {
    xid: u32,
    asked: Instant,
    /// Entries that were confirmed when the list was requested, so they must be in it.
    expected: BTreeSet<EntryId>,
    entries: BTreeMap<u64, FlowCounts>,
}

/// The controller of one switch.
#[derive(Debug)]
pub struct Controller {
    pub(super) config: ControllerConfig,
    decoder: Decoder,
    pub(super) stage: Stage,
    pub(super) version: Version,
    features: Features,
    /// The switch can match TCP flags and fragments (Nicira's extension).
    pub(super) flags: bool,
    cleared: bool,
    last_xid: u32,
    pub(super) rows: BTreeMap<EntryId, Row>,
    /// The entry of each transaction.
    pub(super) xids: BTreeMap<u32, EntryId>,
    /// Entries of an earlier run with their counters, until they are wanted or too old.
    pub(super) orphans: BTreeMap<Place, FlowCounts>,
    orphaned_until: Instant,
    listing: Option<Listing>,
    count_at: Instant,
    heard: Instant,
    echo: Option<Instant>,
    /// When the switch connected.
    since: Instant,
    started: Instant,
    pub(super) outputs: VecDeque<ControllerOutput>,
}

impl Controller {
    /// Makes a controller without a switch.
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
            started: now,
            outputs: VecDeque::new(),
        }
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<ControllerOutput> {
        self.outputs.pop_front()
    }

    /// Returns when to call [`Self::handle`] with [`ControllerInput::Tick`]. `None` while no switch is connected.
    pub fn deadline(&self) -> Option<Instant> {
        let silent = self.echo.map_or(self.heard + SILENT, |asked| asked + STALLED);
        match self.stage {
            Stage::Down => None,
            Stage::Ready => Some(silent.min(self.count_at)),
            _ => Some(silent.min(self.since + STALLED)),
        }
    }

    /// Whether [`Self::poll`] returns something.
    pub fn has_output(&self) -> bool {
        !self.outputs.is_empty()
    }

    /// Whether entries can be installed.
    pub fn is_ready(&self) -> bool {
        self.stage == Stage::Ready
    }

    /// Whether the switch can match TCP flags, so that a RST takes the slow path.
    pub const fn matches_flags(&self) -> bool {
        self.flags && matches!(self.version, Version::V1_3)
    }

    /// Returns the number of entries that the switch has or may have.
    pub fn entries(&self) -> usize {
        self.rows.len()
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: ControllerInput<'_>) {
        match input {
            ControllerInput::Connected => self.connected(now),
            ControllerInput::Disconnected => self.disconnected(),
            ControllerInput::Bytes(bytes) => self.bytes(now, bytes),
            ControllerInput::Install(entry) => self.install(now, entry, &Way::BOTH),
            ControllerInput::InstallOne(entry, way) => self.install(now, entry, way.only()),
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

    /// Changes the flow table.
    pub(super) fn change(&mut self, change: FlowMod) -> u32 {
        let in_ours = change.command == Command::Add || self.config.shared;
        let table = in_ours.then_some(self.config.table);
        self.send(&Request::FlowMod(FlowMod { table, ..change }))
    }

    pub(super) fn close(&mut self, why: String) {
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
                self.close("the switch and this program have no common OpenFlow version".into())
            }
            (_, Message::EchoRequest(data)) => {
                // Use the transaction id of the request.
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
            // Messages that are not needed, or not in this stage.
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
                .close(format!("the switch speaks OpenFlow {version:#04x}, but not an allowed version"));
        };
        self.version = common;
        self.stage = Stage::Asking;
        self.send(&Request::FeaturesRequest);
        // The switch drops packets without an entry, and sends none to the controller.
        self.send(&Request::SetConfig { flags: 0, miss_send_len: 0 });
    }

    fn featured(&mut self, now: Instant, features: Features) {
        self.features = features;
        self.stage = Stage::Listing;
        if let (Some(base), Version::V1_3) = (self.config.master, self.version) {
            let passed = u64::try_from((now - self.started).as_millis()).unwrap_or(0);
            self.send(&Request::BecomeMaster { generation: base.saturating_add(passed) });
        }
        // Only at the first connection: later the switch has entries of this run, which are still in use.
        if self.config.clear && !self.cleared {
            self.clear();
        }
        self.cleared = true;
        self.list(now);
    }

    fn clear(&mut self) {
        if self.stage == Stage::Down {
            return;
        }
        let all = delete(Command::Delete, Pattern::default(), 0);
        if !self.config.shared {
            self.change(all);
            return;
        }
        // 1.0 would remove the entries of the other controllers, too.
        if self.version == Version::V1_3 {
            for (cookie, cookie_mask) in [Cookie::any(), Cookie::pairs()] {
                self.change(FlowMod { cookie, cookie_mask, ..all });
            }
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

    /// Evaluates a list during normal work: updates counters, and finds confirmed entries that are missing.
    fn counted(&mut self, now: Instant, listing: &Listing) {
        let ids: Vec<_> = self.rows.keys().copied().collect();
        for id in ids {
            let Some(row) = self.rows.get_mut(&id) else { continue };
            let before = row.traffic();
            let is_whole = row.see(|way| {
                let cookie = Cookie { run: self.config.run, id, way }.number();
                listing.entries.get(&cookie).map(|shown| ip_traffic(shown.packets, shown.bytes))
            });
            let (installed, traffic) = (row.state == State::Installed, row.traffic());
            if installed && listing.expected.contains(&id) && !is_whole {
                self.remove(now, id, End::Gone(Cause::Lost));
            } else if traffic != before {
                self.outputs.push_back(ControllerOutput::Counted(id, traffic));
            }
        }
    }

    /// Compares the entries of a switch that has just connected with the wanted entries.
    fn reconcile(&mut self, now: Instant, shown: BTreeMap<u64, FlowCounts>) {
        self.install_pairs();
        self.orphaned_until = now + ORPHANED;
        let mut shown = shown;
        let ids: Vec<_> = self.rows.keys().copied().collect();
        for id in ids {
            let Some(row) = self.rows.get_mut(&id) else { continue };
            let before = row.traffic();
            let is_whole = row.see(|way| {
                let shown = shown.remove(&Cookie { run: self.config.run, id, way }.number());
                shown.map(|shown| ip_traffic(shown.packets, shown.bytes))
            });
            match row.state {
                // Report the traffic of the time without connection, because the next list may show no change.
                State::Installed if is_whole => {
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
            self.change(FlowMod {
                command: Command::Add,
                pattern: Pattern { in_port: Some(from), ..Pattern::default() },
                cookie: Cookie::PAIR,
                cookie_mask: 0,
                priority: PRIORITY_PAIR,
                idle_timeout_s: 0,
                output: Some(to),
                table: None,
            });
        }
    }

    /// Deletes all entries of flows with one message. 1.0 has no such message, so each entry is deleted by itself.
    fn suspend(&mut self) {
        if self.stage == Stage::Ready && self.version == Version::V1_3 {
            let (cookie, cookie_mask) = Cookie::any_of(self.config.run);
            let all = delete(Command::Delete, Pattern::default(), 0);
            self.change(FlowMod { cookie, cookie_mask, ..all });
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

    /// Checks for missing answers and old orphans, and requests the counters.
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
