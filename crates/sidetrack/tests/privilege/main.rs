//! Rights and what is left behind: the main process has next to none, the keeper refuses what is no request, and however
//! the processes end, the system is as it was, or blocked where that was asked for.

#[path = "../../../sys/tests/support/mod.rs"]
mod hosts;
#[path = "../node/mod.rs"]
mod node;

mod agreement;
mod crash;
mod files;
mod interference;
mod keeper;
mod rights;
mod user;
