//! Servers of UDP.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often a server looks whether it is dropped.
const LOOK: Duration = Duration::from_millis(5);

/// A server that sends every datagram back, on a thread of its own until it is dropped. The answer to `who` is the sender's
/// address.
#[derive(Debug)]
pub struct Echo {
    /// Its address, with a port that the system chose.
    pub address: SocketAddr,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Echo {
    /// Starts a server at this address of the caller's network.
    ///
    /// # Panics
    /// Panics if the system provides no socket there.
    #[must_use]
    pub fn start(ip: &str) -> Self {
        let socket = UdpSocket::bind((ip, 0)).expect("a socket");
        socket.set_read_timeout(Some(LOOK)).expect("a time-out");
        let (address, stopping) = (socket.local_addr().expect("an address"), Arc::<AtomicBool>::default());
        let stop = stopping.clone();
        let thread = std::thread::spawn(move || {
            let mut buffer = vec![0; 65_536];
            while !stop.load(Relaxed) {
                match socket.recv_from(&mut buffer) {
                    Ok((length, from)) if &buffer[..length] == b"who" => {
                        socket.send_to(from.to_string().as_bytes(), from).expect("sent");
                    }
                    Ok((length, from)) => drop(socket.send_to(&buffer[..length], from)),
                    Err(error) => {
                        assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut));
                    }
                }
            }
        });
        Self { address, stopping, thread: Some(thread) }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stopping.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it only echoes");
        }
    }
}
