//! What the proxy and the control plane both need: files with the places of their errors, TLS between our own nodes, the rights
//! that a process gives up, messages between our processes, what systemd is told, and HTTP over unix sockets: the clients of a node and of a
//! container engine.
#![forbid(unsafe_code)]

pub mod admin;
pub mod agreement;
pub mod containers;
pub mod exchange;
pub mod file;
pub mod history;
pub mod rights;
pub mod systemd;
pub mod tls;
pub mod wire;
