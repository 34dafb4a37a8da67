//! Sidetrack runs: configuration, sockets, tasks and the one binary.
#![forbid(unsafe_code)]

pub mod config;
pub mod dns;
pub mod live;
pub mod metrics;
pub mod record;
