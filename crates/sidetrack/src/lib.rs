//! Sidetrack as a program: configuration, sockets, tasks and the one binary.
#![forbid(unsafe_code)]

pub mod admin;
pub mod agreement;
pub mod app;
pub mod capture;
pub mod carry;
pub mod cleanup;
pub mod cli;
pub mod config;
pub mod datagram;
pub mod dns;
pub mod doctor;
pub mod engine;
pub mod explain;
pub mod export;
pub mod function;
pub mod http;
pub mod intercept;
pub mod keeper;
pub mod live;
pub mod log;
pub mod metrics;
pub mod overlay;
pub mod plan;
pub mod process;
pub mod reactor;
pub mod record;
pub mod reload;
pub mod session;
pub mod shunt;
mod started;
pub mod steer;
#[cfg(feature = "wasm")]
pub mod wasm;
pub mod worker;

pub use sidetrack_common::{rights, tls, wire};
#[cfg(feature = "control")]
pub use sidetrack_control as control;
