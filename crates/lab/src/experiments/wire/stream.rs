//! Bytes that look random, by their place in a stream, and both ends of connections that send and check them.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Longest time without a byte: the flow is stuck.
const STUCK: Duration = Duration::from_secs(60);

/// Time between two bytes that ask for a reset.
const ASKS: Duration = Duration::from_millis(200);

/// Bytes of one write.
const PIECE: usize = 20_000;

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

/// How an end closes when it has sent all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closes {
    /// With a FIN, and reads the other end's stream to its FIN.
    InOrder,
    /// It says so when it has the other end's stream, and is reset then.
    IsReset,
    /// With a reset, once the other end has its stream and it has the other's.
    Resets,
}

/// Sends a stream of this length with the first seed, and checks that one of the same length with the second seed arrives.
pub(super) fn exchange(
    stream: TcpStream,
    seeds: [u64; 2],
    bytes: u64,
    closes: Closes,
) -> JoinHandle<io::Result<()>> {
    thread::spawn(move || {
        stream.set_read_timeout(Some(STUCK))?;
        stream.set_write_timeout(Some(STUCK))?;
        let mut to = stream.try_clone()?;
        let sender = thread::spawn(move || {
            let (mut sent, mut piece) = (Stream { seed: seeds[0], at: 0 }, vec![0; PIECE]);
            while sent.at < bytes {
                let length = PIECE.min((bytes - sent.at) as usize);
                sent.fill(&mut piece[..length]);
                to.write_all(&piece[..length])?;
            }
            if closes == Closes::InOrder { to.shutdown(Shutdown::Write) } else { Ok(()) }
        });
        let received = receive(&stream, seeds[1], bytes);
        sender.join().map_err(|_| io::Error::other("the sender has panicked"))??;
        received?;
        let mut stream = stream;
        match closes {
            Closes::InOrder => match stream.read(&mut [0])? {
                0 => Ok(()),
                _ => Err(io::Error::other("bytes after the end")),
            },
            Closes::Resets => {
                stream.read_exact(&mut [0])?;
                sidetrack_sys::sockopt::reset_on_close(&stream)
            }
            Closes::IsReset => is_reset(stream),
        }
    })
}

/// Says that all has arrived, and waits for a reset. A reset may be lost: what is sent after it is answered by another one.
fn is_reset(mut stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(ASKS))?;
    for _ in 0..STUCK.as_millis() / ASKS.as_millis() {
        let broken = stream.write_all(&[0]).and_then(|()| stream.read(&mut [0]).map(drop));
        match broken.map_err(|error| error.kind()) {
            Err(ErrorKind::WouldBlock) => {}
            Err(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => return Ok(()),
            other => return Err(io::Error::other(format!("{other:?} instead of a reset"))),
        }
    }
    Err(io::Error::other("no reset came"))
}

fn receive(mut from: &TcpStream, seed: u64, bytes: u64) -> io::Result<()> {
    let mut expected = Stream { seed, at: 0 };
    let (mut buffer, mut wanted) = (vec![0; 50_000], vec![0; 50_000]);
    while expected.at < bytes {
        let most = buffer.len().min((bytes - expected.at) as usize);
        let length = from.read(&mut buffer[..most])?;
        if length == 0 {
            return Err(io::Error::other(format!("ended after {} bytes", expected.at)));
        }
        expected.fill(&mut wanted[..length]);
        if buffer[..length] != wanted[..length] {
            return Err(io::Error::other(format!("a wrong byte before {}", expected.at)));
        }
    }
    Ok(())
}
