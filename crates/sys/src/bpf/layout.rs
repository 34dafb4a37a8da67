//! Sizes, offsets and constants of the C structures that the programs share with us, generated from `bpf/*.layout.c` by
//! `bpf/compile.rs`.

/// The packet engine's.
#[rustfmt::skip]
#[allow(dead_code, reason = "not every constant of C is used by every build")]
pub(super) mod engine {
    include!(concat!(env!("OUT_DIR"), "/engine_layout.rs"));
}

/// The shunt's.
#[rustfmt::skip]
#[allow(dead_code, reason = "not every constant of C is used by every build")]
pub(super) mod shunt {
    include!(concat!(env!("OUT_DIR"), "/shunt_layout.rs"));
}

/// That of flows on the wire.
#[rustfmt::skip]
#[allow(dead_code, reason = "not every constant of C is used by every build")]
pub(super) mod wires {
    include!(concat!(env!("OUT_DIR"), "/wire_layout.rs"));
}

/// Members that Rust writes as one word have to be neighbours.
const _: () = {
    use engine::{cookies, flow_side, handshake};
    assert!(flow_side::FROM == flow_side::TO + 6);
    assert!(flow_side::SHIFT == flow_side::MSS + 2 && flow_side::SHOWN_SHIFT == flow_side::MSS + 3);
    assert!(handshake::STAMPS == handshake::NEEDS + 2 && handshake::SACK == handshake::NEEDS + 3);
    assert!(cookies::MSS6 == cookies::MSS4 + 2 && cookies::SHIFT == cookies::WINDOW + 2);
};
