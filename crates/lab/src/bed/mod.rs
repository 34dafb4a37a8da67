//! A test bed: three real hosts that are reached by ssh, described by a TOML file.
//!
//! ```text
//!   this machine ── ssh ──┬── client ─── proxy ─── server      addresses of the data plane stand in the file
//!                         ├── proxy        └── client ─── server
//!                         └── server
//! ```
//! The lab copies its programs into a new folder on each host. Everything that it starts there ends when the standard
//! input of its ssh session ends: also when the lab is interrupted or killed, or the connection breaks.

mod file;
mod host;
mod jobs;

pub use file::{HostSpec, Role, TestBed};
pub use host::{Host, Remote};
pub use jobs::{Distance, Job, PATH, main};
