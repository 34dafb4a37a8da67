//! The tables and figures of the seeds, one module each.

pub mod chain;
pub mod engine;
pub mod epi;
pub mod flights;
pub mod http;
pub mod idle;
pub mod links;
pub mod overlay;
pub mod relay;
pub mod shunt;
