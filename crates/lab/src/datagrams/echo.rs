//! The server: sends each datagram back.

use std::net::{SocketAddr, UdpSocket};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, poll};
use sidetrack_sys::udp::batch::{Batch, Target};

/// Options of `sidetrack-lab echo`.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Options {
    /// The address to listen on.
    pub listen: SocketAddr,
}

/// Answers until the process ends.
///
/// # Errors
/// The address cannot be bound, or the socket fails.
pub fn run(options: &Options) -> Result<()> {
    let socket =
        UdpSocket::bind(options.listen).with_context(|| format!("cannot bind {}", options.listen))?;
    // The parent waits for this line in the log.
    eprintln!("echo at {}", socket.local_addr()?);
    let mut batch = Batch::new();
    loop {
        poll(&mut [PollFd::new(&socket, PollFlags::IN)], None)?;
        // An error is about an earlier answer.
        for at in 0..batch.receive(&socket).unwrap_or(0) {
            let (Some(to), _) = batch.addresses(at) else { continue };
            batch.send(&socket, at..at + 1, Some(&Target { to, from: None }));
        }
    }
}
