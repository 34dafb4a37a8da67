//! A flow on the wire: two sockets had it, and from now on the kernel translates its packets, so that it costs user space
//! nothing.
//!
//! Nothing stands still for it. Both sockets go on while the kernel begins to pass packets on, and every byte has one who
//! answers for it: what a socket has acknowledged, the other socket sends again until it arrives; what no socket has
//! acknowledged, its sender sends again. It makes no difference which of the two carries a byte, because a byte has the same
//! number on both ways. Once neither socket owes anything, both are closed without a packet.
//!
//! [`sides`] says whether a flow can be there, [`joining::Joining`] leads it there, and [`back()`] says how it comes back. All are
//! pure; `sidetrack_sys::repair` reads the numbers, and `bpf/wire.bpf.c` passes the packets on.

mod back;
mod freezes;
mod joining;
mod note;

pub use back::{Begin, Stands, back, is_quiet, reset_at};
pub use freezes::{FREEZE_BOUNDS, Freezes};
pub use joining::{Joining, Look, Step};
pub use note::{MAGIC as NOTE_MAGIC, NOTE_BYTES, Note, NoteError, VERSION as NOTE_VERSION};

use std::fmt;
use std::net::SocketAddr;

/// Where one of our two sockets stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// Sequence number after the last byte that was written into it.
    pub written: u32,
    /// Bytes of these that its peer has not acknowledged.
    pub unacknowledged: u32,
    /// Sequence number that it expects next. Bytes before it are acknowledged, or will be.
    pub expects: u32,
    /// Bytes before that number that were not read.
    pub unread: u32,
    /// The window that its peer offers, bytes.
    pub window: u32,
    /// Sequence number up to which its peer was told that it may send.
    pub told: u32,
    /// Its time stamps: the monotonic clock in milliseconds plus this.
    pub clock: u32,
}

/// What one of our two sockets and its peer have agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Neither has closed.
    pub established: bool,
    /// Both send time stamps (RFC 7323).
    pub stamps: bool,
    /// Both send selective acknowledgements (RFC 2018).
    pub sack: bool,
    /// Both send congestion marks (RFC 3168).
    pub ecn: bool,
    /// Scale of the windows that the peer sends, 0 to 14.
    pub peer_shift: u8,
    /// Scale of the windows that we send, 0 to 14.
    pub own_shift: u8,
    /// Largest payload with options that the peer accepts on the path known now, bytes.
    pub send_mss_bytes: u32,
    /// Largest payload with options that the peer was told, bytes.
    pub told_mss_bytes: u32,
}

/// What both sides of a flow on the wire have agreed on with us. It is the same on both sides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Time stamps (RFC 7323).
    pub stamps: bool,
    /// Selective acknowledgements (RFC 2018).
    pub sack: bool,
    /// Congestion marks (RFC 3168).
    pub ecn: bool,
}

/// One of our two sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The host that it talks to.
    pub remote: SocketAddr,
    /// The address that this host talks to, as it stands in its packets.
    pub local: SocketAddr,
    /// Index of the interface that leads there; `None`: that host is this one.
    pub egress: Option<u32>,
    /// What was agreed.
    pub agreed: Agreed,
    /// Where it stands.
    pub numbers: Numbers,
}

/// One side of a flow on the wire, as the kernel has to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// The host on this side. All addresses of a flow are of one IP version.
    pub remote: SocketAddr,
    /// The address that this host talks to, as it stands in its packets.
    pub local: SocketAddr,
    /// What is added to its sequence numbers, modulo 2^32.
    pub add: u32,
    /// Sequence number that our socket expects from it next.
    pub expects: u32,
    /// Sequence number of the next byte that is read from our socket: all before it was passed on by user space.
    pub next: u32,
    /// Sequence number that it has acknowledged of ours.
    pub acknowledged: u32,
    /// Sequence number after the last byte that was written to it.
    pub written: u32,
    /// Sequence number up to which the other side may send to it, as either of us has told: what the other was told by us, it
    /// may have under way.
    pub edge: u32,
    /// Index of the interface towards it.
    pub egress: u32,
    /// Largest payload it accepts, TCP options included, bytes.
    pub mss: u16,
    /// Window scale of the windows it sends, 0 to 14.
    pub shift: u8,
    /// Window scale of the windows it is shown, 0 to 14.
    pub shown_shift: u8,
    /// Our time stamps towards it: the monotonic clock in milliseconds plus this.
    pub clock: u32,
    /// What was agreed.
    pub options: Options,
}

/// Why a flow cannot be on the wire. It stays where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// A side has closed, or is about to.
    Closing,
    /// A side is this host: its packets meet no interface.
    ThisHost,
    /// One side speaks IPv4, the other IPv6.
    IpVersions,
    /// One side sends time stamps, selective acknowledgements or congestion marks, and the other does not.
    Options,
    /// A side may send segments that are too large for the other.
    Segments,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closing => "a side has closed",
            Self::ThisHost => "a side is this host: its packets meet no interface",
            Self::IpVersions => "one side speaks IPv4, the other IPv6",
            Self::Options => "the sides have not agreed on the same TCP options",
            Self::Segments => "a side may send segments that are too large for the other",
        })
    }
}

/// What the kernel has to know of both sides (client, server), if nothing is between the sockets: every byte that was read
/// from one is written into the other.
///
/// # Errors
/// Why this flow cannot be on the wire.
pub fn sides(ends: &[End; 2]) -> Result<[Side; 2], Unfit> {
    let [client, server] = ends;
    let (here, there) = (&client.agreed, &server.agreed);
    if !here.established || !there.established {
        return Err(Unfit::Closing);
    }
    if client.egress.is_none() || server.egress.is_none() {
        return Err(Unfit::ThisHost);
    }
    if client.remote.is_ipv4() != server.remote.is_ipv4() {
        return Err(Unfit::IpVersions);
    }
    if (here.stamps, here.sack, here.ecn) != (there.stamps, there.sack, there.ecn) {
        return Err(Unfit::Options);
    }
    if here.told_mss_bytes > there.send_mss_bytes || there.told_mss_bytes > here.send_mss_bytes {
        return Err(Unfit::Segments);
    }
    Ok([side(client, server)?, side(server, client)?])
}

/// What is added to the sequence numbers of a side: the next byte that is read from it is the next one that is written to the
/// other.
const fn add(own: &Numbers, other: &Numbers) -> u32 {
    other.written.wrapping_sub(own.expects.wrapping_sub(own.unread))
}

fn side(own: &End, other: &End) -> Result<Side, Unfit> {
    let (numbers, agreed) = (&own.numbers, &own.agreed);
    let acknowledged = numbers.written.wrapping_sub(numbers.unacknowledged);
    let offered = acknowledged.wrapping_add(numbers.window);
    let told = other.numbers.told.wrapping_add(add(&other.numbers, numbers));
    Ok(Side {
        remote: own.remote,
        local: own.local,
        add: add(numbers, &other.numbers),
        expects: numbers.expects,
        next: numbers.expects.wrapping_sub(numbers.unread),
        acknowledged,
        written: numbers.written,
        edge: if told.wrapping_sub(offered).cast_signed() > 0 { told } else { offered },
        egress: own.egress.ok_or(Unfit::ThisHost)?,
        mss: u16::try_from(agreed.send_mss_bytes).unwrap_or(u16::MAX),
        shift: agreed.peer_shift,
        shown_shift: agreed.own_shift,
        clock: numbers.clock,
        options: Options { stamps: agreed.stamps, sack: agreed.sack, ecn: agreed.ecn },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(remote: &str, local: &str) -> End {
        let agreed = Agreed {
            established: true,
            stamps: true,
            sack: true,
            ecn: false,
            peer_shift: 7,
            own_shift: 10,
            send_mss_bytes: 1460,
            told_mss_bytes: 1460,
        };
        let numbers = Numbers {
            written: 5000,
            unacknowledged: 100,
            expects: 9000,
            unread: 30,
            window: 65_536,
            told: 9100,
            clock: 3,
        };
        End {
            remote: remote.parse().unwrap(),
            local: local.parse().unwrap(),
            egress: Some(2),
            agreed,
            numbers,
        }
    }

    fn ends() -> [End; 2] {
        let mut ends = [end("10.0.1.1:4000", "10.0.1.254:80"), end("10.0.2.1:80", "10.0.2.254:5000")];
        ends[1].numbers = Numbers {
            written: 10,
            unacknowledged: 0,
            expects: 0xffff_fff0,
            unread: 0,
            window: 1000,
            told: 0,
            clock: 9,
        };
        ends[1].egress = Some(3);
        ends
    }

    #[test]
    fn the_next_byte_read_is_the_next_byte_written() {
        let [client, server] = sides(&ends()).unwrap();
        // The client's byte 8970 is read next; the server's socket writes 10 next.
        assert_eq!((client.next, client.add.wrapping_add(client.next)), (8970, 10));
        assert_eq!(server.add.wrapping_add(0xffff_fff0), 5000);
        assert_eq!((client.acknowledged, server.acknowledged), (4900, 10));
        // The client was told to send up to 9100, 130 bytes beyond what was read; the server offers 1000 more than it has.
        assert_eq!((server.edge, client.edge), (1010, 4900 + 65_536));
        let mut told = ends();
        told[0].numbers.told = 20_000;
        assert_eq!(sides(&told).unwrap()[1].edge, 10 + 20_000 - 8970);
        assert_eq!((client.egress, server.egress), (2, 3));
        assert_eq!((client.shift, client.shown_shift, client.clock, server.clock), (7, 10, 3, 9));
        assert_eq!(client.options, Options { stamps: true, sack: true, ecn: false });
    }

    #[test]
    fn each_obstacle_has_its_reason() {
        type Change = fn(&mut [End; 2]);
        let table: [(Change, Unfit); 9] = [
            (|ends| ends[0].agreed.established = false, Unfit::Closing),
            (|ends| ends[1].agreed.established = false, Unfit::Closing),
            (|ends| ends[0].egress = None, Unfit::ThisHost),
            (|ends| ends[1].egress = None, Unfit::ThisHost),
            (|ends| ends[0].remote = "[fd00::1]:1".parse().unwrap(), Unfit::IpVersions),
            (|ends| ends[0].agreed.stamps = false, Unfit::Options),
            (|ends| ends[1].agreed.sack = false, Unfit::Options),
            (|ends| ends[1].agreed.ecn = true, Unfit::Options),
            (|ends| ends[1].agreed.send_mss_bytes = 1459, Unfit::Segments),
        ];
        for (change, expected) in table {
            let mut changed = ends();
            change(&mut changed);
            assert_eq!(sides(&changed), Err(expected));
            assert!(!expected.to_string().is_empty());
        }
        // A smaller limit on both sides is fine, if both were told so.
        let mut small = ends();
        for end in &mut small {
            (end.agreed.send_mss_bytes, end.agreed.told_mss_bytes) = (1000, 1000);
        }
        assert!(sides(&small).is_ok());
    }
}
