//! Steering by the real binary on real traffic across network namespaces: who is caught, who is not, where it goes, whom
//! the server sees, what is recorded.

#[allow(dead_code, reason = "the tests of the gate count what is asked")]
#[path = "../gate/dns.rs"]
mod name_server;
#[path = "../node/mod.rs"]
mod node;

mod crowd;
mod datagrams;
mod drain;
mod forged;
mod forwarded;
mod kernel_datagrams;
mod kernel_path;
mod local;
mod local_datagrams;
mod names;
mod programs;
mod run;
mod stun;
