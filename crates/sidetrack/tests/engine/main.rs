//! The packet engine on real traffic: kernels on both sides, the real binary between them.

#[path = "../node/mod.rs"]
mod node;

mod site;

mod binding;
mod branching;
mod choosing;
mod coalescing;
mod ends;
mod flood;
mod ldap;
mod loss;
mod offload;
mod plane;
mod profile;
mod settings;
mod states;
mod tools;
mod upgrade;
#[cfg(feature = "wasm")]
mod wasm;
mod workers;
