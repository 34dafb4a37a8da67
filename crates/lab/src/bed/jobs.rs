//! What the lab's own program does on the hosts of a test bed, beside generating load: it answers requests, measures
//! distances, and describes the machine.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::statistics;

/// The path of every answer, with 130 bytes as in the lab's own networks.
pub const PATH: &str = "/small";
const ANSWER_BYTES: usize = 130;
/// A longer request is not answered.
const REQUEST_LIMIT_BYTES: usize = 8192;
/// Time limit for one connect.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Pause after a failed connect.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A job on a host of a test bed.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Job {
    /// Answers requests for HTTP; prints `ready` when it listens.
    Origin {
        /// Port, on all addresses.
        #[arg(long)]
        port: u16,
    },
    /// Waits until a port accepts, and prints how long connects take, as JSON.
    Distance {
        /// The address.
        to: SocketAddr,
        /// How many connects.
        #[arg(long, default_value_t = 15)]
        count: u32,
        /// Time limit until the first one succeeds, in seconds.
        #[arg(long, default_value_t = 60)]
        within: u64,
    },
    /// Describes the machine, as JSON.
    About,
}

/// The result of `distance`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Distance {
    /// The median time of a connect, which is one round trip, in milliseconds.
    pub round_trip_ms: f64,
}

/// Does a job.
///
/// # Errors
/// The port is in use, or the far side does not answer in time.
pub fn main(job: &Job) -> Result<()> {
    match job {
        Job::Origin { port } => origin(*port),
        Job::Distance { to, count, within } => {
            let distance = distance(*to, *count, Duration::from_secs(*within))?;
            println!("{}", serde_json::to_string(&distance)?);
            Ok(())
        }
        Job::About => {
            println!("{}", serde_json::to_string(&Machine::probe())?);
            Ok(())
        }
    }
}

fn origin(port: u16) -> Result<()> {
    // The first one takes IPv4 too; a host without IPv6 has only the second.
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
        .with_context(|| format!("cannot listen on port {port}; first_port of the test bed names another"))?;
    println!("ready");
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        // A connection that fails concerns only its client.
        let _ = std::thread::Builder::new().stack_size(64 << 10).spawn(move || drop(answer(stream)));
    }
    Ok(())
}

/// Answers the requests of one connection.
fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let body = "x".repeat(ANSWER_BYTES);
    let (mut held, mut buffer) = (Vec::new(), [0u8; 2048]);
    loop {
        let read = stream.read(&mut buffer)?;
        if read == 0 {
            return Ok(());
        }
        held.extend_from_slice(buffer.get(..read).unwrap_or_default());
        while let Some(end) = held.windows(4).position(|four| four == b"\r\n\r\n") {
            let head: Vec<u8> = held.drain(..end + 4).collect();
            let is_last = head.to_ascii_lowercase().windows(17).any(|part| part == b"connection: close");
            let word = if is_last { "close" } else { "keep-alive" };
            let answer = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {ANSWER_BYTES}\r\nConnection: {word}\r\n\r\n{body}"
            );
            stream.write_all(answer.as_bytes())?;
            if is_last {
                return Ok(());
            }
        }
        if held.len() > REQUEST_LIMIT_BYTES {
            return Ok(());
        }
    }
}

fn distance(to: SocketAddr, count: u32, within: Duration) -> Result<Distance> {
    let since = Instant::now();
    while let Err(error) = TcpStream::connect_timeout(&to, CONNECT_WITHIN) {
        if since.elapsed() > within {
            return Err(error).with_context(|| format!("{to} does not accept within {within:?}"));
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    let mut times = Vec::new();
    for _ in 0..count.max(1) {
        let began = Instant::now();
        TcpStream::connect_timeout(&to, CONNECT_WITHIN).with_context(|| format!("cannot connect to {to}"))?;
        times.push(began.elapsed().as_secs_f64() * 1000.0);
    }
    let round_trip_ms = statistics::median(&times).context("at least one connect was made")?;
    Ok(Distance { round_trip_ms })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_in_any_pieces_are_answered_until_one_is_the_last() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let server = std::thread::spawn(move || answer(listener.accept().expect("a client").0));
        let mut client = TcpStream::connect(address).expect("connected");
        client.write_all(b"GET /small HTTP/1.1\r\nHost: a\r\n\r\nGET /sm").expect("sent");
        client.write_all(b"all HTTP/1.1\r\nConnection: close\r\n\r\n").expect("sent");
        let mut text = String::new();
        client.read_to_string(&mut text).expect("answers");
        assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 2, "{text}");
        assert!(text.ends_with(&"x".repeat(ANSWER_BYTES)), "{text}");
        server.join().expect("no panic").expect("served");
        assert!(distance(address, 1, Duration::ZERO).is_err(), "it listens no longer");
    }
}
