//! A server of the test's own: answers what a closure says, and remembers what it was asked.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What it was asked.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The request line.
    pub line: String,
    /// Field lines, as they came.
    pub fields: Vec<String>,
    /// Content, out of its framing.
    pub content: Vec<u8>,
}

impl Request {
    /// The value of a field.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find_map(|line| {
            let (other, value) = line.split_once(':')?;
            other.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The path asked for.
    pub(crate) fn path(&self) -> &str {
        self.line.split(' ').nth(1).unwrap_or_default()
    }
}

/// What it does with a request.
pub(crate) enum Act {
    /// Sends this and keeps the connection.
    Send(Vec<u8>),
    /// Sends this and closes.
    SendAndClose(Vec<u8>),
    /// Sends this, waits until the receiver hears of it (or its sender is gone), and resets the connection.
    SendAndReset(Vec<u8>, Mutex<Receiver<()>>),
}

/// An origin server that answers as the test says.
pub(crate) struct Origin {
    /// Where it listens.
    pub address: SocketAddr,
    asked: Arc<Mutex<Vec<Request>>>,
    connections: Arc<Mutex<usize>>,
}

impl Origin {
    /// Starts a server; its threads end with their connections.
    pub(crate) fn start(act: impl Fn(&Request) -> Act + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (asked, connections) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(0)));
        let (act, seen, count) = (Arc::new(act), asked.clone(), connections.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                *count.lock().unwrap() += 1;
                let (act, seen) = (act.clone(), seen.clone());
                std::thread::spawn(move || serve(stream, &*act, &seen));
            }
        });
        Self { address, asked, connections }
    }

    /// What it was asked so far.
    pub(crate) fn asked(&self) -> Vec<Request> {
        self.asked.lock().unwrap().clone()
    }

    /// How many connections it has accepted.
    pub(crate) fn connections(&self) -> usize {
        *self.connections.lock().unwrap()
    }

    /// A URL at this server.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

/// What an origin does.
pub(crate) type Acting = dyn Fn(&Request) -> Act + Send + Sync;

fn serve(stream: TcpStream, act: &Acting, seen: &Mutex<Vec<Request>>) {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let own = stream.try_clone().unwrap();
    if answer(stream, act, seen) {
        rustix::net::sockopt::set_socket_linger(&own, Some(Duration::ZERO)).unwrap();
    }
}

/// Answers the requests of one connection; whether it is to be reset.
pub(crate) fn answer<S: Read + Write>(stream: S, act: &Acting, seen: &Mutex<Vec<Request>>) -> bool {
    let mut reader = BufReader::new(stream);
    while let Some(request) = read(&mut reader) {
        seen.lock().unwrap().push(request.clone());
        match act(&request) {
            Act::Send(bytes) => {
                if reader.get_mut().write_all(&bytes).and_then(|()| reader.get_mut().flush()).is_err() {
                    return false;
                }
            }
            Act::SendAndReset(bytes, heard) => {
                let _ = reader.get_mut().write_all(&bytes).and_then(|()| reader.get_mut().flush());
                let _ = heard.lock().unwrap().recv_timeout(Duration::from_secs(60));
                return true;
            }
            Act::SendAndClose(bytes) => {
                let _ = reader.get_mut().write_all(&bytes).and_then(|()| reader.get_mut().flush());
                return false;
            }
        }
    }
    false
}

fn line<S: Read>(reader: &mut BufReader<S>) -> Option<String> {
    let mut text = String::new();
    match reader.read_line(&mut text) {
        Ok(n) if n > 0 => Some(text.trim_end_matches("\r\n").to_owned()),
        _ => None,
    }
}

fn read<S: Read + Write>(reader: &mut BufReader<S>) -> Option<Request> {
    let mut request = Request { line: line(reader)?, fields: Vec::new(), content: Vec::new() };
    loop {
        match line(reader)? {
            end if end.is_empty() => break,
            field => request.fields.push(field),
        }
    }
    if request.field("expect").is_some() {
        reader.get_mut().write_all(b"HTTP/1.1 100 Continue\r\n\r\n").ok()?;
    }
    if let Some(length) = request.field("content-length") {
        request.content = vec![0; length.parse().ok()?];
        reader.read_exact(&mut request.content).ok()?;
    } else if request.field("transfer-encoding").is_some() {
        loop {
            let size = usize::from_str_radix(&line(reader)?, 16).ok()?;
            if size == 0 {
                while !line(reader)?.is_empty() {}
                break;
            }
            let mut chunk = vec![0; size];
            reader.read_exact(&mut chunk).ok()?;
            request.content.append(&mut chunk);
            line(reader)?;
        }
    }
    Some(request)
}

/// A 200 with these field lines (separated by `|`) and this content.
pub(crate) fn ok(fields: &str, content: &str) -> Act {
    status("200 OK", fields, content)
}

/// A response with this status.
pub(crate) fn status(status: &str, fields: &str, content: &str) -> Act {
    let lines: String = fields
        .split('|')
        .filter(|line| !line.is_empty())
        .map(|line| format!("{}\r\n", line.trim()))
        .collect();
    let length = content.len();
    Act::Send(format!("HTTP/1.1 {status}\r\n{lines}Content-Length: {length}\r\n\r\n{content}").into_bytes())
}
