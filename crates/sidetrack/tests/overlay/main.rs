//! The overlay by the real binary on real traffic: an application at node `a`, a server at node `c`, relays between.

#[path = "../gate/dns.rs"]
mod dns;
#[path = "../node/mod.rs"]
mod node;
#[path = "../support/schema.rs"]
#[allow(dead_code, reason = "every test binary uses a part")]
mod schema;

mod associations;
mod deliveries;
mod duplicate;
mod endings;
mod faults;
mod groups;
mod handed_over;
mod http3;
mod legs;
mod liar;
mod nearest;
mod paced;
mod packets;
mod paths;
mod realtime;
mod scene;
mod silence;
mod streams;
mod together;
mod tolerant;
mod tools;
mod transfers;
