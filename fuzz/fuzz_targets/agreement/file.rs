//! Of the modules for files in TOML those that agreements are read with.

#[path = "../../../crates/common/src/file/at.rs"]
mod at;
#[path = "../../../crates/common/src/file/parse.rs"]
mod parse;
#[path = "../../../crates/common/src/file/lines.rs"]
mod lines;
#[path = "../../../crates/common/src/file/problem.rs"]
mod problem;
#[path = "../../../crates/common/src/file/redact.rs"]
mod redact;

pub(crate) use at::{At, List};
pub(crate) use parse::parse;
pub(crate) use problem::nearest;
pub(crate) use problem::{ConfigError, Problem};
