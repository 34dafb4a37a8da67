//! Rights and what is left behind: the main process has next to none, the keeper refuses what is not a request, and however
//! the processes end, the system is as it was, or blocked where that was asked for.

#[path = "../node/mod.rs"]
mod node;

mod agreement;
mod crash;
mod files;
mod interference;
mod keeper;
mod rights;
mod user;
