//! The kernel's expressions: the small steps over registers that a rule is made of.

use super::model::Verdict;
use super::{Field, Value};
use crate::netlink::AttributeWriter;

/// The first 16-byte register; as 32-bit words: 8, 9, 10, ...
pub(super) const REGISTER: u32 = 8;
const REGISTER_VERDICT: u32 = 0;
const LIST_ELEM: u16 = 1;

/// How a comparison ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compare {
    /// `NFT_CMP_EQ`.
    Equal = 0,
    /// `NFT_CMP_NEQ`.
    NotEqual = 1,
}

/// One expression: a name and its attributes.
pub(super) fn expression(
    w: &mut AttributeWriter<'_>,
    name: &str,
    write: impl FnOnce(&mut AttributeWriter<'_>),
) {
    w.nested(LIST_ELEM, |w| {
        w.text(1, name);
        w.nested(2, write);
    });
}

/// Loads a field into the words from `register` on.
pub(super) fn load(w: &mut AttributeWriter<'_>, field: Field, register: u32) {
    const NETWORK: u32 = 1;
    const TRANSPORT: u32 = 2;
    match field {
        Field::Mark => meta(w, 3, register),
        Field::InputInterface => meta(w, 6, register),
        Field::OutputInterface => meta(w, 7, register),
        Field::SocketUser => meta(w, 10, register),
        Field::NfProto => meta(w, 15, register),
        Field::L4Proto => meta(w, 16, register),
        Field::SocketTransparent => socket(w, 0, None, register),
        Field::SocketWildcard => socket(w, 2, None, register),
        Field::SocketCgroup { level } => socket(w, 3, Some(level), register),
        Field::Ip4Source => payload(w, NETWORK, 12, 4, register),
        Field::Ip4Destination => payload(w, NETWORK, 16, 4, register),
        Field::Ip6Source => payload(w, NETWORK, 8, 16, register),
        Field::Ip6Destination => payload(w, NETWORK, 24, 16, register),
        Field::TcpSource | Field::TransportSource => payload(w, TRANSPORT, 0, 2, register),
        Field::TcpDestination | Field::UdpDestination | Field::TransportDestination => {
            payload(w, TRANSPORT, 2, 2, register)
        }
        Field::TcpFlags => payload(w, TRANSPORT, 13, 1, register),
        Field::CtState => ct_load(w, 0, register),
        Field::CtDirection => ct_load(w, 1, register),
        Field::CtMark => ct_load(w, CT_MARK, register),
        Field::DestinationType => expression(w, "fib", |w| {
            w.u32_be(1, register);
            w.u32_be(2, 3); // NFT_FIB_RESULT_ADDRTYPE
            w.u32_be(3, 2); // NFTA_FIB_F_DADDR
        }),
    }
}

const META_MARK: u32 = 3;
const CT_MARK: u32 = 3;
const CT_EVENTMASK: u32 = 18;

fn meta(w: &mut AttributeWriter<'_>, key: u32, register: u32) {
    expression(w, "meta", |w| {
        w.u32_be(1, register);
        w.u32_be(2, key);
    });
}

fn socket(w: &mut AttributeWriter<'_>, key: u32, level: Option<u32>, register: u32) {
    expression(w, "socket", |w| {
        w.u32_be(1, key);
        w.u32_be(2, register);
        if let Some(level) = level {
            w.u32_be(3, level);
        }
    });
}

fn payload(w: &mut AttributeWriter<'_>, base: u32, offset: u32, length: u32, register: u32) {
    expression(w, "payload", |w| {
        w.u32_be(1, register);
        w.u32_be(2, base);
        w.u32_be(3, offset);
        w.u32_be(4, length);
    });
}

fn ct_load(w: &mut AttributeWriter<'_>, key: u32, register: u32) {
    expression(w, "ct", |w| {
        w.u32_be(1, register);
        w.u32_be(2, key);
    });
}

/// Sets the packet mark from a register.
pub(super) fn meta_mark_store(w: &mut AttributeWriter<'_>, register: u32) {
    expression(w, "meta", |w| {
        w.u32_be(2, META_MARK);
        w.u32_be(3, register);
    });
}

/// Sets the connection's mark from a register.
pub(super) fn ct_mark_store(w: &mut AttributeWriter<'_>, register: u32) {
    ct_store(w, CT_MARK, register);
}

/// Sets the connection's event mask from a register.
pub(super) fn ct_events_store(w: &mut AttributeWriter<'_>, register: u32) {
    ct_store(w, CT_EVENTMASK, register);
}

fn ct_store(w: &mut AttributeWriter<'_>, key: u32, register: u32) {
    expression(w, "ct", |w| {
        w.u32_be(2, key);
        w.u32_be(4, register);
    });
}

/// Compares a register with bytes; unequal (or equal) ends the rule.
pub(super) fn compare(w: &mut AttributeWriter<'_>, register: u32, how: Compare, bytes: &[u8]) {
    expression(w, "cmp", |w| {
        w.u32_be(1, register);
        w.u32_be(2, how as u32);
        w.nested(3, |w| w.bytes(1, bytes));
    });
}

/// `register = (register & mask) ^ xor`; both have the length of what is in the register.
pub(super) fn bitwise(w: &mut AttributeWriter<'_>, register: u32, mask: &[u8], xor: &[u8]) {
    expression(w, "bitwise", |w| {
        w.u32_be(1, register);
        w.u32_be(2, register);
        w.u32_be(3, u32::try_from(mask.len()).unwrap_or(u32::MAX));
        w.nested(4, |w| w.bytes(1, mask));
        w.nested(5, |w| w.bytes(1, xor));
    });
}

/// Loads bytes into a register.
pub(super) fn immediate(w: &mut AttributeWriter<'_>, register: u32, bytes: &[u8]) {
    expression(w, "immediate", |w| {
        w.u32_be(1, register);
        w.nested(2, |w| w.bytes(1, bytes));
    });
}

/// Loads a value into a register.
pub(super) fn immediate_value(w: &mut AttributeWriter<'_>, register: u32, value: Value) {
    immediate(w, register, &value.to_bytes());
}

/// Ends the rule with a verdict.
pub(super) fn verdict(w: &mut AttributeWriter<'_>, verdict: &Verdict) {
    expression(w, "immediate", |w| {
        w.u32_be(1, REGISTER_VERDICT);
        w.nested(2, |w| verdict_data(w, verdict));
    });
}

/// A verdict as data (`NFTA_DATA_VERDICT`).
pub(super) fn verdict_data(w: &mut AttributeWriter<'_>, verdict: &Verdict) {
    let (code, chain) = match verdict {
        Verdict::Drop => (0, None),
        Verdict::Accept => (1, None),
        Verdict::Jump(chain) => (-3, Some(chain)),
        Verdict::Goto(chain) => (-4, Some(chain)),
        Verdict::Return => (-5, None),
    };
    w.nested(2, |w| {
        w.bytes(1, &i32::to_be_bytes(code));
        if let Some(chain) = chain {
            w.text(2, chain);
        }
    });
}

/// What a look-up gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    /// Nothing: not found ends the rule.
    Contains,
    /// Nothing: found ends the rule.
    ContainsNot,
    /// The map's data, into this register; not found ends the rule.
    Data(u32),
    /// The map's verdict.
    Verdict,
}

/// Looks the words from `register` on up in a set or map.
pub(super) fn lookup(w: &mut AttributeWriter<'_>, register: u32, set: &str, gives: Lookup) {
    expression(w, "lookup", |w| {
        w.text(1, set);
        w.u32_be(2, register);
        match gives {
            Lookup::Contains => {}
            Lookup::ContainsNot => w.u32_be(5, 1),
            Lookup::Data(to) => w.u32_be(3, to),
            Lookup::Verdict => w.u32_be(3, REGISTER_VERDICT),
        }
    });
}

/// Redirects to the local port in a register.
pub(super) fn redirect(w: &mut AttributeWriter<'_>, port: u32) {
    const NF_NAT_RANGE_PROTO_SPECIFIED: u32 = 2;
    expression(w, "redir", |w| {
        w.u32_be(1, port);
        w.u32_be(3, NF_NAT_RANGE_PROTO_SPECIFIED);
    });
}

/// Rewrites the destination to the address and port in registers.
pub(super) fn dnat(w: &mut AttributeWriter<'_>, nfproto: u8, address: u32, port: u32) {
    expression(w, "nat", |w| {
        w.u32_be(1, 1); // NFT_NAT_DNAT
        w.u32_be(2, nfproto.into());
        w.u32_be(3, address);
        w.u32_be(5, port);
    });
}

/// Gives the packet to the transparent socket on the port in a register.
pub(super) fn tproxy(w: &mut AttributeWriter<'_>, nfproto: u8, port: u32) {
    expression(w, "tproxy", |w| {
        w.u32_be(1, nfproto.into());
        w.u32_be(3, port);
    });
}

/// An expression without attributes: `masq`, `notrack`, `counter`.
pub(super) fn bare(w: &mut AttributeWriter<'_>, name: &str) {
    expression(w, name, |_| {});
}

/// Hands the packet to a queue. By the target of xtables (`xt_NFQ_info_v3`): every kernel that has NFQUEUE has that one.
pub(super) fn queue(w: &mut AttributeWriter<'_>, number: u16, bypass: bool) {
    const REVISION: u32 = 3;
    let words = [number, 1, u16::from(bypass), 0];
    expression(w, "target", |w| {
        w.text(1, "NFQUEUE");
        w.u32_be(2, REVISION);
        w.bytes(3, &words.map(u16::to_ne_bytes).concat());
    });
}

/// Adds the connection to a flow table.
pub(super) fn flow_add(w: &mut AttributeWriter<'_>, flowtable: &str) {
    expression(w, "flow_offload", |w| w.text(1, flowtable));
}

/// Answers with a TCP reset.
pub(super) fn reject_with_reset(w: &mut AttributeWriter<'_>) {
    expression(w, "reject", |w| w.u32_be(1, 1)); // NFT_REJECT_TCP_RST
}
