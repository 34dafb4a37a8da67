//! A client, a proxy with a name server of its own, and a server, each on a host of its own.

use crate::dns::{Answers, NameServer};
use crate::node::{Record, Up};
use sidetrack_testkit::{LIMIT, Line, eventually};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The proxy as the client reaches it: SOCKS and HTTP.
pub(crate) const SOCKS: &str = "10.0.1.254:1080";
pub(crate) const HTTP: &str = "10.0.1.254:3128";

/// Both listeners.
const LISTEN: &str = "[[listen]]\nkind = \"socks\"\naddress = \"10.0.1.254:1080\"\n\
                      [[listen]]\nkind = \"http\"\naddress = \"10.0.1.254:3128\"\n";

/// The three hosts and the program.
pub(crate) struct Scene {
    pub line: Line,
    pub up: Up,
    pub names: NameServer,
}

impl Scene {
    /// With these answers of the name server, and these keys and tables of the configuration.
    pub(crate) fn new(answers: Answers, top: &str, tables: &str) -> Self {
        let line = Line::new();
        let (top, tables) = (top.to_owned(), format!("{LISTEN}{tables}"));
        let (names, up) = line.router.run(move || (NameServer::start(answers), Up::start(&top, &tables)));
        Self { line, up, names }
    }

    /// The client asks by SOCKS5; gives the code of the reply, or none if the connection ended.
    pub(crate) fn socks(&self, to: &str) -> Option<u8> {
        let to = to.to_owned();
        self.line.client.run(move || socks(&to).map(|(code, _)| code))
    }

    /// The client asks for a page, from this address of its own; gives status and body.
    pub(crate) fn get_from(&self, from: &str, url: &str) -> (u16, String) {
        let (from, url): (IpAddr, _) = (from.parse().unwrap(), url.to_owned());
        self.line.client.run(move || {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.bind(&SocketAddr::new(from, 0).into()).unwrap();
            socket.connect(&HTTP.parse::<SocketAddr>().unwrap().into()).unwrap();
            get(socket.into(), &url)
        })
    }

    /// The same from the client's first address.
    pub(crate) fn get(&self, url: &str) -> (u16, String) {
        self.get_from("10.0.1.1", url)
    }

    /// The next record.
    pub(crate) fn record(&mut self) -> Record {
        self.up.record()
    }

    /// Expects that the next flow was denied, and that the record says so.
    pub(crate) fn denied(&mut self, detail: &str) {
        let record = self.record();
        assert_eq!(record.text("reason"), "policy_denied", "{record:?}");
        assert!(record.text("detail").contains(detail), "{detail}: {record:?}");
    }
}

/// Asks by SOCKS5 with what may be a name as a name.
pub(crate) fn socks(to: &str) -> Option<(u8, TcpStream)> {
    let mut stream = TcpStream::connect(SOCKS).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let (host, port) = to.rsplit_once(':').unwrap();
    let mut request = [&[5, 1, 0, 5, 1, 0, 3, u8::try_from(host.len()).unwrap()], host.as_bytes()].concat();
    request.extend(port.parse::<u16>().unwrap().to_be_bytes());
    stream.write_all(&request).unwrap();
    let mut reply = [0; 12];
    stream.read_exact(&mut reply).ok()?;
    Some((reply[3], stream))
}

fn get(mut stream: TcpStream, url: &str) -> (u16, String) {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let host = url.split('/').nth(2).unwrap();
    write!(stream, "GET {url} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

/// A web server that counts its connections. It serves in the network namespace of the thread that makes it.
pub(crate) struct Web {
    connections: Arc<AtomicUsize>,
    listener: TcpListener,
}

impl Web {
    /// On this address; each page says `name`.
    pub(crate) fn start(address: &str, name: &'static str) -> Self {
        Self::serving(address, move |stream| serve(stream, name))
    }

    fn serving(address: &str, serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        let serve = Arc::new(serve);
        let listener = TcpListener::bind(address).unwrap();
        let (accepting, connections) = (listener.try_clone().unwrap(), Arc::<AtomicUsize>::default());
        let count = connections.clone();
        std::thread::spawn(move || {
            while let Ok((stream, _)) = accepting.accept() {
                count.fetch_add(1, Relaxed);
                let serve = serve.clone();
                std::thread::spawn(move || serve(stream));
            }
        });
        Self { connections, listener }
    }

    /// How many connections came so far: all that are made are accepted by then.
    pub(crate) fn connections(&self) -> usize {
        eventually("the queue is empty", || {
            let pending = rustix::event::poll(
                &mut [rustix::event::PollFd::new(&self.listener, rustix::event::PollFlags::IN)],
                Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }),
            );
            pending == Ok(0)
        });
        self.connections.load(Relaxed)
    }
}

/// A SOCKS5 proxy that is told addresses and answers for the servers there: each page says `name`. It counts its connections.
pub(crate) fn socks_web(address: &str, name: &'static str) -> Web {
    Web::serving(address, move |mut stream| {
        let mut request = [0; 10];
        let good = stream.read_exact(&mut request[..3]).is_ok()
            && stream.write_all(&[5, 0]).is_ok()
            && stream.read_exact(&mut request).is_ok()
            && request[3] == 1
            && stream.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).is_ok();
        if good {
            serve(stream, name);
        }
    })
}

impl Drop for Web {
    fn drop(&mut self) {
        // Wakes who waits in accept(2).
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
    }
}

/// Answers every request on a connection that is kept.
fn serve(mut stream: TcpStream, name: &str) {
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(n) => head.extend_from_slice(&buffer[..n]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return,
        }
        if head.ends_with(b"\r\n\r\n") {
            head.clear();
            let page = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{name}", name.len());
            if stream.write_all(page.as_bytes()).is_err() {
                return;
            }
        }
    }
}
