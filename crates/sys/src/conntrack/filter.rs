//! Which events reach a socket: a classic BPF program that the kernel runs before it queues a message. Events of other
//! programs' connections then neither fill the socket nor wake its reader.

use super::attribute;
use crate::nft::MarkBits;
use libc::sock_filter;

/// Which events reach the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Only {
    /// All.
    Everything,
    /// Those of connections with these bits in their mark.
    Marked(MarkBits),
    /// Those of connections that have a mark, or had one until this event.
    AnyMark,
}

impl Only {
    /// The program; none where every event is wanted.
    pub(super) fn program(self) -> Option<[sock_filter; 10]> {
        match self {
            Self::Everything => None,
            Self::Marked(bits) => Some(marked(bits)),
            Self::AnyMark => Some(marked(MarkBits { value: 0, mask: 0 })),
        }
    }
}

/// Where attributes begin in a message: behind `nlmsghdr` and `nfgenmsg`.
const ATTRIBUTES: u32 = 16 + 4;

/// `SKF_AD_OFF + SKF_AD_NLATTR`: the place of the first attribute of kind X from A on, 0 if there is none. A constant for
/// netlink in every kernel since 2.6.26.
const FIND_ATTRIBUTE: u32 = (-0x1000_i32 + 12).cast_unsigned();

/// Accepts a message whose `CTA_MARK` has these bits. The kernel sends one message a datagram, and leaves the attribute out
/// where the mark is 0 and has not just become so.
const fn marked(bits: MarkBits) -> [sock_filter; 10] {
    const fn step(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
        sock_filter { code: code as u16, jt, jf, k }
    }
    use libc::{
        BPF_ABS, BPF_ALU, BPF_AND, BPF_IMM, BPF_IND, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_LDX, BPF_MISC,
        BPF_RET, BPF_TAX, BPF_W,
    };
    [
        step(BPF_LD | BPF_IMM, ATTRIBUTES, 0, 0),
        step(BPF_LDX | BPF_IMM, attribute::MARK as u32, 0, 0),
        step(BPF_LD | BPF_W | BPF_ABS, FIND_ATTRIBUTE, 0, 0),
        // No mark: to the end, which refuses.
        step(BPF_JMP | BPF_JEQ | BPF_K, 0, 5, 0),
        step(BPF_MISC | BPF_TAX, 0, 0, 0),
        // The value is behind the attribute's header, in network byte order, as BPF reads words.
        step(BPF_LD | BPF_W | BPF_IND, 4, 0, 0),
        step(BPF_ALU | BPF_AND | BPF_K, bits.mask, 0, 0),
        step(BPF_JMP | BPF_JEQ | BPF_K, bits.value & bits.mask, 0, 1),
        step(BPF_RET | BPF_K, u32::MAX, 0, 0),
        step(BPF_RET | BPF_K, 0, 0, 0),
    ]
}
