//! Judges the fields of one header block of HTTP/2 or HTTP/3 (RFC 9113 Sec. 8.3, RFC 9114 Sec. 4.3).

use super::fields::is_token;
use super::h2::{Malformed, Pseudo, check_field, check_pseudo, check_server};
use super::message::Sender;

/// The part of a message that a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Request,
    Response,
    Trailers,
}

/// A header block: what its fields have said so far.
#[derive(Debug)]
pub(super) struct Block {
    part: Part,
    sender: Sender,
    /// The receiver is a proxy: requests for resources of scheme `http` are for it too.
    is_proxy: bool,
    malformed: Option<Malformed>,
    has_fields: bool,
    pub(super) method: Option<Vec<u8>>,
    pub(super) scheme: Option<Vec<u8>>,
    pub(super) authority: Option<Vec<u8>>,
    pub(super) path: Option<Vec<u8>>,
    pub(super) protocol: Option<Vec<u8>>,
    pub(super) status: Option<Vec<u8>>,
    host: Option<Vec<u8>>,
}

impl Block {
    pub(super) const fn new(part: Part, sender: Sender) -> Self {
        Self {
            part,
            sender,
            is_proxy: false,
            malformed: None,
            has_fields: false,
            method: None,
            scheme: None,
            authority: None,
            path: None,
            protocol: None,
            status: None,
            host: None,
        }
    }

    /// A block that a proxy receives.
    pub(super) fn for_proxy(self) -> Self {
        Self { is_proxy: true, ..self }
    }

    /// Adds the next field.
    pub(super) fn field(&mut self, name: &[u8], value: &[u8]) {
        let judged =
            if name.first() == Some(&b':') { self.pseudo(name, value) } else { self.plain(name, value) };
        if let Err(malformed) = judged {
            self.malformed = self.malformed.or(Some(malformed));
        }
    }

    fn pseudo(&mut self, name: &[u8], value: &[u8]) -> Result<(), Malformed> {
        let place = match (self.part, name) {
            (Part::Request, b":method") => &mut self.method,
            (Part::Request, b":scheme") => &mut self.scheme,
            (Part::Request, b":authority") => &mut self.authority,
            (Part::Request, b":path") => &mut self.path,
            (Part::Request, b":protocol") => &mut self.protocol,
            (Part::Response, b":status") => &mut self.status,
            _ => return Err(Malformed::Pseudo),
        };
        if self.has_fields || place.replace(value.to_vec()).is_some() {
            Err(Malformed::Pseudo)
        } else {
            Ok(())
        }
    }

    fn plain(&mut self, name: &[u8], value: &[u8]) -> Result<(), Malformed> {
        self.has_fields = true;
        check_field(name, value, self.sender)?;
        if self.part == Part::Request && name == b"host" && self.host.replace(value.to_vec()).is_some() {
            return Err(Malformed::Authority);
        }
        Ok(())
    }

    /// Judges the whole block. Returns whether it ends its section: an interim response does not.
    pub(super) fn end(&self, ends_stream: bool) -> Result<bool, Malformed> {
        if let Some(malformed) = self.malformed {
            return Err(malformed);
        }
        match self.part {
            Part::Request => self.request().map(|()| true),
            Part::Response => self.response(ends_stream),
            Part::Trailers if ends_stream => Ok(true),
            Part::Trailers => Err(Malformed::Trailers),
        }
    }

    /// Judges a request (RFC 9113 Sec. 8.3.1 and 8.5, RFC 8441 Sec. 4).
    fn request(&self) -> Result<(), Malformed> {
        let method = self.method.as_deref().ok_or(Malformed::Pseudo)?;
        if !is_token(method) {
            return Err(Malformed::Method);
        }
        let (authority, host) = (self.authority.as_deref(), self.host.as_deref());
        let is_connect = method == b"CONNECT";
        if self.protocol.is_some() && !is_connect {
            return Err(Malformed::Pseudo);
        }
        if is_connect && self.protocol.is_none() {
            let is_whole = authority.is_some() && self.scheme.is_none() && self.path.is_none();
            return if is_whole { Ok(()) } else { Err(Malformed::Pseudo) };
        }
        let (Some(scheme), Some(path)) = (self.scheme.as_deref(), self.path.as_deref()) else {
            return Err(Malformed::Pseudo);
        };
        let is_plain = self.is_proxy && scheme.eq_ignore_ascii_case(b"http");
        let scheme = if is_plain { None } else { Some(scheme) };
        check_pseudo(&Pseudo { method, scheme, authority, path })?;
        check_server(authority, host)
    }

    /// Judges a response (RFC 9113 Sec. 8.3.2 and 8.6).
    fn response(&self, ends_stream: bool) -> Result<bool, Malformed> {
        match self.status.as_deref() {
            Some(b"101") => Err(Malformed::Status),
            Some([b'1', b'0'..=b'9', b'0'..=b'9']) if ends_stream => Err(Malformed::Status),
            Some([b'1', b'0'..=b'9', b'0'..=b'9']) => Ok(false),
            Some([b'2'..=b'9', b'0'..=b'9', b'0'..=b'9']) => Ok(true),
            Some(_) => Err(Malformed::Status),
            None => Err(Malformed::Pseudo),
        }
    }
}
