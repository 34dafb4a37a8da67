//! Of the configuration's modules those that agreements are read with.

#[path = "../../../crates/sidetrack/src/config/at.rs"]
mod at;
#[path = "../../../crates/sidetrack/src/config/parse.rs"]
mod parse;
#[path = "../../../crates/sidetrack/src/config/lines.rs"]
mod lines;
#[path = "../../../crates/sidetrack/src/config/problem.rs"]
mod problem;
#[path = "../../../crates/sidetrack/src/config/redact.rs"]
mod redact;

pub(crate) use at::{At, List};
pub(crate) use parse::parse;
pub(crate) use problem::nearest;
pub(crate) use problem::{ConfigError, Problem};
