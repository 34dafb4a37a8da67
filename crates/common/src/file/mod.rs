//! Files in TOML that people write: read into values with their places, so that every error names its line.

mod at;
mod lines;
mod parse;
mod problem;
mod redact;
mod schema;

pub use at::{At, List};
pub use parse::{Parsed, parse, parse_all};
pub use problem::{BadConfiguration, ConfigError, Problem, nearest};
