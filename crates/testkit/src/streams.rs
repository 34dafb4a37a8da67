//! Both ends of a busy TCP connection, which check each byte.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Bytes that look random, by their place in the stream.
struct Stream {
    seed: u64,
    at: u64,
}

impl Stream {
    fn fill(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            let word = ((self.at >> 3) ^ self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            *byte = (word >> ((self.at & 7) * 8)) as u8;
            self.at += 1;
        }
    }
}

/// Sends a stream in pieces until `enough` says so of its length, then closes; returns its length.
fn send(mut to: TcpStream, seed: u64, enough: impl Fn(u64) -> bool, pause: Option<Duration>) -> u64 {
    let mut stream = Stream { seed, at: 0 };
    let mut buffer = vec![0; 20_000];
    while !enough(stream.at) {
        stream.fill(&mut buffer);
        to.write_all(&buffer).expect("sent");
        if let Some(pause) = pause {
            std::thread::sleep(pause);
        }
    }
    to.shutdown(Shutdown::Write).expect("closed");
    stream.at
}

/// Reads a stream to its end: each byte is the expected one; returns its length.
fn receive(mut from: TcpStream, seed: u64) -> u64 {
    let mut stream = Stream { seed, at: 0 };
    let (mut buffer, mut expected) = (vec![0; 50_000], vec![0; 50_000]);
    loop {
        let length = from.read(&mut buffer).expect("received");
        if length == 0 {
            return stream.at;
        }
        stream.fill(&mut expected[..length]);
        assert!(buffer[..length] == expected[..length], "a wrong byte before {}", stream.at);
    }
}

/// Serves one end in both directions until `enough` says so and the other end has closed, too. The stream that it sends has the
/// first seed, the one that it expects the second. Returns how many bytes it has sent and received.
///
/// # Panics
/// Panics on a wrong byte, and if the connection breaks.
#[must_use]
pub fn both_ways(
    stream: TcpStream,
    seeds: [u64; 2],
    enough: &Arc<AtomicBool>,
    pause: Option<Duration>,
) -> [u64; 2] {
    let (other, enough) = (stream.try_clone().expect("a copy"), enough.clone());
    let sender = std::thread::spawn(move || send(other, seeds[0], |_| enough.load(Relaxed), pause));
    let received = receive(stream, seeds[1]);
    [sender.join().expect("the sender"), received]
}

/// As [`both_ways`], until it has sent this number of bytes, rounded up to 20,000.
///
/// # Panics
/// As [`both_ways`].
#[must_use]
pub fn exchange(stream: TcpStream, seeds: [u64; 2], bytes: u64) -> [u64; 2] {
    let other = stream.try_clone().expect("a copy");
    let sender = std::thread::spawn(move || send(other, seeds[0], |sent| sent >= bytes, None));
    let received = receive(stream, seeds[1]);
    [sender.join().expect("the sender"), received]
}
