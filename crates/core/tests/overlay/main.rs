//! The overlay's cores: frames, sessions, and whole networks of nodes under everything that can go wrong.
//!
//! `SIDETRACK_SEEDS=10000 cargo test --release -p sidetrack-core --test overlay` runs this number of networks and sessions
//! instead of the few hundred of an ordinary run; `SIDETRACK_SEED=N` runs the one that failed.

mod clocks;
mod features;
mod frames;
mod groups;
mod network;
mod paced;
mod paths;
mod random;
mod realtime;
mod redundancy;
mod reliable;
mod session;
mod spread;
mod tolerant;
mod world;
