//! Data-flow agreements: what is wrong with a file, what one plans, and what becomes of flows that run.

#[path = "../node/mod.rs"]
mod node;

mod file;
mod flows;
mod history;
