//! The tables and figures of the five documents (docs/seeds.md), one module each.

pub mod chain;
pub mod crash;
mod echo;
pub mod engine;
pub mod epi;
pub mod flights;
pub mod http;
pub mod idle;
pub mod links;
pub mod overlay;
pub mod relay;
pub mod shunt;
pub mod soak;
pub mod udp;

/// Returns true if a part is requested; without a request all are.
fn is_wanted(asked: &[String], part: &str) -> bool {
    asked.is_empty() || asked.iter().any(|wanted| wanted == part)
}

/// Returns true if a requested word is a part of the row's name; without a request all rows are.
fn is_named(asked: &[String], name: &str) -> bool {
    asked.is_empty() || asked.iter().any(|piece| name.contains(piece.as_str()))
}
