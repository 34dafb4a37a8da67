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

/// Whether a part is to be made: those that are asked for, all if none is.
fn is_wanted(asked: &[String], part: &str) -> bool {
    asked.is_empty() || asked.iter().any(|wanted| wanted == part)
}

/// The same where a piece of a row's name asks for it.
fn is_named(asked: &[String], name: &str) -> bool {
    asked.is_empty() || asked.iter().any(|piece| name.contains(piece.as_str()))
}
