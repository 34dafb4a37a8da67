//! Clients and servers that the test plays itself.

use sidetrack_testkit::LIMIT;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;

/// Connects; reading and writing give up after [`LIMIT`].
pub(crate) fn connect(to: SocketAddr) -> TcpStream {
    patient(TcpStream::connect_timeout(&to, LIMIT).unwrap_or_else(|error| panic!("{to}: {error}")))
}

/// The stream with [`LIMIT`].
pub(crate) fn patient(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(LIMIT)).expect("a socket");
    stream.set_write_timeout(Some(LIMIT)).expect("a socket");
    stream.set_nodelay(true).expect("a socket");
    stream
}

/// Closes with a reset.
pub(crate) fn reset(stream: TcpStream) {
    sidetrack_sys::sockopt::reset_on_close(&stream).expect("a socket");
}

/// Reads to the end, and says how it ended: in order, or with which error.
pub(crate) fn read_all(stream: &mut TcpStream) -> (Vec<u8>, io::Result<()>) {
    let mut bytes = Vec::new();
    let end = stream.read_to_end(&mut bytes).map(drop);
    (bytes, end)
}

/// Fails unless the stream is reset before another byte comes.
pub(crate) fn expect_reset(stream: &mut TcpStream) {
    let (bytes, end) = read_all(stream);
    let kind = end.expect_err("an orderly end where a reset was expected").kind();
    assert_eq!((bytes.len(), kind), (0, io::ErrorKind::ConnectionReset));
}

/// Fails unless a new connection is reset, be it before connect(2) has returned.
pub(crate) fn expect_reset_at(address: SocketAddr) {
    match TcpStream::connect_timeout(&address, LIMIT) {
        Ok(stream) => expect_reset(&mut patient(stream)),
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
    }
}

/// Fails unless the stream ends in order after exactly these bytes.
pub(crate) fn expect_end(stream: &mut TcpStream, expected: &[u8]) {
    let (bytes, end) = read_all(stream);
    end.expect("an orderly end");
    assert_eq!(bytes, expected);
}

/// Fails unless exactly these bytes come next.
pub(crate) fn expect(stream: &mut impl Read, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    stream.read_exact(&mut bytes).unwrap_or_else(|error| panic!("waiting for {expected:?}: {error}"));
    assert_eq!(bytes, expected);
}

/// A listener on loopback whose connections the test accepts itself.
pub(crate) struct Host {
    /// The listener.
    pub listener: TcpListener,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Host {
    /// On 127.0.0.1.
    pub(crate) fn new() -> Self {
        Self::on("127.0.0.1:0")
    }

    /// On this address.
    pub(crate) fn on(address: &str) -> Self {
        let listener = TcpListener::bind(address).expect("a loopback port");
        let address = listener.local_addr().expect("bound");
        Self { listener, address }
    }

    /// The next connection.
    pub(crate) fn accept(&self) -> TcpStream {
        let mut fds = [rustix::event::PollFd::new(&self.listener, rustix::event::PollFlags::IN)];
        let limit = rustix::event::Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut fds, Some(&limit)), Ok(1), "nobody connected");
        patient(self.listener.accept().expect("a connection").0)
    }
}

/// A loopback address at which no process listens as long as this one lives: a listener that is dropped
/// may live on for a moment in a child that another test is starting, and its port may be given to another socket.
pub(crate) fn closed_address() -> SocketAddr {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a loopback port");
    let address = socket.local_addr().expect("bound").as_socket().expect("IPv4");
    std::mem::forget(socket);
    address
}

/// A server with a thread for each connection.
pub(crate) struct Server {
    /// Where it listens.
    pub address: SocketAddr,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves connections on loopback with `serve`.
    pub(crate) fn start(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        Self::start_on(Host::new(), serve)
    }

    /// The same, on this listener.
    pub(crate) fn start_on(host: Host, serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        let (address, stopping) = (host.address, Arc::new(AtomicBool::new(false)));
        let (stop, serve) = (stopping.clone(), Arc::new(serve));
        let thread = std::thread::spawn(move || {
            for stream in host.listener.incoming() {
                if stop.load(Relaxed) {
                    return;
                }
                let (Ok(stream), serve) = (stream, serve.clone()) else { return };
                std::thread::spawn(move || serve(patient(stream)));
            }
        });
        Self { address, stopping, thread: Some(thread) }
    }

    /// Sends everything back and closes when the client has.
    pub(crate) fn echo() -> Self {
        Self::start(echo)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopping.store(true, Relaxed);
        // Wakes the accept.
        if TcpStream::connect(self.address).is_ok()
            && let Some(thread) = self.thread.take()
        {
            thread.join().expect("the accepting thread only accepts");
        }
    }
}

/// Sends everything back until the end.
pub(crate) fn echo(mut stream: TcpStream) {
    let mut back = stream.try_clone().expect("a descriptor");
    // What goes wrong here is what the test is about, and it sees it at the other end.
    let _ = io::copy(&mut stream, &mut back);
    let _ = back.shutdown(std::net::Shutdown::Write);
}

/// Sends bytes and hears the same.
pub(crate) fn expect_echo(stream: &mut TcpStream, bytes: &[u8]) {
    std::thread::scope(|scope| {
        let mut sending = &*stream;
        // More may come back than fits on the path while it is sent.
        scope.spawn(move || sending.write_all(bytes).expect("an open stream"));
        expect(&mut &*stream, bytes);
    });
}
