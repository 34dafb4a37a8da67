//! A path for datagrams that loses what it is told to, and whose address towards the far side changes when it is told to.

use crate::random::Random;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// A path for datagrams, with faults that a test sets.
pub(crate) struct Gate {
    /// Where the near side finds the far side.
    pub address: SocketAddr,
    /// Of a hundred datagrams; 100: the path is cut.
    pub loses: Arc<AtomicU32>,
    /// The far side sees datagrams come from another address from now on, as behind a NAT that has forgotten.
    pub moves: Arc<AtomicBool>,
    stopping: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Gate {
    /// A path to this far side.
    pub(crate) fn to(far: SocketAddr) -> Self {
        let inside = socket_at("127.0.0.1:0");
        let address = inside.local_addr().expect("bound");
        let (loses, moves, stopping) = <(Arc<AtomicU32>, Arc<AtomicBool>, Arc<AtomicBool>)>::default();
        let (loss, moving, stop) = (loses.clone(), moves.clone(), stopping.clone());
        let thread = std::thread::spawn(move || {
            let (mut near, mut random, mut outside) = (None, Random::new(7), socket_at("127.0.0.1:0"));
            let mut buffer = [0; 65_536];
            while !stop.load(Relaxed) {
                if moving.swap(false, Relaxed) {
                    outside = socket_at("127.0.0.2:0");
                }
                for (from, to) in [(&inside, &outside), (&outside, &inside)] {
                    for _ in 0..64 {
                        let Ok((n, sender)) = from.recv_from(&mut buffer) else { break };
                        let is_near = std::ptr::eq(from, &inside);
                        if is_near {
                            near = Some(sender);
                        }
                        let Some(receiver) = (if is_near { Some(far) } else { near }) else { continue };
                        if random.below(100) >= loss.load(Relaxed) as usize {
                            // A receiver that is gone is like a lost datagram.
                            let _ = to.send_to(&buffer[..n], receiver);
                        }
                    }
                }
            }
        });
        Self { address, loses, moves, stopping, thread: Some(thread) }
    }
}

fn socket_at(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind(address).expect("a loopback port");
    socket.set_read_timeout(Some(Duration::from_millis(1))).expect("a socket");
    socket
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.stopping.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it only forwards");
        }
    }
}
