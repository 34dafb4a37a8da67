//! Writes record lines directly from the compact form of ended flows. The fields are those of
//! [`FlowRecord`](super::FlowRecord), without such a value in between.

use super::{Reached, Timestamp, carrier, chain};
use crate::live::{Batch, Decided, Past, Texts};
use sidetrack_core::flow::{EndReason, Intercept, Protocol};
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, UNIX_EPOCH};

/// Bytes of `2026-11-21T23:07:19.`: the same for all times within one second.
const SECOND: usize = 20;

/// Writes lines. Keeps the text of values that the next flow probably shares.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// The second whose text is kept, counted from 1970, and the text.
    second: Option<u64>,
    text: Vec<u8>,
    /// The fields from `rule` to `intercept` for each kind of flow in the present batch.
    kinds: Vec<Vec<u8>>,
}

/// Appends a number in decimal.
fn number(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// Appends a duration in seconds, exact to the microsecond: `1.5`, `0.041237`, `2.0`.
fn seconds(out: &mut Vec<u8>, time: Duration) {
    number(out, time.as_secs());
    let mut micros = time.subsec_micros();
    let mut digits = [b'0'; 7];
    digits[0] = b'.';
    for digit in digits[1..].iter_mut().rev() {
        *digit = b'0' + (micros % 10) as u8;
        micros /= 10;
    }
    let length = digits.iter().rposition(|digit| *digit != b'0').unwrap_or(0) + 1;
    out.extend_from_slice(&digits[..length.max(2)]);
}

fn optional_seconds(out: &mut Vec<u8>, time: Option<Duration>) {
    match time {
        Some(time) => seconds(out, time),
        None => null(out),
    }
}

fn null(out: &mut Vec<u8>) {
    out.extend_from_slice(b"null");
}

/// Appends text as a JSON string.
fn string(out: &mut Vec<u8>, text: &str) {
    // Without an early exit, so that the compiler can vectorise it.
    let is_special = |byte: u8| byte < b' ' || byte == b'"' || byte == b'\\';
    if text.bytes().fold(false, |found, byte| found | is_special(byte)) {
        // Writing to a Vec cannot fail.
        let _ = serde_json::to_writer(out, text);
        return;
    }
    out.push(b'"');
    out.extend_from_slice(text.as_bytes());
    out.push(b'"');
}

fn optional(out: &mut Vec<u8>, text: Option<&str>) {
    match text {
        Some(text) => string(out, text),
        None => null(out),
    }
}

fn ip(out: &mut Vec<u8>, ip: IpAddr) {
    match ip {
        IpAddr::V4(ip) => {
            for (at, octet) in ip.octets().into_iter().enumerate() {
                if at > 0 {
                    out.push(b'.');
                }
                number(out, octet.into());
            }
        }
        // Writing to a Vec cannot fail.
        IpAddr::V6(ip) => {
            let _ = write!(out, "[{ip}]");
        }
    }
}

fn port(out: &mut Vec<u8>, port: u16) {
    out.push(b':');
    number(out, port.into());
}

fn address(out: &mut Vec<u8>, address: SocketAddr) {
    match address {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => {
            let _ = write!(out, "{v6}");
        }
        _ => {
            ip(out, address.ip());
            port(out, address.port());
        }
    }
}

/// Appends the fields that all flows of one kind share.
fn kind(out: &mut Vec<u8>, decided: Option<&Decided>) {
    out.extend_from_slice(b",\"rule\":");
    optional(out, decided.and_then(Decided::rule).map(|rule| &**rule));
    out.extend_from_slice(b",\"chain\":[");
    for (at, name) in decided.map(chain).unwrap_or_default().iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        string(out, name);
    }
    out.extend_from_slice(b"],\"carrier\":");
    optional(out, decided.and_then(carrier).as_deref());
    out.extend_from_slice(b",\"listener\":");
    optional(out, decided.map(|decided| &*decided.flow.listener));
    out.extend_from_slice(b",\"intercept\":");
    optional(out, decided.map(|decided| decided.flow.intercept.as_str()));
}

/// Appends the fields from `client` to `user`.
fn parties(out: &mut Vec<u8>, texts: &Texts<'_>) {
    out.extend_from_slice(b",\"client\":");
    match texts.client {
        Some(client) => {
            out.push(b'"');
            address(out, client);
            out.push(b'"');
        }
        None => null(out),
    }
    out.extend_from_slice(b",\"orig_dst\":");
    match (texts.dst_ip, texts.dst_name) {
        (Some(host), _) => {
            let mut to = SocketAddr::new(host, texts.dst_port);
            if let SocketAddr::V6(v6) = &mut to {
                v6.set_scope_id(texts.dst_zone);
            }
            out.push(b'"');
            address(out, to);
            out.push(b'"');
        }
        (None, Some(name)) => {
            string(out, name);
            // Put the port before the closing quote.
            out.pop();
            port(out, texts.dst_port);
            out.push(b'"');
        }
        (None, None) => null(out),
    }
    out.extend_from_slice(b",\"host\":");
    optional(out, texts.host.or(texts.dst_name));
    out.extend_from_slice(b",\"process\":");
    match texts.process {
        Some((Some(name), ..)) => string(out, name),
        Some((None, Some(pid), _)) => labelled(out, b"pid:", pid),
        _ => null(out),
    }
    out.extend_from_slice(b",\"user\":");
    match (texts.user, texts.process) {
        (Some(user), _) => string(out, user),
        (None, Some((_, _, Some(uid)))) => labelled(out, b"uid:", uid),
        _ => null(out),
    }
}

fn labelled(out: &mut Vec<u8>, label: &[u8], value: u32) {
    out.push(b'"');
    out.extend_from_slice(label);
    number(out, value.into());
    out.push(b'"');
}

impl Lines {
    /// Appends the lines of a batch.
    pub(super) fn write(&mut self, batch: &Batch, out: &mut Vec<u8>) {
        self.kinds.clear();
        for decided in batch.kinds() {
            let mut text = Vec::new();
            kind(&mut text, Some(decided));
            self.kinds.push(text);
        }
        for past in batch.iter() {
            let decided = past.kind().and_then(|at| batch.kinds().get(at));
            self.line(&past, decided.map(|decided| &**decided), out);
        }
    }

    fn line(&mut self, past: &Past<'_>, decided: Option<&Decided>, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"ts\":\"");
        self.moment(past.since_us(), out);
        out.extend_from_slice(b"\",\"flow\":");
        number(out, past.id());
        match past.kind().and_then(|at| self.kinds.get(at)) {
            Some(text) => out.extend_from_slice(text),
            None => kind(out, None),
        }
        let texts = past.texts();
        parties(out, &texts);
        let (up, down) = past.bytes();
        out.extend_from_slice(b",\"bytes_up\":");
        number(out, up);
        out.extend_from_slice(b",\"bytes_down\":");
        number(out, down);
        out.extend_from_slice(b",\"connect_seconds\":");
        optional_seconds(out, past.connect_time());
        out.extend_from_slice(b",\"first_byte_seconds\":");
        optional_seconds(out, past.first_byte_time());
        out.extend_from_slice(b",\"duration_seconds\":");
        seconds(out, past.duration());
        let by_kernel = decided.is_some_and(|decided| decided.flow.intercept == Intercept::Kernel);
        let shunted: &[u8] = if past.was_shunted() || by_kernel { b"true" } else { b"false" };
        out.extend_from_slice(b",\"shunted\":");
        out.extend_from_slice(shunted);
        ending(out, past.reason(), &texts);
        out.extend_from_slice(b",\"states\":");
        match past.states() {
            Some(states) => {
                let reached: Vec<Reached> = states.iter().map(Reached::from).collect();
                // Writing to a Vec cannot fail.
                let _ = serde_json::to_writer(&mut *out, &reached);
            }
            None => null(out),
        }
        out.extend_from_slice(b",\"mptcp\":[");
        for (at, side) in past.multipath().names().enumerate() {
            if at > 0 {
                out.push(b',');
            }
            string(out, side);
        }
        out.push(b']');
        packets(out, decided.map(|decided| decided.flow.protocol), past.packets());
        out.extend_from_slice(b",\"held_seconds\":");
        optional_seconds(out, past.held_wait());
        out.extend_from_slice(b"}\n");
    }

    /// Appends a time: RFC 3339, UTC, milliseconds.
    fn moment(&mut self, since_us: u64, out: &mut Vec<u8>) {
        let (second, millis) = (since_us / 1_000_000, since_us / 1000 % 1000);
        if self.second != Some(second) {
            self.text.clear();
            let moment = Timestamp::from(UNIX_EPOCH + Duration::from_micros(since_us));
            let _ = write!(self.text, "{moment}");
            self.second = Some(second);
        }
        out.extend_from_slice(self.text.get(..SECOND).unwrap_or_default());
        let digit = |place: u64| b'0' + (millis / place % 10) as u8;
        out.extend_from_slice(&[digit(100), digit(10), digit(1), b'Z']);
    }
}

/// Appends the transport protocol, and the numbers of datagrams.
fn packets(out: &mut Vec<u8>, protocol: Option<Protocol>, (up, down): (u64, u64)) {
    out.extend_from_slice(b",\"protocol\":");
    optional(out, protocol.map(Protocol::as_str));
    for (name, packets) in [(&b",\"packets_up\":"[..], up), (b",\"packets_down\":", down)] {
        out.extend_from_slice(name);
        match protocol {
            Some(Protocol::Udp) => number(out, packets),
            _ => null(out),
        }
    }
}

/// Appends the reason of the end, and the fields about it.
fn ending(out: &mut Vec<u8>, reason: EndReason, texts: &Texts<'_>) {
    out.extend_from_slice(b",\"reason\":\"");
    out.extend_from_slice(reason.as_str().as_bytes());
    out.extend_from_slice(b"\",\"detail\":");
    optional(out, texts.detail);
    out.extend_from_slice(b",\"path\":");
    optional(out, texts.taken.map(|taken| taken.to_string()).as_deref());
    out.extend_from_slice(b",\"agreement\":");
    optional(out, texts.agreement);
    out.extend_from_slice(b",\"tls_name\":");
    optional(out, texts.tls_name);
}
