//! Ended flows in a compact form, in which they wait until their records are read or written.

use super::{Decided, Ended, LiveFlow, Multipath, Taken, Trace, Transport, UNSET, code_of, lock, reason_of};
use sidetrack_core::engine::Stamps;
use sidetrack_core::flow::{Destination, EndReason, Flow, FlowId, Host, HostName, Process, Side};
use sidetrack_core::policy::{Action, Verdict};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Size after which the next flow starts another batch, bytes. A reader takes a whole batch at once, which is
/// work for a tenth of a millisecond.
const FULL: usize = 32 << 10;

/// Number of kinds after which the next flow starts another batch.
const KINDS_MAX: usize = 64;

/// First capacity of a batch, bytes. At low rates a batch holds few flows.
const FIRST_ROOM: usize = 2 << 10;

/// Ended flows in one piece of memory: the numbers and then the texts of each flow.
///
/// Data that many flows share (rule, carrier, functions, listener) is stored once, as a *kind*.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    kinds: Vec<Arc<Decided>>,
    bytes: Vec<u8>,
    starts: Vec<u32>,
    /// TCP states of those flows that have some, each with its index in `starts`, in rising order.
    states: Vec<(usize, Stamps)>,
}

/// Bits for the data that a flow has.
mod has {
    pub(super) const KNOWN: u16 = 1;
    pub(super) const NAME: u16 = 1 << 1;
    pub(super) const HOST: u16 = 1 << 2;
    /// The host is the destination's name.
    pub(super) const SAME_HOST: u16 = 1 << 3;
    pub(super) const PROCESS: u16 = 1 << 4;
    pub(super) const PROGRAM: u16 = 1 << 5;
    pub(super) const PID: u16 = 1 << 6;
    pub(super) const UID: u16 = 1 << 7;
    pub(super) const USER: u16 = 1 << 8;
    pub(super) const DETAIL: u16 = 1 << 9;
    pub(super) const TAKEN: u16 = 1 << 10;
    pub(super) const AGREEMENT: u16 = 1 << 11;
    pub(super) const SHUNTED: u16 = 1 << 12;
    pub(super) const TLS_NAME: u16 = 1 << 13;
    pub(super) const CLIENT_MULTIPATH: u16 = 1 << 14;
    pub(super) const SERVER_MULTIPATH: u16 = 1 << 15;
}

/// Numbers of 8 bytes at the start of each flow.
const NUMBERS: usize = 11;
/// Offset of the kind's index (4 bytes). After it come the bits (2 bytes), the reason and the transport (1 byte
/// each).
const KIND_AT: usize = NUMBERS * 8;
/// Bytes before the texts of a flow.
const FIXED: usize = KIND_AT + 8;

fn micros(time: Option<Duration>) -> u64 {
    time.map_or(UNSET, |time| u64::try_from(time.as_micros()).unwrap_or(UNSET - 1))
}

/// Whether both have the same rule of the same policy, carrier and listener.
fn is_same_kind(one: &Decided, other: &Decided) -> bool {
    let same_verdict = match (&one.verdict, &other.verdict) {
        (Some(one), Some(other)) => {
            // Compare pointers first: the rules of one configuration share their names.
            let same_rule = match (&one.rule, &other.rule) {
                (Some(one), Some(other)) => Arc::ptr_eq(one, other) || one == other,
                (one, other) => one.is_none() && other.is_none(),
            };
            same_rule
                && match (&one.action, &other.action) {
                    (Action::Carry(one), Action::Carry(other)) => Arc::ptr_eq(one, other) || one == other,
                    (one, other) => one == other,
                }
        }
        (one, other) => one.is_none() && other.is_none(),
    };
    let (a, b) = (&one.flow, &other.flow);
    same_verdict
        && one.policy.ptr_eq(&other.policy)
        && a.intercept == b.intercept
        && a.protocol == b.protocol
        && (Arc::ptr_eq(&a.listener, &b.listener) || a.listener == b.listener)
}

pub(super) fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

pub(super) fn put_ip(out: &mut Vec<u8>, ip: IpAddr) {
    match ip {
        IpAddr::V4(ip) => {
            out.push(4);
            out.extend_from_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            out.push(6);
            out.extend_from_slice(&ip.octets());
        }
    }
}

/// Appends a client's address in the form that records need.
pub(super) fn put_address(out: &mut Vec<u8>, address: SocketAddr) {
    put_ip(out, address.ip());
    out.extend_from_slice(&address.port().to_le_bytes());
    if let SocketAddr::V6(address) = address {
        out.extend_from_slice(&address.scope_id().to_le_bytes());
    }
}

/// Appends what is known about a flow. Returns the bits for it.
fn put_flow(out: &mut Vec<u8>, flow: &Flow) -> u16 {
    let mut there = has::KNOWN;
    put_address(out, flow.client);
    out.extend_from_slice(&flow.orig_dst.port.to_le_bytes());
    match &flow.orig_dst.host {
        Host::Ip(ip) => {
            put_ip(out, *ip);
            if ip.is_ipv6() {
                out.extend_from_slice(&flow.orig_dst.zone.to_le_bytes());
            }
        }
        Host::Name(name) => {
            there |= has::NAME;
            put_text(out, name.as_str());
        }
    }
    if let Some(host) = &flow.host {
        there |= has::HOST;
        if matches!(&flow.orig_dst.host, Host::Name(name) if name == host) {
            there |= has::SAME_HOST;
        } else {
            put_text(out, host.as_str());
        }
    }
    if let Some(process) = &flow.process {
        there |= has::PROCESS;
        if let Some(name) = &process.name {
            there |= has::PROGRAM;
            put_text(out, name);
        }
        for (number, bit) in [(process.pid, has::PID), (process.uid, has::UID)] {
            if let Some(number) = number {
                there |= bit;
                out.extend_from_slice(&number.to_le_bytes());
            }
        }
    }
    if let Some(user) = &flow.user {
        there |= has::USER;
        put_text(out, user);
    }
    there
}

impl Batch {
    /// The number of flows.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Whether the next flow should start another batch.
    pub(super) fn is_full(&self) -> bool {
        self.size() >= FULL || self.kinds.len() >= KINDS_MAX
    }

    /// Its size in bytes.
    pub fn size(&self) -> usize {
        self.bytes.len() + self.states.len() * size_of::<(usize, Stamps)>()
    }

    fn kind_of(&mut self, decided: &Arc<Decided>) -> u32 {
        // Most flows have the kind of the flow before.
        let found = self.kinds.iter().rposition(|kind| is_same_kind(kind, decided));
        let at = found.unwrap_or_else(|| {
            self.kinds.push(decided.clone());
            self.kinds.len() - 1
        });
        u32::try_from(at).unwrap_or(u32::MAX)
    }

    /// Adds a flow.
    pub fn add(&mut self, ended: &Ended) {
        if self.bytes.capacity() == 0 {
            self.bytes.reserve(FIRST_ROOM);
        }
        let flow = &*ended.flow;
        let decided = flow.decided();
        let start = self.bytes.len();
        let since = flow.since.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (up, down) = flow.bytes();
        let (packets_up, packets_down) = flow.packets();
        let numbers: [u64; NUMBERS] = [
            flow.id.0,
            micros(Some(since)),
            micros(Some(ended.duration)),
            up,
            down,
            micros(flow.connect_time()),
            micros(flow.first_byte_time()),
            micros(flow.sniff_wait()),
            packets_up,
            packets_down,
            micros(flow.held_wait()),
        ];
        let mut fixed = [0; FIXED];
        for (place, number) in fixed.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        let kind = decided.as_ref().map_or(u32::MAX, |decided| self.kind_of(decided));
        fixed[KIND_AT..KIND_AT + 4].copy_from_slice(&kind.to_le_bytes());
        fixed[KIND_AT + 6] = code_of(ended.reason);
        self.bytes.extend_from_slice(&fixed);
        let there = self.put_texts(ended, decided.as_deref());
        let transport = flow.taken().map(|taken| taken.transport);
        let transport = Transport::ALL.iter().position(|one| Some(*one) == transport);
        self.bytes[start + KIND_AT + 4..start + KIND_AT + 6].copy_from_slice(&there.to_le_bytes());
        self.bytes[start + KIND_AT + 7] = transport.and_then(|at| u8::try_from(at).ok()).unwrap_or(u8::MAX);
        self.states.extend(flow.states().map(|states| (self.starts.len(), states)));
        self.starts.push(u32::try_from(start).unwrap_or(u32::MAX));
    }

    /// Appends the texts. Returns the bits for them.
    fn put_texts(&mut self, ended: &Ended, decided: Option<&Decided>) -> u16 {
        let out = &mut self.bytes;
        let mut there = decided.map_or(0, |decided| put_flow(out, &decided.flow));
        if ended.flow.was_shunted() {
            there |= has::SHUNTED;
        }
        let multipath = ended.flow.multipath();
        if multipath.client {
            there |= has::CLIENT_MULTIPATH;
        }
        if multipath.server {
            there |= has::SERVER_MULTIPATH;
        }
        if let Some(taken) = ended.flow.taken() {
            there |= has::TAKEN;
            put_address(out, taken.address);
        }
        if let Some(detail) = &ended.detail {
            there |= has::DETAIL;
            put_text(out, detail);
        }
        if let Some(agreement) = decided.and_then(Decided::agreement) {
            there |= has::AGREEMENT;
            put_text(out, agreement);
        }
        if let Some(name) = ended.flow.tls_name() {
            there |= has::TLS_NAME;
            put_text(out, name.as_str());
        }
        lock(&ended.flow.trace).put(out);
        there
    }

    /// Its flows, in the order in which they ended.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Past<'_>> {
        let ends =
            self.starts.iter().skip(1).copied().chain([u32::try_from(self.bytes.len()).unwrap_or(u32::MAX)]);
        let ends: Vec<u32> = ends.collect();
        (0..self.starts.len()).filter_map(move |at| {
            let bytes = self.bytes.get(self.starts[at] as usize..ends[at] as usize)?;
            let (fixed, texts) = bytes.split_first_chunk::<FIXED>()?;
            let states = self.states.binary_search_by_key(&at, |(place, _)| *place).ok();
            let states = states.and_then(|found| self.states.get(found)).map(|(_, states)| states);
            Some(Past { fixed, texts, kinds: &self.kinds, states })
        })
    }

    /// The kinds of its flows, each with the first flow of the kind.
    pub fn kinds(&self) -> &[Arc<Decided>] {
        &self.kinds
    }

    /// Appends the flows of another batch. Returns false if they do not fit.
    pub fn absorb(&mut self, other: &Self) -> bool {
        if self.bytes.len() + other.bytes.len() > FULL || self.kinds.len() + other.kinds.len() > KINDS_MAX {
            return false;
        }
        let kinds: Vec<u32> = other.kinds.iter().map(|kind| self.kind_of(kind)).collect();
        let (offset, before) = (self.bytes.len(), self.starts.len());
        self.states.extend(other.states.iter().map(|(place, states)| (place + before, *states)));
        self.bytes.extend_from_slice(&other.bytes);
        for start in &other.starts {
            let start = *start as usize + offset;
            let place = &mut self.bytes[start + KIND_AT..start + KIND_AT + 4];
            let kind = u32::from_le_bytes(place.try_into().unwrap_or_default());
            if let Some(kind) = kinds.get(kind as usize) {
                place.copy_from_slice(&kind.to_le_bytes());
            }
            self.starts.push(u32::try_from(start).unwrap_or(u32::MAX));
        }
        true
    }
}

/// One flow of a [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct Past<'a> {
    fixed: &'a [u8; FIXED],
    texts: &'a [u8],
    kinds: &'a [Arc<Decided>],
    states: Option<&'a Stamps>,
}

/// The data of a flow besides its numbers and its kind.
#[derive(Clone, Debug, Default)]
pub struct Texts<'a> {
    /// The client. `None` if nothing was known about the flow.
    pub client: Option<SocketAddr>,
    /// The destination's address. `None` if it is a name.
    pub dst_ip: Option<IpAddr>,
    /// The destination's name.
    pub dst_name: Option<&'a str>,
    /// The destination's port.
    pub dst_port: u16,
    /// The zone of the destination's address, or 0.
    pub dst_zone: u32,
    /// The host name, if one is known besides the destination.
    pub host: Option<&'a str>,
    /// The local program, if it was looked up.
    pub process: Option<(Option<&'a str>, Option<u32>, Option<u32>)>,
    /// The authenticated user.
    pub user: Option<&'a str>,
    /// The transport and the address it leads to.
    pub taken: Option<Taken>,
    /// Details beyond the reason.
    pub detail: Option<&'a str>,
    /// The agreement's decision.
    pub agreement: Option<&'a str>,
    /// The name in the client's TLS hello, if it differs from the host.
    pub tls_name: Option<&'a str>,
    /// The decision trace in its compact form.
    trace: &'a [u8],
}

/// Reads what [`Batch::add`] wrote. Missing data reads as empty.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn array<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => [0; N],
        }
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub(super) fn text(&mut self) -> &'a str {
        let length = (self.u32() as usize).min(self.0.len());
        let (text, rest) = self.0.split_at(length);
        self.0 = rest;
        std::str::from_utf8(text).unwrap_or_default()
    }

    pub(super) fn ip(&mut self) -> IpAddr {
        match self.array::<1>() {
            [4] => IpAddr::from(self.array::<4>()),
            _ => IpAddr::from(self.array::<16>()),
        }
    }

    pub(super) fn address(&mut self) -> SocketAddr {
        let ip = self.ip();
        let mut address = SocketAddr::new(ip, u16::from_le_bytes(self.array()));
        if let SocketAddr::V6(address) = &mut address {
            address.set_scope_id(self.u32());
        }
        address
    }
}

impl<'a> Past<'a> {
    fn number(&self, at: usize) -> u64 {
        let bytes = self.fixed.get(at * 8..at * 8 + 8).and_then(|bytes| bytes.try_into().ok());
        u64::from_le_bytes(bytes.unwrap_or_default())
    }

    fn time(&self, at: usize) -> Option<Duration> {
        Some(self.number(at)).filter(|us| *us != UNSET).map(Duration::from_micros)
    }

    const fn has(&self) -> u16 {
        u16::from_le_bytes([self.fixed[KIND_AT + 4], self.fixed[KIND_AT + 5]])
    }

    /// The flow's number.
    pub fn id(&self) -> u64 {
        self.number(0)
    }

    /// When it was captured: microseconds since 1970.
    pub fn since_us(&self) -> u64 {
        self.number(1)
    }

    /// Time from the capture to the end.
    pub fn duration(&self) -> Duration {
        Duration::from_micros(self.number(2))
    }

    /// Bytes from client to server, and from server to client.
    pub fn bytes(&self) -> (u64, u64) {
        (self.number(3), self.number(4))
    }

    /// Datagrams from client to server, and from server to client.
    pub fn packets(&self) -> (u64, u64) {
        (self.number(8), self.number(9))
    }

    /// Time from the capture until the path to the server was set up.
    pub fn connect_time(&self) -> Option<Duration> {
        self.time(5)
    }

    /// Time from the capture to the first byte from the server.
    pub fn first_byte_time(&self) -> Option<Duration> {
        self.time(6)
    }

    /// How long it waited for its first bytes, if a rule needed them.
    pub fn sniff_wait(&self) -> Option<Duration> {
        self.time(7)
    }

    /// How long its client's SYN was held, if it was.
    pub fn held_wait(&self) -> Option<Duration> {
        self.time(10)
    }

    /// The index of its kind in [`Batch::kinds`]. `None` if nothing was known about the flow.
    pub fn kind(&self) -> Option<usize> {
        let mut kind = Reader(self.fixed.get(KIND_AT..).unwrap_or_default());
        Some(kind.u32() as usize).filter(|at| *at < self.kinds.len())
    }

    /// The reason of its end.
    pub fn reason(&self) -> EndReason {
        reason_of(self.fixed[KIND_AT + 6]).unwrap_or(EndReason::Internal)
    }

    /// The transport, if its carrier leaves a choice.
    pub fn transport(&self) -> Option<Transport> {
        Transport::ALL.get(usize::from(self.fixed[KIND_AT + 7])).copied()
    }

    /// Whether bytes of it bypassed Sidetrack.
    pub const fn was_shunted(&self) -> bool {
        self.has() & has::SHUNTED != 0
    }

    /// The sides that used Multipath TCP.
    pub const fn multipath(&self) -> Multipath {
        Multipath {
            client: self.has() & has::CLIENT_MULTIPATH != 0,
            server: self.has() & has::SERVER_MULTIPATH != 0,
        }
    }

    /// The TCP states that both sides have reached. `None` if the kernel's TCP carried the flow.
    pub const fn states(&self) -> Option<&'a Stamps> {
        self.states
    }

    /// The other data.
    pub fn texts(&self) -> Texts<'a> {
        let (has, mut from) = (self.has(), Reader(self.texts));
        let is = |bit: u16| has & bit != 0;
        let mut texts = Texts::default();
        if is(has::KNOWN) {
            texts.client = Some(from.address());
            texts.dst_port = u16::from_le_bytes(from.array());
            match is(has::NAME) {
                true => texts.dst_name = Some(from.text()),
                false => {
                    let ip = from.ip();
                    texts.dst_ip = Some(ip);
                    texts.dst_zone = if ip.is_ipv6() { from.u32() } else { 0 };
                }
            }
            if is(has::HOST) {
                texts.host = if is(has::SAME_HOST) { texts.dst_name } else { Some(from.text()) };
            }
            if is(has::PROCESS) {
                let name = is(has::PROGRAM).then(|| from.text());
                let pid = is(has::PID).then(|| from.u32());
                texts.process = Some((name, pid, is(has::UID).then(|| from.u32())));
            }
            texts.user = is(has::USER).then(|| from.text());
        }
        if is(has::TAKEN) {
            let address = from.address();
            texts.taken = self.transport().map(|transport| Taken { transport, address });
        }
        texts.detail = is(has::DETAIL).then(|| from.text());
        texts.agreement = is(has::AGREEMENT).then(|| from.text());
        texts.tls_name = is(has::TLS_NAME).then(|| from.text());
        texts.trace = from.0;
        texts
    }

    /// Restores the flow and its end.
    pub fn to_ended(&self) -> Ended {
        let texts = self.texts();
        let since: SystemTime = UNIX_EPOCH + Duration::from_micros(self.since_us());
        let flow = LiveFlow::caught(FlowId(self.id()), since, super::now());
        if let Some(kind) = self.kind().and_then(|at| self.kinds.get(at)) {
            let verdict = kind.verdict.clone();
            let agreement = texts.agreement.map(Into::into);
            let verdict = verdict.map(|verdict| Verdict { agreement, ..verdict });
            let policy = kind.policy.clone();
            flow.decide(Decided { flow: flow_of(&kind.flow, &texts), verdict, policy });
        }
        let (up, down) = self.bytes();
        flow.count(up, down);
        let (up, down) = self.packets();
        flow.set_packets(up, down);
        self.connect_time().into_iter().for_each(|time| flow.connected(time));
        self.first_byte_time().into_iter().for_each(|time| flow.first_byte(time));
        self.sniff_wait().into_iter().for_each(|time| flow.sniffed(time));
        self.held_wait().into_iter().for_each(|time| flow.held(time));
        flow.carried_by(texts.taken);
        flow.traced(|trace| *trace = Trace::read(&mut Reader::new(texts.trace)));
        texts.tls_name.and_then(|name| name.parse().ok()).into_iter().for_each(|name| flow.greeted(name));
        self.states.into_iter().for_each(|states| flow.reached(states));
        if self.was_shunted() {
            flow.shunted();
        }
        let multipath = self.multipath();
        flow.speaks_multipath(Side::Client, multipath.client);
        flow.speaks_multipath(Side::Server, multipath.server);
        let detail = texts.detail.map(Into::into);
        Ended { flow: Arc::new(flow), reason: self.reason(), detail, duration: self.duration() }
    }
}

fn flow_of(kind: &Flow, texts: &Texts<'_>) -> Flow {
    let name = |text: &str| text.parse::<HostName>().ok();
    let host = match (texts.dst_ip, texts.dst_name.and_then(name)) {
        (Some(ip), _) => Host::Ip(ip),
        (None, Some(name)) => Host::Name(name),
        (None, None) => kind.orig_dst.host.clone(),
    };
    Flow {
        protocol: kind.protocol,
        intercept: kind.intercept,
        listener: kind.listener.clone(),
        client: texts.client.unwrap_or(kind.client),
        orig_dst: Destination { host, port: texts.dst_port, zone: texts.dst_zone },
        host: texts.host.and_then(name),
        process: texts.process.map(|(name, pid, uid)| Process {
            pid,
            name: name.map(str::to_owned),
            uid,
            is_hidden: false,
        }),
        user: texts.user.map(str::to_owned),
    }
}
