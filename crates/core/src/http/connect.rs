//! The client side of HTTP CONNECT (RFC 9110 Sec. 9.3.6): a tunnel through a proxy; and of CONNECT-UDP over HTTP/1.1 (RFC 9298
//! Sec. 3.2): a tunnel for datagrams, opened by an upgrade.
//!
//! The client writes once (the request), the proxy answers (a response head), and then the tunnel carries bytes. The
//! machine is strict about the end of the handshake, and lenient about what proxies put into it. It skips interim
//! responses, accepts any 2xx, and ignores Content-Length and Transfer-Encoding of a 2xx. CONNECT-UDP is accepted by 101
//! alone, with the protocol in Upgrade (RFC 9298 Sec. 3.3).

use super::udp;
use crate::carrier::Credentials;
use crate::flow::{Destination, EndReason, Host};
use crate::hold::Answer;
use crate::time::Instant;
use data_encoding::BASE64;
use std::collections::VecDeque;
use std::time::Duration;

/// Most bytes of all response heads together, interim ones included.
pub const MAX_HEAD: usize = 16 * 1024;

/// Most header fields of one response head.
pub const MAX_FIELDS: usize = 128;

/// Most interim (1xx) responses before the final one.
pub const MAX_INTERIM: usize = 8;

/// Most bytes of a quotation from the proxy in a detail.
const MAX_QUOTE: usize = 120;

/// What the tunnel carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bytes, by CONNECT.
    Bytes,
    /// Datagrams in capsules ([`super::capsule`]), by CONNECT-UDP.
    Datagrams,
}

impl Kind {
    /// Returns the word for details.
    const fn word(self) -> &'static str {
        match self {
            Self::Bytes => "CONNECT",
            Self::Datagrams => "CONNECT-UDP",
        }
    }
}

/// The configuration of a request for a tunnel.
#[derive(Clone, Debug)]
pub struct Config {
    /// What the tunnel carries.
    pub kind: Kind,
    /// The proxy. CONNECT-UDP names it in Host.
    pub proxy: Destination,
    /// The destination of the tunnel. Give the name if it is known: the proxy then resolves it.
    pub destination: Destination,
    /// Credentials, sent as Basic (RFC 7617) with the request, without waiting for a 407.
    pub credentials: Option<Credentials>,
    /// Data sent in the same write, right behind the request, before the proxy has agreed (optimistic). Empty to
    /// wait. The data is lost if the proxy refuses, and some proxies drop it, so ask the user first.
    pub initial_data: Vec<u8>,
    /// How long the proxy may take for its answer. This includes the time in which the proxy itself connects.
    pub timeout: Duration,
}

/// An event of the connection to the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input<'a> {
    /// These bytes arrived. Any split of the stream gives the same result.
    Bytes(&'a [u8]),
    /// The proxy closed its side.
    End,
    /// The clock reached [`Client::deadline`].
    Tick,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Write this to the proxy, in one write.
    Send(Vec<u8>),
    /// The tunnel is open. Do not pass more bytes to the machine.
    Connected {
        /// The first bytes of the destination, which arrived behind the answer.
        leftover: Vec<u8>,
    },
    /// The tunnel failed: close the connection.
    Failed {
        /// The reason, for the record.
        reason: EndReason,
        /// The reason in words: the status, and the proxy's text.
        detail: String,
    },
}

/// The state machine of one CONNECT handshake.
#[derive(Debug)]
pub struct Client {
    kind: Kind,
    received: Vec<u8>,
    /// `None` once the handshake is over.
    deadline: Option<Instant>,
    timeout: Duration,
    outputs: VecDeque<Output>,
    told: Option<Answer>,
}

impl Client {
    /// Starts the handshake: the first output is the request, or a failure if HTTP cannot express it.
    pub fn new(config: Config, now: Instant) -> Self {
        let mut client = Self {
            kind: config.kind,
            received: Vec::new(),
            deadline: Some(now + config.timeout),
            timeout: config.timeout,
            outputs: VecDeque::new(),
            told: None,
        };
        match request(&config) {
            Ok(bytes) => client.outputs.push_back(Output::Send(bytes)),
            Err((reason, detail)) => client.fail(reason, detail),
        }
        client
    }

    /// Handles one event. After [`Output::Connected`] or [`Output::Failed`] events have no effect.
    pub fn handle(&mut self, now: Instant, input: Input<'_>) {
        let Some(deadline) = self.deadline else { return };
        match input {
            Input::Bytes(bytes) => {
                self.received.extend_from_slice(bytes);
                self.advance();
            }
            Input::End => self.fail(
                EndReason::HopFailed,
                format!("the proxy closed the connection before it answered {}", self.kind.word()),
            ),
            Input::Tick if now >= deadline => {
                let (word, limit) = (self.kind.word(), self.timeout.as_millis());
                let detail = format!("the proxy did not answer {word} within {limit} ms");
                self.fail(EndReason::ConnectTimeout, detail);
            }
            Input::Tick => {}
        }
    }

    /// Returns the next output. `None` if there is none until the next event.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns what the application would have been told, if the proxy answered with another status than 2xx.
    pub const fn told(&self) -> Option<Answer> {
        self.told
    }

    /// Returns when to call [`Self::handle`] with [`Input::Tick`]. `None` once the handshake is over.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Reads the complete response heads, always from the start. Interim ones are few. They stay in `received`, so
    /// that they count towards [`MAX_HEAD`].
    fn advance(&mut self) {
        let mut start = 0;
        for _ in 0..=MAX_INTERIM {
            let end = self.received.len().min(MAX_HEAD);
            match read_response(self.kind, self.received.get(start..end).unwrap_or_default()) {
                Response::Partial if end == MAX_HEAD => {
                    return self.broken("its answer is longer than 16 KiB");
                }
                Response::Partial => return,
                Response::Broken(what) => return self.broken(what),
                Response::Interim { length } => start += length,
                Response::Open { length } => {
                    let leftover = self.received.split_off(start + length);
                    return self.finish(Output::Connected { leftover });
                }
                Response::Refused { reason, detail, told } => {
                    self.told = told;
                    return self.fail(reason, detail);
                }
            }
        }
        self.broken("it sends interim responses without end");
    }

    fn broken(&mut self, what: &str) {
        let word = self.kind.word();
        self.fail(EndReason::HopFailed, format!("the proxy did not answer {word} as HTTP/1: {what}"));
    }

    fn fail(&mut self, reason: EndReason, detail: String) {
        self.finish(Output::Failed { reason, detail });
    }

    fn finish(&mut self, output: Output) {
        self.deadline = None;
        self.received = Vec::new();
        self.outputs.push_back(output);
    }
}

/// Builds the request, with the initial data behind it. Fails if HTTP cannot express the destination or the
/// credentials.
fn request(config: &Config) -> Result<Vec<u8>, (EndReason, String)> {
    let target = &config.destination;
    let mut request = match config.kind {
        Kind::Bytes => connect(target)?,
        Kind::Datagrams => connect_udp(&config.proxy, target)?,
    };
    if let Some(Credentials { user, password }) = &config.credentials {
        // RFC 7617 Sec. 2: the first colon ends the user name.
        if user.contains(':') {
            let detail = "a user name with a colon cannot be sent to an HTTP proxy (RFC 7617)".to_owned();
            return Err((EndReason::AuthFailed, detail));
        }
        let token = BASE64.encode(format!("{user}:{password}").as_bytes());
        request.extend_from_slice(format!("Proxy-Authorization: Basic {token}\r\n").as_bytes());
    }
    request.extend_from_slice(b"\r\n");
    request.extend_from_slice(&config.initial_data);
    Ok(request)
}

/// Builds the head of CONNECT without its last line.
fn connect(target: &Destination) -> Result<Vec<u8>, (EndReason, String)> {
    if let Host::Name(name) = &target.host
        && !name
            .as_str()
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
    {
        let detail = format!("'{name}' is not a DNS name in ASCII, so HTTP CONNECT cannot request it");
        return Err((EndReason::BadRequest, detail));
    }
    Ok(format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n").into_bytes())
}

/// Builds the head of CONNECT-UDP without its last line (RFC 9298 Sec. 3.2).
fn connect_udp(proxy: &Destination, target: &Destination) -> Result<Vec<u8>, (EndReason, String)> {
    let path = udp::path(target).ok_or_else(|| {
        let detail = format!("'{target}' cannot be written in the path of a CONNECT-UDP request");
        (EndReason::BadRequest, detail)
    })?;
    let (word, (capsules, yes)) = (udp::PROTOCOL, udp::CAPSULES);
    let head = format!(
        "GET {path} HTTP/1.1\r\nHost: {proxy}\r\nConnection: Upgrade\r\nUpgrade: {word}\r\n{capsules}: {yes}\r\n"
    );
    Ok(head.into_bytes())
}

/// One response head.
enum Response {
    Partial,
    Broken(&'static str),
    /// 1xx: the final response follows.
    Interim {
        length: usize,
    },
    /// 2xx, or 101 for datagrams: bytes of the tunnel follow.
    Open {
        length: usize,
    },
    Refused {
        reason: EndReason,
        detail: String,
        told: Option<Answer>,
    },
}

fn read_response(kind: Kind, bytes: &[u8]) -> Response {
    // Detect a SOCKS or TLS server at its first byte. Otherwise the client would wait until the time-out.
    if bytes.iter().zip(b"HTTP/1.").any(|(byte, wanted)| byte != wanted) {
        return Response::Broken("it does not speak HTTP/1");
    }
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut response = httparse::Response::new(&mut fields);
    let length = match response.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Response::Partial,
        Err(httparse::Error::TooManyHeaders) => {
            return Response::Broken("its answer has more than 128 fields");
        }
        Err(_) => return Response::Broken("a line of its answer is malformed"),
    };
    match response.code.unwrap_or_default() {
        101 if kind == Kind::Datagrams && switches(&response) => Response::Open { length },
        101 => Response::Broken("it switched protocols without a request"),
        100..200 => Response::Interim { length },
        200..300 if kind == Kind::Bytes => Response::Open { length },
        status @ (200..300 | 404 | 405 | 426 | 501) if kind == Kind::Datagrams => {
            let detail = format!("the proxy answered {status}: it does not serve CONNECT-UDP");
            Response::Refused { reason: EndReason::HopFailed, detail, told: None }
        }
        status => refused(status, &response),
    }
}

/// Whether an answer switches to CONNECT-UDP and to nothing else.
fn switches(response: &httparse::Response<'_, '_>) -> bool {
    let mut protocols = response.headers.iter().filter(|field| field.name.eq_ignore_ascii_case("upgrade"));
    let (Some(protocol), None) = (protocols.next(), protocols.next()) else { return false };
    protocol.value.trim_ascii().eq_ignore_ascii_case(udp::PROTOCOL.as_bytes())
}

/// Returns the reason and detail of a final answer that is not 2xx.
fn refused(status: u16, response: &httparse::Response<'_, '_>) -> Response {
    let mut detail = format!("the proxy answered {status}");
    let phrase = quote(response.reason.unwrap_or_default().as_bytes());
    if !phrase.is_empty() {
        detail = format!("{detail} {phrase}");
    }
    let field = |name: &str| {
        response.headers.iter().find(|field| field.name.eq_ignore_ascii_case(name)).map(|field| field.value)
    };
    let said = ["proxy-status", "x-squid-error"].into_iter().find_map(field);
    if let Some(said) = said {
        detail = format!("{detail} ({})", quote(said));
    }
    if status == 407 {
        let scheme = field("proxy-authenticate").map_or_else(|| "no method".to_owned(), quote);
        detail = format!("{detail}: it asks for {scheme}; give user and password (Basic) in the hop's URL");
        return Response::Refused { reason: EndReason::AuthFailed, detail, told: None };
    }
    let said = said.and_then(reason_said);
    let told = said.map_or_else(|| Answer::of_status(status), Answer::of_end);
    let reason = said.unwrap_or(match status {
        502 | 503 => EndReason::Unreachable,
        408 | 504 => EndReason::ConnectTimeout,
        // tinyproxy sends only this text for a refusal, a missing route, and a name that does not resolve.
        500 if phrase == "Unable to connect" => EndReason::Unreachable,
        _ => EndReason::HopFailed,
    });
    Response::Refused { reason, detail, told: Some(told) }
}

/// Reads what went wrong behind the proxy: `error=` of Proxy-Status (RFC 9209 Sec. 2.3), or Squid's `X-Squid-Error:
/// NAME ERRNO`. A status alone cannot tell a refused connection from a missing route.
fn reason_said(value: &[u8]) -> Option<EndReason> {
    let text = std::str::from_utf8(value).ok()?;
    let error = text.split([';', ',']).find_map(|part| part.trim().strip_prefix("error="));
    match error.unwrap_or(text).trim() {
        "dns_timeout" | "dns_error" => Some(EndReason::Dns),
        "connection_refused" => Some(EndReason::Refused),
        "connection_timeout" => Some(EndReason::ConnectTimeout),
        "destination_not_found" | "destination_unavailable" | "destination_ip_unroutable" => {
            Some(EndReason::Unreachable)
        }
        squid if squid.starts_with("ERR_DNS_FAIL") => Some(EndReason::Dns),
        "ERR_CONNECT_FAIL 111" => Some(EndReason::Refused),
        "ERR_CONNECT_FAIL 110" => Some(EndReason::ConnectTimeout),
        squid if squid.starts_with("ERR_CONNECT_FAIL") => Some(EndReason::Unreachable),
        // There is no address to connect to. Squid 5.7 also says this of a name that does not exist.
        squid if squid.starts_with("ERR_CANNOT_FORWARD") => Some(EndReason::Unreachable),
        _ => None,
    }
}

/// Makes a peer's text safe for a log: printable ASCII, truncated.
fn quote(bytes: &[u8]) -> String {
    let printable = |byte: &u8| if matches!(byte, b' '..=b'~') { char::from(*byte) } else { '?' };
    bytes.trim_ascii().iter().take(MAX_QUOTE).map(printable).collect()
}
