//! HTTP/1 messages: strict heads, one length, any split.

mod capsules;
mod framing;
mod h3;
mod heads;
mod readers;
mod smuggling;

use sidetrack_core::http::framing::{Decoder, Length, request_length, response_length};
use sidetrack_core::http::message::{MessageError, Method, Request, Response, Scan, Sender};

/// One message of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// A whole request and its content.
    Request(Request, Vec<u8>),
    /// A whole response and its content.
    Response(Response, Vec<u8>),
    /// The stream is broken here; nothing behind has a meaning.
    Broken(MessageError),
}

/// Reads a stream that comes in these pieces, as a connection would: head, body, next head.
pub fn read(pieces: &[&[u8]], sender: Sender) -> Vec<Read> {
    let mut found = Vec::new();
    let mut held = Vec::new();
    let mut scan = Scan::default();
    let mut open: Option<(Read, Decoder)> = None;
    for piece in pieces {
        held.extend_from_slice(piece);
        while let Some(step) = step(&mut held, &mut scan, &mut open, sender) {
            let ends = matches!(step, Read::Broken(_));
            found.push(step);
            if ends {
                return found;
            }
        }
    }
    found
}

fn step(
    held: &mut Vec<u8>,
    scan: &mut Scan,
    open: &mut Option<(Read, Decoder)>,
    sender: Sender,
) -> Option<Read> {
    if open.is_none() {
        let length = match scan.advance(held, sender) {
            Ok(length) => length?,
            Err(error) => return Some(Read::Broken(error)),
        };
        *scan = Scan::default();
        let head: Vec<u8> = held.drain(..length).collect();
        match begin(&head, sender) {
            Ok((message, length)) => *open = Some((message, Decoder::new(length))),
            Err(error) => return Some(Read::Broken(error)),
        }
    }
    let (message, decoder) = open.as_mut()?;
    loop {
        let decoded = match decoder.decode(held) {
            Ok(decoded) => decoded,
            Err(error) => return Some(Read::Broken(error)),
        };
        let (Read::Request(_, content) | Read::Response(_, content)) = message else { return None };
        content.extend_from_slice(decoded.data);
        let consumed = decoded.consumed;
        held.drain(..consumed);
        if decoder.is_done() {
            return open.take().map(|(message, _)| message);
        }
        if consumed == 0 {
            return None;
        }
    }
}

fn begin(head: &[u8], sender: Sender) -> Result<(Read, Length), MessageError> {
    match sender {
        Sender::Client => {
            let request = Request::parse(head)?;
            let length = request_length(&request)?;
            Ok((Read::Request(request, Vec::new()), length))
        }
        Sender::Server => {
            let response = Response::parse(head)?;
            let length = response_length(&Method::Get, &response)?.length;
            Ok((Read::Response(response, Vec::new()), length))
        }
    }
}

/// Reads the stream whole, in two pieces cut at every place, and byte by byte: all must agree.
pub fn read_every_way(stream: &[u8], sender: Sender) -> Vec<Read> {
    let whole = read(&[stream], sender);
    for cut in 1..stream.len() {
        let (first, second) = stream.split_at(cut);
        assert_eq!(
            read(&[first, second], sender),
            whole,
            "cut at {cut} of {:?}",
            String::from_utf8_lossy(stream)
        );
    }
    let bytes: Vec<_> = stream.chunks(1).collect();
    assert_eq!(read(&bytes, sender), whole, "byte by byte");
    whole
}

/// The error that a stream ends with, if it is broken.
pub fn error(stream: &str, sender: Sender) -> Option<MessageError> {
    match read_every_way(stream.as_bytes(), sender).pop() {
        Some(Read::Broken(error)) => Some(error),
        _ => None,
    }
}
