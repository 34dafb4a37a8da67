//! Networks made of namespaces, and the experiments of the five documents (docs/seeds.md), with the peers beside
//! Sidetrack.
//!
//! Everything here runs on one machine, except experiments on a test bed ([`bed`]). [`topology`] makes hosts from
//! network namespaces, [`load`] sends traffic, [`peers`] starts other proxies and ours between client and server, and
//! [`experiments`] make tables of the results. Everything ends by itself and leaves nothing behind, also when the lab is killed.

pub mod bare;
pub mod bed;
pub mod capture;
mod certificate;
pub mod chart;
pub mod cpu;
pub mod datagrams;
pub mod engine;
pub mod experiments;
mod generator;
pub mod kit;
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
