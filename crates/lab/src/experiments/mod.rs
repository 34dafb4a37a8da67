//! The tables and figures of the seeds, one module each.

pub mod relay;
