//! A client of the proxy that checks each byte of what it fetches.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};

use anyhow::{Context, Result, ensure};

use super::LIMIT;
use super::source::byte_of;
use super::stand::Stand;

/// A client with one connection.
pub(super) struct Browser {
    stream: BufReader<TcpStream>,
    server: (Ipv4Addr, u16),
    length: usize,
    /// Resources that were fetched.
    pub fetched: u64,
    /// Those with a wrong byte, or too few.
    pub wrong: u64,
    /// Requests that were refused.
    pub refused: u64,
    proxy: (Ipv4Addr, u16),
}

impl Browser {
    /// Connects to the proxy. `length`: bytes of each resource.
    ///
    /// # Errors
    /// The proxy does not accept.
    pub(super) fn open(
        stand: &Stand,
        proxy: (Ipv4Addr, u16),
        server: (Ipv4Addr, u16),
        length: usize,
    ) -> Result<Self> {
        let stream = stand.client.enter(|| Ok(TcpStream::connect(proxy)?))?;
        stream.set_read_timeout(Some(LIMIT))?;
        Ok(Self { stream: BufReader::new(stream), server, length, fetched: 0, wrong: 0, refused: 0, proxy })
    }

    /// Fetches a resource, or begins a new connection if that is refused.
    ///
    /// # Errors
    /// The proxy does not accept.
    pub(super) fn fetch_or_again(&mut self, stand: &Stand, number: u64) -> Result<()> {
        if self.fetch(number).is_err() {
            let again = Self::open(stand, self.proxy, self.server, self.length)?;
            self.stream = again.stream;
            self.refused += 1;
        }
        Ok(())
    }

    /// Fetches a resource. Returns the fields of the answer.
    ///
    /// # Errors
    /// The proxy does not answer, or refuses.
    pub(super) fn fetch(&mut self, number: u64) -> Result<String> {
        let server = format!("{}:{}", self.server.0, self.server.1);
        let request = format!("GET http://{server}/{number} HTTP/1.1\r\nHost: {server}\r\n\r\n");
        self.stream.get_mut().write_all(request.as_bytes())?;
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            ensure!(
                self.stream.read_line(&mut head)? > 0,
                "the proxy has closed the connection after {head:?}"
            );
        }
        ensure!(head.split(' ').nth(1) == Some("200"), "the proxy says {head}");
        let head = head.to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        let mut body = vec![0; length.context("the answer has no length")?];
        self.stream.read_exact(&mut body)?;
        let is_whole = body.len() == self.length && body.iter().all(|byte| *byte == byte_of(number));
        self.wrong += u64::from(!is_whole);
        self.fetched += 1;
        Ok(head)
    }
}
