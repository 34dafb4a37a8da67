//! A client of the test's own: bytes out, one response in.

use sidetrack_testkit::LIMIT;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

/// A response.
#[derive(Clone, Debug)]
pub(crate) struct Response {
    /// Its status.
    pub status: u16,
    /// The whole head, without its last empty line.
    pub head: String,
    /// Content, out of its framing.
    pub content: Vec<u8>,
}

impl Response {
    /// The value of a field.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (other, value) = line.split_once(':')?;
            other.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The content as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.content).into_owned()
    }

    /// Whether it came out of the cache.
    pub(crate) fn is_hit(&self) -> bool {
        self.field("cache-status").is_some_and(|status| status.contains("; hit"))
    }
}

/// What is read and written.
pub(crate) trait Both: Read + Write + Send {}

impl<S: Read + Write + Send> Both for S {}

/// A connection to a proxy.
pub(crate) struct Client {
    reader: BufReader<Box<dyn Both>>,
}

impl Client {
    /// Connects.
    pub(crate) fn new(to: SocketAddr) -> Self {
        Self::over(TcpStream::connect_timeout(&to, LIMIT).unwrap())
    }

    /// Over a connection that is made.
    pub(crate) fn over(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Self { reader: BufReader::new(Box::new(stream)) }
    }

    /// Puts something between this and the connection; nothing may be under way.
    pub(crate) fn wrapped(self, wrap: impl FnOnce(Box<dyn Both>) -> Box<dyn Both>) -> Self {
        Self { reader: BufReader::new(wrap(self.reader.into_inner())) }
    }

    /// Sends bytes as they are.
    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.reader.get_mut().write_all(bytes.as_ref()).unwrap();
        self.reader.get_mut().flush().unwrap();
    }

    /// Reads as many bytes as they are; `None` if the connection ends before.
    pub(crate) fn read(&mut self, count: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; count];
        self.reader.read_exact(&mut bytes).ok().map(|()| bytes)
    }

    /// Asks for a URL with more field lines (separated by `|`).
    pub(crate) fn ask(&mut self, method: &str, url: &str, fields: &str) -> Response {
        let host = url.split('/').nth(2).unwrap_or_default();
        let lines: String = fields
            .split('|')
            .filter(|line| !line.is_empty())
            .map(|line| format!("{}\r\n", line.trim()))
            .collect();
        self.send(format!("{method} {url} HTTP/1.1\r\nHost: {host}\r\n{lines}\r\n"));
        self.response(method == "HEAD")
    }

    /// GET; `None` if the connection ended before the answer was complete.
    pub(crate) fn try_ask(&mut self, url: &str) -> Option<Response> {
        let host = url.split('/').nth(2).unwrap_or_default();
        let text = format!("GET {url} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        self.reader.get_mut().write_all(text.as_bytes()).and_then(|()| self.reader.get_mut().flush()).ok()?;
        self.try_response(false)
    }

    /// GET.
    pub(crate) fn fetch(&mut self, url: &str) -> Response {
        self.ask("GET", url, "")
    }

    /// One response head, with its interim ones passed over; the test fails if there is none.
    pub(crate) fn response(&mut self, is_head: bool) -> Response {
        self.try_response(is_head).expect("a whole response")
    }

    /// As [`Self::response`]; `None` if the connection ended before it was complete.
    pub(crate) fn try_response(&mut self, is_head: bool) -> Option<Response> {
        loop {
            let response = self.one(is_head)?;
            if response.status >= 200 || response.status == 101 {
                return Some(response);
            }
        }
    }

    /// One response, be it interim.
    pub(crate) fn one(&mut self, is_head: bool) -> Option<Response> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if self.reader.read_line(&mut head).ok()? == 0 {
                return None;
            }
        }
        let status = head.split(' ').nth(1)?.parse().ok()?;
        let mut response = Response { status, head: head.trim_end().to_owned(), content: Vec::new() };
        if is_head || matches!(status, 100..=199 | 204 | 304) {
            return Some(response);
        }
        if response.field("transfer-encoding").is_some() {
            response.content = self.chunks()?;
        } else if let Some(length) = response.field("content-length") {
            response.content = vec![0; length.parse().ok()?];
            self.reader.read_exact(&mut response.content).ok()?;
        } else {
            self.reader.read_to_end(&mut response.content).ok()?;
        }
        Some(response)
    }

    fn chunks(&mut self) -> Option<Vec<u8>> {
        let mut content = Vec::new();
        loop {
            let mut line = String::new();
            self.reader.read_line(&mut line).ok()?;
            let size = usize::from_str_radix(line.trim_end(), 16).ok()?;
            if size == 0 {
                while line != "\r\n" {
                    line.clear();
                    if self.reader.read_line(&mut line).ok()? == 0 {
                        return None;
                    }
                }
                return Some(content);
            }
            let mut chunk = vec![0; size + 2];
            self.reader.read_exact(&mut chunk).ok()?;
            content.extend_from_slice(&chunk[..size]);
        }
    }

    /// This number of bytes, as they come.
    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.reader.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Whether the proxy has closed the connection, having sent nothing more.
    pub(crate) fn is_closed(&mut self) -> bool {
        matches!(self.reader.read(&mut [0; 1]), Ok(0) | Err(_))
    }
}
