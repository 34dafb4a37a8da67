//! What a process gives up before it reads peers' data: root's user id, capabilities, and files that it does not need.

mod files;
mod run_as;
mod user;

pub use files::{allow, restrict, system};
pub use run_as::RunAs;
pub use user::{DataUser, TO_BECOME, become_or_stay, is_refused};
