//! The decisions of Sidetrack. Bytes, packets and time go in; decisions and bytes come out.
//!
//! No I/O, no clock, no threads, no global state, no `unsafe`. A protocol core is a plain struct with the shape
//! `new(config, now)`, `handle(now, input)`, `poll() -> Option<Output>`, `deadline() -> Option<Instant>`: a
//! convention, not a trait. See `ARCHITECTURE.md`.
#![forbid(unsafe_code)]
// Tests cast what they know.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss
    )
)]

pub mod agreement;
pub mod area;
pub mod association;
pub mod capture;
pub mod carrier;
pub mod chain;
pub mod deadlines;
mod decimal;
pub mod engine;
pub mod filter;
pub mod flow;
pub mod function;
pub mod hold;
pub mod host_name;
pub mod http;
pub mod icmp;
pub mod invitation;
pub mod ipfix;
pub mod jail;
pub mod ldap;
pub mod limit;
pub mod names;
pub mod net;
pub mod openflow;
pub mod overlay;
pub mod placeholder;
pub mod placement;
pub mod policy;
pub mod pressure;
pub mod proxy_protocol;
pub mod secret;
pub mod shunt;
pub mod socks;
pub mod splice;
pub mod time;
pub mod tunnel;
pub mod upgrade;
pub mod wire;
