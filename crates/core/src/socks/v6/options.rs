//! The options of a message: kind(2) length(2) data. Every option has a multiple of 4 bytes.

use super::super::password;
use super::super::reader::Reader;
use super::metadata::Metadata;
use super::session::{SessionId, TokenWindow};
use super::stack::StackOption;
use super::{DecodeError, EncodeError, MAX_INITIAL_DATA_LEN, MAX_OPTIONS_LEN};
use crate::carrier::Socks6Dialect;

const STACK: u16 = 1;
const AUTH_METHODS: u16 = 2;
const AUTH_SELECTION: u16 = 3;
const AUTH_DATA: u16 = 4;
const SESSION_REQUEST: u16 = 5;
const SESSION_ID: u16 = 6;
const SESSION_OK: u16 = 8;
const SESSION_INVALID: u16 = 9;
const SESSION_TEARDOWN: u16 = 10;
const TOKEN_REQUEST: u16 = 11;
const TOKEN_WINDOW: u16 = 12;
const TOKEN_SPEND: u16 = 13;
const TOKEN_ACCEPTED: u16 = 14;
const TOKEN_REJECTED: u16 = 15;
const METADATA: u16 = 65000;

/// The message that options are in. Each kind is allowed in some messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Request,
    AuthReply,
    OperationReply,
}

impl Place {
    const fn allows(self, kind: u16) -> bool {
        match kind {
            AUTH_METHODS | SESSION_REQUEST | SESSION_TEARDOWN | TOKEN_REQUEST | TOKEN_SPEND => {
                matches!(self, Self::Request)
            }
            AUTH_SELECTION | SESSION_OK | SESSION_INVALID | TOKEN_WINDOW | TOKEN_ACCEPTED
            | TOKEN_REJECTED => {
                matches!(self, Self::AuthReply)
            }
            AUTH_DATA => matches!(self, Self::Request | Self::AuthReply),
            // Stack answers are for the Operation Reply, but the reference library accepts them only in the
            // Authentication Reply. The drafts name both replies for the Session ID. Metadata may be in any message.
            _ => true,
        }
    }
}

/// Authentication Method Advertisement (kind 2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthMethods {
    /// Bytes of initial data that follow the request.
    pub initial_data_len: u16,
    /// The methods without 0 (none), which every client supports, and which pads the option.
    pub methods: Vec<u8>,
}

/// Authentication Data (kind 4) of one method.
#[derive(Clone, PartialEq, Eq)]
pub enum AuthData {
    /// Method 2 in a request: user and password, 1 to 255 bytes each.
    Password {
        /// User name.
        user: Vec<u8>,
        /// Password.
        password: Vec<u8>,
    },
    /// Method 2 in a reply: 0 means accepted.
    PasswordStatus(u8),
    /// Data of another method, including padding.
    Other {
        /// The method.
        method: u8,
        /// Its data.
        data: Vec<u8>,
    },
}

impl std::fmt::Debug for AuthData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Password { user, .. } => write!(f, "Password({:?}, ***)", String::from_utf8_lossy(user)),
            Self::PasswordStatus(status) => write!(f, "PasswordStatus({status})"),
            Self::Other { method, data } => write!(f, "Other({method}, {} bytes)", data.len()),
        }
    }
}

impl AuthData {
    const fn method(&self) -> u8 {
        match self {
            Self::Password { .. } | Self::PasswordStatus(_) => password::METHOD_PASSWORD,
            Self::Other { method, .. } => *method,
        }
    }
}

/// All options of one message. The draft has a table of the options that each message may contain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Kind 2, Request.
    pub auth_methods: Option<AuthMethods>,
    /// Kind 3, Authentication Reply: the selected method. 255: none is acceptable.
    pub auth_selection: Option<u8>,
    /// Kind 4, Request and Authentication Reply, one per method.
    pub auth_data: Vec<AuthData>,
    /// Kind 1, Request and Operation Reply.
    pub stack: Vec<StackOption>,
    /// Kind 5, Request.
    pub session_request: bool,
    /// Kind 6, Request and Authentication Reply.
    pub session_id: Option<SessionId>,
    /// Kind 8, Authentication Reply.
    pub session_ok: bool,
    /// Kind 9, Authentication Reply.
    pub session_invalid: bool,
    /// Kind 10, Request.
    pub session_teardown: bool,
    /// Kind 11, Request: the requested window size.
    pub token_request: Option<u32>,
    /// Kind 12, Authentication Reply.
    pub token_window: Option<TokenWindow>,
    /// Kind 13, Request.
    pub token_spend: Option<u32>,
    /// Kind 14, Authentication Reply.
    pub token_accepted: bool,
    /// Kind 15, Authentication Reply.
    pub token_rejected: bool,
    /// Kind 65000, one per key.
    pub metadata: Vec<Metadata>,
}

/// Appends one option with its padding.
fn put(out: &mut Vec<u8>, dialect: Socks6Dialect, kind: u16, body: &[&[u8]]) {
    let used = 4 + body.iter().map(|part| part.len()).sum::<usize>();
    let padded = match dialect {
        Socks6Dialect::Draft => used.next_multiple_of(4),
        // `socksx` always pads with 1 to 4 bytes.
        Socks6Dialect::Socksx010 | Socks6Dialect::Socksx => (used + 1).next_multiple_of(4),
    };
    out.extend_from_slice(&kind.to_be_bytes());
    // If an option is too long for its length field, all options together are too long, and `encode` refuses them.
    out.extend_from_slice(&u16::try_from(padded).unwrap_or(u16::MAX).to_be_bytes());
    for part in body {
        out.extend_from_slice(part);
    }
    out.resize(out.len() + padded - used, 0);
}

impl Options {
    /// Encodes all options in a fixed order. The `socksx` layouts know only two kinds and require kind 2 first; other
    /// kinds are left out.
    pub(super) fn encode(&self, dialect: Socks6Dialect) -> Result<Vec<u8>, EncodeError> {
        let mut out = Vec::new();
        if let Some(AuthMethods { initial_data_len, methods }) = &self.auth_methods {
            put(&mut out, dialect, AUTH_METHODS, &[&initial_data_len.to_be_bytes(), methods]);
        }
        if dialect == Socks6Dialect::Draft {
            self.encode_authentication(&mut out)?;
            for option in &self.stack {
                put(&mut out, dialect, STACK, &[&option.encode()]);
            }
            self.encode_session(&mut out);
        }
        for Metadata { key, value } in &self.metadata {
            let len = u16::try_from(value.len()).map_err(|_| EncodeError::OptionsTooLong(value.len()))?;
            put(&mut out, dialect, METADATA, &[&key.to_be_bytes(), &len.to_be_bytes(), value.as_bytes()]);
        }
        if out.len() > MAX_OPTIONS_LEN { Err(EncodeError::OptionsTooLong(out.len())) } else { Ok(out) }
    }

    fn encode_authentication(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let draft = Socks6Dialect::Draft;
        if let Some(method) = self.auth_selection {
            put(out, draft, AUTH_SELECTION, &[&[method]]);
        }
        for data in &self.auth_data {
            let mut body = vec![data.method()];
            match data {
                AuthData::Password { user, password } => {
                    password::put_request(&mut body, user, password).ok_or(EncodeError::Credentials)?;
                }
                AuthData::PasswordStatus(status) => body.extend_from_slice(&[password::VERSION, *status]),
                AuthData::Other { data, .. } => body.extend_from_slice(data),
            }
            put(out, draft, AUTH_DATA, &[&body]);
        }
        Ok(())
    }

    fn encode_session(&self, out: &mut Vec<u8>) {
        let flag = |out: &mut Vec<u8>, kind, set| {
            if set {
                put(out, Socks6Dialect::Draft, kind, &[]);
            }
        };
        flag(out, SESSION_REQUEST, self.session_request);
        if let Some(id) = &self.session_id {
            put(out, Socks6Dialect::Draft, SESSION_ID, &[id.as_bytes()]);
        }
        flag(out, SESSION_OK, self.session_ok);
        flag(out, SESSION_INVALID, self.session_invalid);
        if let Some(size) = self.token_request {
            put(out, Socks6Dialect::Draft, TOKEN_REQUEST, &[&size.to_be_bytes()]);
        }
        if let Some(TokenWindow { base, size }) = self.token_window {
            put(out, Socks6Dialect::Draft, TOKEN_WINDOW, &[&base.to_be_bytes(), &size.to_be_bytes()]);
        }
        if let Some(token) = self.token_spend {
            put(out, Socks6Dialect::Draft, TOKEN_SPEND, &[&token.to_be_bytes()]);
        }
        flag(out, TOKEN_ACCEPTED, self.token_accepted);
        flag(out, TOKEN_REJECTED, self.token_rejected);
        flag(out, SESSION_TEARDOWN, self.session_teardown);
    }

    /// Decodes all options of a message.
    pub(super) fn decode(bytes: &[u8], place: Place, dialect: Socks6Dialect) -> Result<Self, DecodeError> {
        let mut options = Self::default();
        let mut reader = Reader::new(bytes);
        while !reader.is_empty() {
            let cut = DecodeError::OptionLength { kind: 0, len: reader.rest().len() };
            let kind = reader.u16().map_err(|_| cut)?;
            let len = usize::from(reader.u16().map_err(|_| cut)?);
            let bad_length = DecodeError::OptionLength { kind, len };
            if len < 4 || len % 4 != 0 {
                return Err(bad_length);
            }
            let body = reader.take(len - 4).map_err(|_| bad_length)?;
            if !place.allows(kind) {
                return Err(DecodeError::Misplaced(kind));
            }
            // An invalid body is skipped like an unknown kind.
            options.take(kind, body, place, dialect).unwrap_or(Ok(()))?;
        }
        options.check()?;
        Ok(options)
    }

    fn take(
        &mut self,
        kind: u16,
        body: &[u8],
        place: Place,
        dialect: Socks6Dialect,
    ) -> Option<Result<(), DecodeError>> {
        let mut reader = Reader::new(body);
        let fresh = match kind {
            STACK => return Some(self.take_stack(StackOption::decode(body)?)),
            AUTH_METHODS => {
                let methods = read_auth_methods(&mut reader)?;
                let len = methods.initial_data_len;
                // `socksx` may announce the full range of its field.
                if usize::from(len) > MAX_INITIAL_DATA_LEN && dialect == Socks6Dialect::Draft {
                    return Some(Err(DecodeError::InitialData(len)));
                }
                self.auth_methods.replace(methods).is_none()
            }
            AUTH_SELECTION => self.auth_selection.replace(reader.u8().ok()?).is_none(),
            AUTH_DATA => self.take_auth_data(read_auth_data(&mut reader, place)?),
            SESSION_REQUEST => !std::mem::replace(&mut self.session_request, true),
            SESSION_ID => self.session_id.replace(SessionId::from_bytes(body)?).is_none(),
            SESSION_OK => !std::mem::replace(&mut self.session_ok, true),
            SESSION_INVALID => !std::mem::replace(&mut self.session_invalid, true),
            SESSION_TEARDOWN => !std::mem::replace(&mut self.session_teardown, true),
            TOKEN_REQUEST => self.token_request.replace(reader.u32().ok()?).is_none(),
            TOKEN_WINDOW => {
                let (base, size) = (reader.u32().ok()?, reader.u32().ok()?);
                self.token_window.replace(TokenWindow::checked(base, size)?).is_none()
            }
            TOKEN_SPEND => self.token_spend.replace(reader.u32().ok()?).is_none(),
            TOKEN_ACCEPTED => !std::mem::replace(&mut self.token_accepted, true),
            TOKEN_REJECTED => !std::mem::replace(&mut self.token_rejected, true),
            METADATA => {
                self.metadata.push(read_metadata(&mut reader)?);
                true
            }
            _ => true,
        };
        Some(if fresh { Ok(()) } else { Err(DecodeError::Duplicate(kind)) })
    }

    fn take_stack(&mut self, option: StackOption) -> Result<(), DecodeError> {
        if self.stack.iter().any(|other| other.overlaps(option)) {
            return Err(DecodeError::Duplicate(STACK));
        }
        self.stack.push(option);
        Ok(())
    }

    fn take_auth_data(&mut self, data: AuthData) -> bool {
        let fresh = self.auth_data.iter().all(|other| other.method() != data.method());
        self.auth_data.push(data);
        fresh
    }

    fn check(&self) -> Result<(), DecodeError> {
        let exclusive = [
            (self.session_request && self.session_id.is_some(), "a session is begun inside another"),
            (self.session_teardown && self.session_id.is_none(), "a teardown without a session ID"),
            (self.session_ok && self.session_invalid, "the session is both ok and invalid"),
            (self.token_accepted && self.token_rejected, "the token is both accepted and rejected"),
        ];
        if let Some((_, what)) = exclusive.iter().find(|(wrong, _)| *wrong) {
            return Err(DecodeError::Contradiction(what));
        }
        // Sort first: a message has room for thousands of keys, so comparing all pairs would be slow.
        let mut keys: Vec<u16> = self.metadata.iter().map(|entry| entry.key).collect();
        keys.sort_unstable();
        if keys.windows(2).any(|pair| pair.first() == pair.last()) {
            return Err(DecodeError::Duplicate(METADATA));
        }
        Ok(())
    }
}

fn read_auth_methods(reader: &mut Reader<'_>) -> Option<AuthMethods> {
    let initial_data_len = reader.u16().ok()?;
    let methods = reader.rest().iter().copied().filter(|method| *method != password::METHOD_NONE).collect();
    Some(AuthMethods { initial_data_len, methods })
}

fn read_auth_data(reader: &mut Reader<'_>, place: Place) -> Option<AuthData> {
    let method = reader.u8().ok()?;
    if method != password::METHOD_PASSWORD {
        return Some(AuthData::Other { method, data: reader.rest().to_vec() });
    }
    if place == Place::Request {
        let (version, user, password) = password::read_request(reader).ok()?;
        let sound = version == password::VERSION && !user.is_empty() && !password.is_empty();
        sound.then(|| AuthData::Password { user: user.to_vec(), password: password.to_vec() })
    } else {
        // As in version 5, the version byte is ignored.
        reader.u8().ok()?;
        reader.u8().ok().map(AuthData::PasswordStatus)
    }
}

fn read_metadata(reader: &mut Reader<'_>) -> Option<Metadata> {
    let key = reader.u16().ok()?;
    let len = reader.u16().ok()?;
    let value = std::str::from_utf8(reader.take(usize::from(len)).ok()?).ok()?;
    Some(Metadata { key, value: value.to_owned() })
}
