//! A server that tells whom it sees, and clients.

use sidetrack_testkit::LIMIT;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;

/// Bytes that every socket has room for.
const AT_ONCE: usize = 16_384;

/// A server: first a line with its client's address as it sees it, then everything back that comes. It serves in the
/// network namespace of the thread that makes it.
pub(crate) struct Server {
    /// Where it listens.
    pub address: SocketAddr,
    listener: TcpListener,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// On a port of the kernel's choice.
    pub(crate) fn start(ip: &str) -> Self {
        Self::bound(super::at(ip, 0))
    }

    /// At this address.
    pub(crate) fn bound(at: SocketAddr) -> Self {
        let listener = TcpListener::bind(at).expect("bound");
        let address = listener.local_addr().expect("an address");
        let accepting = listener.try_clone().expect("a copy");
        let serve_all = move || {
            while let Ok((stream, peer)) = accepting.accept() {
                std::thread::spawn(move || serve(stream, peer));
            }
        };
        Self { address, listener, thread: Some(std::thread::spawn(serve_all)) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Wakes the thread that waits in accept(2).
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(mut stream: TcpStream, peer: SocketAddr) {
    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    let greeted = writeln!(stream, "{peer}");
    let echoed = greeted.and_then(|()| io::copy(&mut stream.try_clone()?, &mut stream));
    // A client that vanishes is part of some tests.
    let _ = echoed.and_then(|_| stream.shutdown(Shutdown::Write));
}

/// A connection to such a server.
pub(crate) struct Client {
    /// The client's own address.
    pub address: SocketAddr,
    /// The address the server sees.
    pub seen_as: SocketAddr,
    stream: BufReader<TcpStream>,
}

impl Client {
    /// Connects and reads the greeting.
    pub(crate) fn connect(to: SocketAddr) -> io::Result<Self> {
        Self::over(TcpStream::connect_timeout(&to, LIMIT)?)
    }

    /// Reads the greeting on a connection that stands.
    pub(crate) fn over(stream: TcpStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(LIMIT))?;
        let address = stream.local_addr()?;
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let seen_as = line.trim().parse().map_err(io::Error::other)?;
        Ok(Self { address, seen_as, stream })
    }

    /// Sends and expects the same back.
    pub(crate) fn echo(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() <= AT_ONCE {
            self.stream.get_mut().write_all(bytes)?;
            return self.expect(bytes);
        }
        // If both ends only wrote, both would wait for ever once all buffers on the way are full.
        let mut sender = self.stream.get_ref().try_clone()?;
        std::thread::scope(|scope| {
            let sent = scope.spawn(move || sender.write_all(bytes));
            let received = self.expect(bytes);
            sent.join().expect("the sender")?;
            received
        })
    }

    /// Expects these bytes.
    pub(crate) fn expect(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut back = vec![0; bytes.len()];
        self.stream.read_exact(&mut back)?;
        if back == bytes { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// The connection itself.
    pub(crate) fn into_stream(self) -> TcpStream {
        self.stream.into_inner()
    }

    /// Closes in order and waits for the other end's close.
    pub(crate) fn close(mut self) -> io::Result<()> {
        self.stream.get_mut().shutdown(Shutdown::Write)?;
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest)?;
        if rest.is_empty() { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// Bytes from the server so far and still to come: the greeting and what was echoed.
    pub(crate) fn greeting_bytes(&self) -> u64 {
        self.seen_as.to_string().len() as u64 + 1
    }
}

/// Connects, exchanges `word`, closes in order: the client's address, the address the server saw, and the bytes of the
/// server.
pub(crate) fn visit(to: SocketAddr, word: &[u8]) -> (SocketAddr, SocketAddr, u64) {
    let mut client = Client::connect(to).unwrap_or_else(|error| panic!("connect to {to}: {error}"));
    client.echo(word).unwrap_or_else(|error| panic!("echo by {to}: {error}"));
    let seen = (client.address, client.seen_as, client.greeting_bytes() + word.len() as u64);
    client.close().unwrap_or_else(|error| panic!("close by {to}: {error}"));
    seen
}
