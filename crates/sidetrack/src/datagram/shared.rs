//! The UDP port that all clients of a `socks` listener share: what comes to it before an association has a socket of its own.

use super::association::BATCH;
use super::{RECEIVE_BUFFER, ROUNDS};
use crate::intercept::{Catches, Listening, Passed, SharedPort};
use crate::reactor::UdpSocket;
use crate::worker::Worker;
use sidetrack_core::association::Dropped;
use sidetrack_sys::sockopt;
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::watch;

/// Gives datagrams to associations until `stop` becomes true or its sender is dropped.
pub async fn share(
    worker: Arc<Worker>,
    listening: Arc<Listening>,
    socket: std::net::UdpSocket,
    mut stop: watch::Receiver<bool>,
) {
    let Catches::Socks(socks) = &listening.catches else { return };
    let Some(port) = &socks.shared else { return };
    let _ = sockopt::set_receive_buffer(&socket, RECEIVE_BUFFER);
    let socket = match UdpSocket::new(socket) {
        Ok(socket) => socket,
        Err(error) => {
            tracing::error!(listener = %listening.name, %error, "cannot watch the listener");
            return;
        }
    };
    loop {
        tokio::select! {
            biased;
            changed = stop.changed() => match changed {
                Ok(()) if !*stop.borrow() => {}
                _ => break,
            },
            () = poll_fn(|cx| receive(cx, &worker, &socket, port)) => {}
        }
    }
    // Close the socket before `stop` is dropped, as for other listeners of UDP.
    drop(socket);
    drop(stop);
}

/// Passes on what has come. Ready: there may be more.
fn receive(cx: &mut Context<'_>, worker: &Worker, socket: &UdpSocket, port: &SharedPort) -> Poll<()> {
    let mut batch = BATCH.take().unwrap_or_default();
    let mut dropped = [0; Dropped::ALL.len()];
    let mut has_received = false;
    for _ in 0..ROUNDS {
        match socket.receive(&mut batch) {
            Ok(count) => {
                for at in 0..count {
                    let Some(from) = batch.addresses(at).0.map(sockopt::canonical) else { continue };
                    for datagram in batch.datagrams(at) {
                        match port.pass(from, datagram) {
                            Passed::Yes => {}
                            Passed::Full => dropped[Dropped::Waiting as usize] += 1,
                            Passed::Stranger => dropped[Dropped::Stranger as usize] += 1,
                        }
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            // An ICMP error: nothing is sent from this socket that could be meant.
            Err(_) => {}
        }
        has_received = true;
    }
    BATCH.set(Some(batch));
    if dropped.iter().any(|dropped| *dropped > 0) {
        worker.drop_datagrams(dropped);
    }
    if socket.poll_read_ready(cx).is_ready() || has_received { Poll::Ready(()) } else { Poll::Pending }
}
