//! The shunt on real traffic: a firewall between two hosts, netfilter's rules, conntrack, and the fast path of BPF.

#[path = "../node/mod.rs"]
mod node;

mod firewall;

mod agree;
mod binary;
mod blocked;
mod cycles;
mod ends;
mod faults;
mod flows;
mod flowtable;
mod following;
mod frames;
mod nfshunt;
mod openflow;
mod own_rules;
mod rules;
mod scarce;
mod shared_switch;
mod switch;
mod two_switches;
mod upgrade;
