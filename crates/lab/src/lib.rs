//! Networks out of namespaces, and the experiments of the seeds with the peers beside us.
//!
//! Everything here runs on one machine: [`topology`] makes hosts out of network namespaces, [`load`] drives
//! them, [`peers`] starts other people's proxies (and ours) between client and server, and [`experiments`]
//! turn that into tables. All of it ends by itself and leaves nothing behind, also when killed.

pub mod bare;
pub mod capture;
pub mod chart;
pub mod cpu;
pub mod engine;
pub mod experiments;
mod generator;
pub mod launch;
pub mod link;
pub mod load;
pub mod machine;
pub mod output;
pub mod packets;
pub mod peers;
pub mod probe;
pub mod progress;
pub mod scratch;
pub mod service;
pub mod site;
pub mod statistics;
pub mod taker;
pub mod topology;
