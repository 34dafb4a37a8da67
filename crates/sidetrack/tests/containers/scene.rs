//! A node with functions in containers, a server behind it, and clients of it.

use crate::engine::engine;
use crate::node::Up;
use sidetrack_testkit::LIMIT;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};

/// The test program as a function.
pub(crate) const OWN: &str = "image = 'localhost/function:1'\ncommand = ['/program', '--exact', 'function::serve', '--ignored', \
                       '--nocapture', '--test-threads=1']\nprobe_interval_ms = 100\n";

/// The test program as the function `name`, with further keys.
pub(crate) fn own(name: &str, keys: &str) -> String {
    format!("[function.{name}]\nkind = 'container'\n{OWN}{keys}\n")
}

/// A server that says what it is sent, until the client ends; then one line of its own.
pub(crate) struct Echo {
    /// Where it listens.
    pub address: SocketAddr,
}

impl Echo {
    /// On the loopback.
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                std::thread::spawn(move || echo(stream));
            }
        });
        Self { address }
    }
}

fn echo(mut stream: TcpStream) {
    let mut bytes = vec![0; 65_536];
    while let Ok(n) = stream.read(&mut bytes) {
        if n == 0 {
            let _ = stream.write_all(b"bye\n");
            return;
        }
        if stream.write_all(&bytes[..n]).is_err() {
            return;
        }
    }
}

/// Configuration: the engine, a listener `in` in front of the server, one rule with this chain.
pub(crate) fn tables(server: SocketAddr, rule: &str, functions: &str) -> String {
    format!(
        "[containers]\nengine = '{}'\n[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '{server}'\n\
         [[rule]]\nname = 'led'\ncarrier = 'direct'\n{rule}\n{functions}",
        engine().socket().display()
    )
}

/// A node, ready.
pub(crate) fn up(server: SocketAddr, rule: &str, functions: &str) -> Up {
    Up::start("default = 'deny'\n", &tables(server, rule, functions))
}

/// A connection to the node's listener.
pub(crate) fn connect(up: &Up) -> TcpStream {
    let stream = TcpStream::connect(up.addresses("in")[0]).expect("the listener");
    for set in [TcpStream::set_read_timeout, TcpStream::set_write_timeout] {
        set(&stream, Some(LIMIT)).expect("a socket");
    }
    stream
}

/// Sends all of it, ends, and reads to the end.
pub(crate) fn exchange(mut stream: TcpStream, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut reader = stream.try_clone()?;
    std::thread::scope(|scope| {
        let read = scope.spawn(move || {
            let mut all = Vec::new();
            reader.read_to_end(&mut all).map(|_| all)
        });
        stream.write_all(bytes)?;
        stream.shutdown(Shutdown::Write)?;
        read.join().expect("no panic")
    })
}

/// Sends one line and reads one line.
pub(crate) fn ask(stream: &mut TcpStream, line: &str) -> std::io::Result<String> {
    stream.write_all(line.as_bytes())?;
    let mut answer = Vec::new();
    let mut byte = [0];
    while !answer.ends_with(b"\n") {
        if stream.read(&mut byte)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        answer.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
