//! From values to one netlink transaction.

use super::expression::{self as e, Compare, Lookup, REGISTER};
use super::field::DataKind;
use super::model::{Chain, ChainKind, Flowtable, Hook, Policy, Rule, Statement, Table, Test};
use super::set::{Element, ElementData, MapData, Set};
use super::timeout;
use super::{Family, Field, TCP, UDP, Value};
use crate::netlink::{AttributeWriter, Requests, flag};

const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
/// Elements go into messages of at most this many bytes; the length of an attribute has 16 bits.
const ELEMENTS_BYTES: usize = 30_000;

/// Message types of nftables (`enum nf_tables_msg_types`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Kind {
    NewTable = 0,
    GetTable = 1,
    DeleteTable = 2,
    NewChain = 3,
    GetChain = 4,
    DeleteChain = 5,
    NewRule = 6,
    DeleteRule = 8,
    NewSet = 9,
    GetSet = 10,
    DeleteSet = 11,
    NewElements = 12,
    NewObject = 18,
    GetObject = 19,
    DeleteObject = 20,
    NewFlowtable = 22,
    GetFlowtable = 23,
    DeleteFlowtable = 24,
}

impl Kind {
    pub(super) const fn number(self) -> u16 {
        (SUBSYSTEM << 8) | self as u16
    }
}

/// `struct nfgenmsg` for this family.
pub(super) const fn header(family: u8) -> [u8; 4] {
    [family, 0, 0, 0]
}

/// One transaction: all of it takes effect, or nothing.
pub(super) fn transaction(fill: impl FnOnce(&mut Requests)) -> Requests {
    let [high, low] = SUBSYSTEM.to_be_bytes();
    let mut requests = Requests::new();
    requests.push("commit an nftables transaction", BATCH_BEGIN, 0, &[0, 0, high, low], |_| {});
    fill(&mut requests);
    // One acknowledgement is enough: it comes only when the whole batch has been worked off.
    requests.acknowledge(requests.len() - 1);
    requests.push("commit an nftables transaction", BATCH_END, 0, &[0, 0, high, low], |_| {});
    requests
}

/// A transaction without its end: the kernel checks all of it and commits nothing.
pub(super) fn dry_run(fill: impl FnOnce(&mut Requests)) -> Requests {
    let [high, low] = SUBSYSTEM.to_be_bytes();
    let mut requests = Requests::new();
    requests.push("try an nftables transaction", BATCH_BEGIN, 0, &[0, 0, high, low], |_| {});
    fill(&mut requests);
    requests.acknowledge(requests.len() - 1);
    requests
}

/// Adds the message that creates a flow table.
pub(super) fn new_flowtable(requests: &mut Requests, table: &Table, flowtable: &Flowtable) {
    const INGRESS: u32 = 0;
    const COUNTER: u32 = 2;
    let (family, name) = (table.family, &flowtable.name);
    let asked = format!("create flowtable {name} in the nftables table {family} {}", table.name);
    requests.push(asked, Kind::NewFlowtable.number(), flag::CREATE, &header(family.number()), |w| {
        w.text(1, &table.name);
        w.text(2, name);
        w.nested(3, |w| {
            w.u32_be(1, INGRESS);
            w.bytes(2, &flowtable.priority.to_be_bytes());
            w.nested(3, |w| flowtable.devices.iter().for_each(|device| w.text(1, &device.to_string())));
        });
        if flowtable.counter {
            w.u32_be(7, COUNTER);
        }
    });
}

/// Adds the messages that create `table` with these table flags, which must not exist.
pub(super) fn create(requests: &mut Requests, table: &Table, flags: u32) {
    new_table(requests, table.family, &table.name, flags, flag::CREATE | flag::EXCLUSIVE);
    // Chains first: elements of verdict maps and rules name them. Rules last: they name sets and flow tables.
    table.chains.iter().for_each(|chain| new_chain(requests, table, chain));
    table.timeouts.iter().for_each(|policy| timeout::new_object(requests, table, policy));
    fill_sets(requests, table, &table.sets.iter().collect::<Vec<_>>());
    table.flowtables.iter().for_each(|flowtable| new_flowtable(requests, table, flowtable));
    fill_chains(requests, table);
}

/// Adds the messages that make these sets, with their elements.
pub(super) fn fill_sets(requests: &mut Requests, table: &Table, sets: &[&Set]) {
    for (index, set) in (1..).zip(sets) {
        new_set(requests, table, set, index);
        new_elements(requests, table, set);
    }
}

/// Adds the messages that put the rules into chains that are there.
pub(super) fn fill_chains(requests: &mut Requests, table: &Table) {
    for chain in &table.chains {
        chain.rules.iter().for_each(|rule| new_rule(requests, table, chain, rule));
    }
}

/// Adds the message that creates, or with `more` = 0 updates, a table.
pub(super) fn new_table(requests: &mut Requests, family: Family, name: &str, flags: u32, more: u16) {
    let asked = format!("create the nftables table {family} {name}");
    requests.push(asked, Kind::NewTable.number(), more, &header(family.number()), |w| {
        w.text(1, name);
        w.u32_be(2, flags);
    });
}

/// Adds the message that deletes a table and all in it.
pub(super) fn delete_table(requests: &mut Requests, family: Family, name: &str) {
    let asked = format!("delete the nftables table {family} {name}");
    requests.push(asked, Kind::DeleteTable.number(), 0, &header(family.number()), |w| w.text(1, name));
}

pub(super) fn new_chain(requests: &mut Requests, table: &Table, chain: &Chain) {
    let asked = format!("create chain {} in the nftables table {} {}", chain.name, table.family, table.name);
    requests.push(asked, Kind::NewChain.number(), flag::CREATE, &header(table.family.number()), |w| {
        w.text(1, &table.name);
        w.text(3, &chain.name);
        let Some(base) = chain.base else { return };
        w.nested(4, |w| {
            w.u32_be(1, hook_number(base.hook));
            w.bytes(2, &base.priority.to_be_bytes());
        });
        w.u32_be(5, u32::from(base.policy == Policy::Accept));
        w.text(7, chain_kind(base.kind));
    });
}

pub(super) const fn hook_number(hook: Hook) -> u32 {
    match hook {
        Hook::Prerouting => 0,
        Hook::Input => 1,
        Hook::Forward => 2,
        Hook::Output => 3,
        Hook::Postrouting => 4,
    }
}

/// The kernel's and nft's word for it.
pub(super) const fn chain_kind(kind: ChainKind) -> &'static str {
    match kind {
        ChainKind::Filter => "filter",
        ChainKind::Route => "route",
        ChainKind::Nat => "nat",
    }
}

/// A type number as the nft tool stores it: 6 bits for each part of a concatenation.
fn type_number(kinds: &[DataKind]) -> u32 {
    kinds.iter().fold(0, |number, kind| (number << 6) | kind.number())
}

/// Bytes of a key or of data: padded to words if concatenated.
fn length(kinds: &[DataKind]) -> u32 {
    let bytes = match kinds {
        [one] => one.bytes(),
        several => several.iter().map(|kind| kind.padded()).sum(),
    };
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// The data type of maps to verdicts (`NFT_DATA_VERDICT`).
pub(super) const VERDICT: u32 = 0xffff_ff00;

fn new_set(requests: &mut Requests, table: &Table, set: &Set, id: u32) {
    const INTERVAL: u32 = 0x4;
    const MAP: u32 = 0x8;
    const CONCAT: u32 = 0x80;
    let concatenated = set.key.len() > 1;
    let mut flags = if set.interval { INTERVAL } else { 0 };
    flags |= if set.data.is_some() { MAP } else { 0 };
    // Without ranges the flag changes nothing but needs Linux 5.6.
    flags |= if concatenated && set.interval { CONCAT } else { 0 };
    let asked = format!("create set {} in the nftables table {} {}", set.name, table.family, table.name);
    requests.push(asked, Kind::NewSet.number(), flag::CREATE, &header(table.family.number()), |w| {
        w.text(1, &table.name);
        w.text(2, &set.name);
        w.u32_be(3, flags);
        w.u32_be(4, type_number(&set.key));
        w.u32_be(5, length(&set.key));
        match &set.data {
            None => {}
            Some(MapData::Verdict) => {
                w.u32_be(6, VERDICT);
                w.u32_be(7, 0);
            }
            Some(MapData::Values(kinds)) => {
                w.u32_be(6, type_number(kinds));
                w.u32_be(7, length(kinds));
            }
        }
        w.u32_be(10, id);
        if let [kind] = set.key.as_slice()
            && kind.is_host_order()
        {
            // The nft tool's own note on byte order (NFTNL_UDATA_SET_KEYBYTEORDER, host), without which it lists nonsense.
            w.bytes(13, &[&[0, 4], 1u32.to_ne_bytes().as_slice()].concat());
        }
        if concatenated && set.interval {
            w.nested(9, |w| w.nested(2, |w| set.key.iter().for_each(|kind| part_length(w, *kind))));
        }
    });
}

/// The length of one part of a concatenated key (`NFTA_SET_FIELD_LEN`).
fn part_length(w: &mut AttributeWriter<'_>, kind: DataKind) {
    w.nested(1, |w| w.u32_be(1, u32::try_from(kind.bytes()).unwrap_or(u32::MAX)));
}

fn new_elements(requests: &mut Requests, table: &Table, set: &Set) {
    let mut elements = set.elements.iter().peekable();
    while elements.peek().is_some() {
        let asked = format!("fill set {} in the nftables table {} {}", set.name, table.family, table.name);
        requests.push(asked, Kind::NewElements.number(), flag::CREATE, &header(table.family.number()), |w| {
            w.text(1, &table.name);
            w.text(2, &set.name);
            w.nested(3, |w| {
                let limit = w.written() + ELEMENTS_BYTES;
                while w.written() < limit
                    && let Some(element) = elements.next()
                {
                    new_element(w, set, element);
                }
            });
        });
    }
}

fn new_element(w: &mut AttributeWriter<'_>, set: &Set, element: &Element) {
    const INTERVAL_END: u32 = 1;
    let first: Vec<_> = element.key.iter().map(|span| span.first).collect();
    let last: Vec<_> = element.key.iter().map(|span| span.last).collect();
    w.nested(1, |w| {
        w.nested(1, |w| w.bytes(1, &concatenated(&first)));
        if set.interval && set.key.len() > 1 {
            w.nested(10, |w| w.bytes(1, &concatenated(&last)));
        }
        match &element.data {
            None => {}
            Some(ElementData::Verdict(verdict)) => w.nested(2, |w| e::verdict_data(w, verdict)),
            Some(ElementData::Values(values)) => w.nested(2, |w| w.bytes(1, &concatenated(values))),
        }
    });
    // A plain range is two elements: its start, and behind its last value an end, unless it reaches the highest value.
    if set.interval
        && let [one] = last.as_slice()
        && let Some(end) = one.successor()
    {
        w.nested(1, |w| {
            w.nested(1, |w| w.bytes(1, &end.to_bytes()));
            w.u32_be(3, INTERVAL_END);
        });
    }
}

/// Bytes of one value, or of several each padded to words.
fn concatenated(values: &[Value]) -> Vec<u8> {
    if let [one] = values {
        return one.to_bytes();
    }
    let mut bytes = Vec::new();
    for value in values {
        bytes.extend_from_slice(&value.to_bytes());
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

fn new_rule(requests: &mut Requests, table: &Table, chain: &Chain, rule: &Rule) {
    let text = super::render::rule_text(table.family, rule);
    let asked = format!(
        "add \"{text}\" to chain {} of the nftables table {} {}",
        chain.name, table.family, table.name
    );
    requests.push(
        asked,
        Kind::NewRule.number(),
        flag::CREATE | flag::APPEND,
        &header(table.family.number()),
        |w| {
            w.text(1, &table.name);
            w.text(2, &chain.name);
            w.nested(4, |w| {
                let mut known = Known::of(table.family);
                rule.statements.iter().for_each(|statement| known.statement(w, statement));
            });
        },
    );
}

/// What the rule has made sure of so far.
struct Known {
    family: Family,
    nfproto: Option<u8>,
    tcp: bool,
    udp: bool,
}

impl Known {
    const fn of(family: Family) -> Self {
        let nfproto = match family {
            Family::Inet => None,
            Family::Ip | Family::Ip6 => Some(family.number()),
        };
        Self { family, nfproto, tcp: false, udp: false }
    }

    /// Adds the matches without which a field does not exist, as the nft tool does.
    fn require(&mut self, w: &mut AttributeWriter<'_>, fields: &[Field]) {
        if let Some(version) = fields.iter().find_map(|field| field.needs_nfproto())
            && self.nfproto != Some(version)
        {
            e::load(w, Field::NfProto, REGISTER);
            e::compare(w, REGISTER, Compare::Equal, &[version]);
            self.nfproto = Some(version);
        }
        if !self.tcp && fields.iter().any(|field| field.needs_tcp()) {
            self.require_tcp(w);
        }
    }

    fn require_tcp(&mut self, w: &mut AttributeWriter<'_>) {
        if !self.tcp {
            e::load(w, Field::L4Proto, REGISTER);
            e::compare(w, REGISTER, Compare::Equal, &TCP.to_bytes());
            self.tcp = true;
        }
    }

    fn statement(&mut self, w: &mut AttributeWriter<'_>, statement: &Statement) {
        match statement {
            Statement::Match(fields, test) => self.matching(w, fields, test),
            Statement::Counter => e::bare(w, "counter"),
            Statement::SetMark { value, mask } => {
                masked(w, Field::Mark, *value, *mask);
                e::meta_mark_store(w, REGISTER);
            }
            Statement::SetCtMark { value, mask } => {
                masked(w, Field::CtMark, *value, *mask);
                e::ct_mark_store(w, REGISTER);
            }
            Statement::SetCtEvents(bits) => {
                e::immediate(w, REGISTER, &bits.to_ne_bytes());
                e::ct_events_store(w, REGISTER);
            }
            Statement::SetCtTimeout(name) => timeout::refer(w, name),
            Statement::Redirect { port } => {
                e::immediate_value(w, REGISTER, Value::Port(*port));
                e::redirect(w, REGISTER);
            }
            Statement::DnatMap { fields, map, v6 } => self.dnat(w, fields, map, *v6),
            Statement::TProxy { v6, port } => {
                self.require_version(w, *v6);
                if !self.udp {
                    self.require_tcp(w);
                }
                e::immediate_value(w, REGISTER, Value::Port(*port));
                e::tproxy(w, nfproto(*v6), REGISTER);
            }
            Statement::Masquerade => e::bare(w, "masq"),
            Statement::RejectWithReset => {
                self.require_tcp(w);
                e::reject_with_reset(w);
            }
            Statement::NoTrack => e::bare(w, "notrack"),
            Statement::Queue { number, bypass } => e::queue(w, *number, *bypass),
            Statement::FlowAdd(flowtable) => e::flow_add(w, flowtable),
            Statement::VerdictMap(fields, map) => {
                self.load_all(w, fields);
                e::lookup(w, REGISTER, map, Lookup::Verdict);
            }
            Statement::Verdict(verdict) => e::verdict(w, verdict),
        }
    }

    fn matching(&mut self, w: &mut AttributeWriter<'_>, fields: &[Field], test: &Test) {
        self.load_all(w, fields);
        match test {
            Test::Is(value) => {
                e::compare(w, REGISTER, Compare::Equal, &value.to_bytes());
                self.learn(fields, *value);
            }
            Test::IsNot(value) => e::compare(w, REGISTER, Compare::NotEqual, &value.to_bytes()),
            Test::In(set) => e::lookup(w, REGISTER, set, Lookup::Contains),
            Test::NotIn(set) => e::lookup(w, REGISTER, set, Lookup::ContainsNot),
            Test::AnyOf(bits) => {
                let (mask, zero) = (bits.to_bytes(), vec![0; bits.kind().bytes()]);
                e::bitwise(w, REGISTER, &mask, &zero);
                e::compare(w, REGISTER, Compare::NotEqual, &zero);
            }
            Test::Masked { mask, value } => {
                e::bitwise(w, REGISTER, &mask.to_bytes(), &vec![0; mask.kind().bytes()]);
                e::compare(w, REGISTER, Compare::Equal, &value.to_bytes());
            }
        }
    }

    /// A match on the IP version or the protocol makes a later implied one needless.
    fn learn(&mut self, fields: &[Field], value: Value) {
        match (fields, value) {
            ([Field::NfProto], Value::NfProto(version)) => self.nfproto = Some(version),
            ([Field::L4Proto], TCP) => self.tcp = true,
            ([Field::L4Proto], UDP) => self.udp = true,
            _ => {}
        }
    }

    fn load_all(&mut self, w: &mut AttributeWriter<'_>, fields: &[Field]) {
        self.require(w, fields);
        let mut register = REGISTER;
        for field in fields {
            e::load(w, *field, register);
            register += u32::try_from(field.kind().padded() / 4).unwrap_or(1);
        }
    }

    fn dnat(&mut self, w: &mut AttributeWriter<'_>, fields: &[Field], map: &str, v6: bool) {
        self.load_all(w, fields);
        e::lookup(w, REGISTER, map, Lookup::Data(REGISTER));
        let words = if v6 { 4 } else { 1 };
        e::dnat(w, nfproto(v6), REGISTER, REGISTER + words);
    }

    fn require_version(&mut self, w: &mut AttributeWriter<'_>, v6: bool) {
        if self.family == Family::Inet && self.nfproto != Some(nfproto(v6)) {
            e::load(w, Field::NfProto, REGISTER);
            e::compare(w, REGISTER, Compare::Equal, &[nfproto(v6)]);
            self.nfproto = Some(nfproto(v6));
        }
    }
}

const fn nfproto(v6: bool) -> u8 {
    if v6 { super::NFPROTO_IPV6 } else { super::NFPROTO_IPV4 }
}

/// Leaves in the register: the field with the bits `mask` replaced by `value`.
fn masked(w: &mut AttributeWriter<'_>, field: Field, value: u32, mask: u32) {
    if mask == u32::MAX {
        e::immediate(w, REGISTER, &value.to_ne_bytes());
    } else {
        e::load(w, field, REGISTER);
        e::bitwise(w, REGISTER, &(!mask).to_ne_bytes(), &(value & mask).to_ne_bytes());
    }
}
