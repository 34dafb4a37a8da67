//! Conntrack time-outs that a table brings along (nft's `ct timeout` objects).

use std::fmt;

use super::{Family, Table};
use crate::netlink::{AttributeWriter, Requests, flag};
use sidetrack_core::flow::Protocol;

/// A last state of a TCP connection (`enum tcp_conntrack`): both sides have said that they have nothing more to say. Or a state
/// of UDP (`enum ctattr_timeout_udp`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum LastState {
    /// UDP: there was no answer yet.
    Unreplied = 1,
    /// UDP: there was one.
    Replied = 2,
    /// The second FIN is not acknowledged yet.
    LastAck = 6,
    /// It is.
    TimeWait = 7,
    /// The connection was reset.
    Close = 8,
}

impl fmt::Display for LastState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unreplied => "unreplied",
            Self::Replied => "replied",
            Self::LastAck => "last_ack",
            Self::TimeWait => "time_wait",
            Self::Close => "close",
        })
    }
}

/// For how long conntrack remembers connections of a protocol in some states; in all others as the system's settings say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeoutPolicy {
    /// The name that [`super::Statement::SetCtTimeout`] refers to.
    pub name: String,
    /// The protocol.
    pub protocol: Protocol,
    /// Seconds for each state, in the order of the states.
    pub seconds: Vec<(LastState, u32)>,
}

/// Adds the message that creates the object in its table.
pub(super) fn new_object(requests: &mut Requests, table: &Table, policy: &TimeoutPolicy) {
    const OBJECT_CT_TIMEOUT: u32 = 7;
    let (family, name) = (table.family, &policy.name);
    let asked = format!("create ct timeout {name} in the nftables table {family} {}", table.name);
    let kind = super::compile::Kind::NewObject.number();
    requests.push(asked, kind, flag::CREATE, &super::compile::header(family.number()), |w| {
        w.text(1, &table.name);
        w.text(2, name);
        w.u32_be(3, OBJECT_CT_TIMEOUT);
        w.nested(4, |w| {
            w.u16_be(1, family.number().into());
            w.u8(2, policy.protocol.number());
            w.nested(3, |w| {
                policy.seconds.iter().for_each(|(state, seconds)| w.u32_be(*state as u16, *seconds))
            });
        });
    });
}

/// Refers to such an object, in a rule.
pub(super) fn refer(w: &mut AttributeWriter<'_>, name: &str) {
    const OBJECT_CT_TIMEOUT: u32 = 7;
    super::expression::expression(w, "objref", |w| {
        w.u32_be(1, OBJECT_CT_TIMEOUT);
        w.text(2, name);
    });
}

/// The object as `nft list table` prints it.
pub(super) fn write(f: &mut fmt::Formatter<'_>, family: Family, policy: &TimeoutPolicy) -> fmt::Result {
    let seconds: Vec<_> = policy.seconds.iter().map(|(state, s)| format!("{state} : {s}")).collect();
    writeln!(f, "\tct timeout {} {{", policy.name)?;
    writeln!(f, "\t\tprotocol {}", policy.protocol.as_str())?;
    writeln!(f, "\t\tl3proto {family}")?;
    writeln!(f, "\t\tpolicy = {{ {} }}", seconds.join(", "))?;
    writeln!(f, "\t}}")
}
