//! The format in which a running node hands over to the process that replaces it (`docs/adr/0038-upgrade.md`).
//!
//! ```text
//! stream = greeting part*
//! greeting = "sidetrack" 0x00 version:u16          all numbers are big-endian
//! part = kind:u16 flags:u8 descriptors:u8 length:u32 body
//! ```
//!
//! Each direction has its own stream. A reader skips an unknown part if its sender called it optional ([`OPTIONAL`]), and
//! refuses any other. A version from the future is refused: only its writer knows what may be left out.
//!
//! ```text
//! GREETING --12 bytes of a known version--> PARTS --a whole part--> PARTS
//! any --what cannot be read--> FAILED (for ever)
//! ```

/// The version that this program writes, and the last that it reads.
pub const VERSION: u16 = 1;

/// The first bytes of a stream.
const MAGIC: &[u8; 10] = b"sidetrack\0";

/// Bytes of a greeting.
pub const GREETING_BYTES: usize = MAGIC.len() + 2;

/// Bytes before the body of a part.
pub const HEAD_BYTES: usize = 8;

/// Most bytes of a body.
pub const BODY_MAX: usize = 16 << 20;

/// The flag of a part that a reader may leave out.
pub const OPTIONAL: u8 = 1;

/// What a part is. Each has a body of JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    /// New: the configuration is good, and nothing is in the way.
    Checked = 1,
    /// New: everything that can be prepared is prepared.
    Ready = 2,
    /// New: new connections are accepted here.
    Serving = 3,
    /// New, or old: it cannot go on, with the reason.
    Failed = 4,
    /// New, after [`Kind::Back`]: nothing is accepted or written here any more.
    Returned = 5,
    /// New, after [`Kind::Stay`]: it has what only one process can have.
    Settled = 6,
    /// Old: the listening sockets of one address.
    Listener = 16,
    /// Old: a socket where users connect to the program itself.
    Window = 17,
    /// Old: the connection to the process that holds the rights, and its process descriptor.
    Keeper = 18,
    /// Old: everything was offered.
    Offered = 19,
    /// Old: take over now, with the numbers to go on from and the pipes for records.
    Go = 20,
    /// Old: the change is final.
    Stay = 21,
    /// Old: give everything back.
    Back = 22,
    /// Old: one running flow with its two sockets.
    Flow = 23,
    /// Old: no flow follows.
    FlowsDone = 24,
    /// Old: the memory of flows on the wire.
    Wire = 25,
    /// Old: the programs of the wire on one interface.
    WireOn = 26,
    /// Old, or new after [`Kind::Back`]: one association of UDP with its sockets. The clients' socket is that of a listener.
    Association = 27,
    /// Old, or new after [`Kind::Back`]: names that the addresses of the resolver represent.
    Names = 28,
    /// Old, or new after [`Kind::Back`]: one path that a service asked for, with its listening sockets.
    Path = 29,
    /// Old: a socket of the overlay, or the way to the overlay of the old process.
    Overlay = 30,
    /// Old: one session of the overlay with the socket of its application.
    Session = 31,
    /// Old: no session follows.
    SessionsDone = 32,
    /// Old: the connection to the process of the shunt, and its process descriptor.
    Shunt = 40,
    /// Old, or new after [`Kind::Back`]: numbers of running flows of the shunt.
    Shunted = 41,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 25] = [
        Self::Checked,
        Self::Ready,
        Self::Serving,
        Self::Failed,
        Self::Returned,
        Self::Settled,
        Self::Listener,
        Self::Window,
        Self::Keeper,
        Self::Offered,
        Self::Go,
        Self::Stay,
        Self::Back,
        Self::Flow,
        Self::FlowsDone,
        Self::Wire,
        Self::WireOn,
        Self::Association,
        Self::Names,
        Self::Path,
        Self::Overlay,
        Self::Session,
        Self::SessionsDone,
        Self::Shunt,
        Self::Shunted,
    ];

    fn of(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u16 == number)
    }
}

/// A part as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it is.
    pub kind: Kind,
    /// How many descriptors came with it.
    pub descriptors: u8,
    /// Its content.
    pub body: Vec<u8>,
}

/// What a reader has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// A part.
    Part(Part),
    /// A part that this version does not know and may leave out, with this number of descriptors.
    Skipped(u8),
}

/// Why a stream cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// It does not begin as a hand-over does.
    #[error("this is no hand-over of sidetrack")]
    Foreign,
    /// A later program has written it.
    #[error(
        "the hand-over has format {0}, written by a later sidetrack; this one reads format {VERSION}: restart instead of \
         an upgrade"
    )]
    Future(u16),
    /// A part that must be understood is not known.
    #[error(
        "the hand-over has a part of kind {0}, which this sidetrack does not know: restart instead of an upgrade"
    )]
    Unknown(u16),
    /// A part is too large.
    #[error("a part of the hand-over has {0} bytes, more than {BODY_MAX}")]
    TooLarge(u32),
}

/// The first bytes of a stream.
pub fn greeting() -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_be_bytes()].concat()
}

/// Writes a part. `None`: its body is larger than [`BODY_MAX`].
pub fn part(kind: Kind, flags: u8, descriptors: u8, body: &[u8]) -> Option<Vec<u8>> {
    let length = u32::try_from(body.len()).ok().filter(|_| body.len() <= BODY_MAX)?;
    let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len());
    bytes.extend_from_slice(&(kind as u16).to_be_bytes());
    bytes.extend_from_slice(&[flags, descriptors]);
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(body);
    Some(bytes)
}

/// Reads a stream, however its bytes are cut.
#[derive(Clone, Debug, Default)]
pub struct Reader {
    bytes: Vec<u8>,
    is_greeted: bool,
    failed: Option<FormatError>,
}

impl Reader {
    /// Adds bytes. After an error they are dropped.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.failed.is_none() {
            self.bytes.extend_from_slice(bytes);
        }
    }

    /// The next part. `None`: more bytes are needed.
    ///
    /// # Errors
    /// The stream cannot be read; the same error follows for ever.
    pub fn next_part(&mut self) -> Result<Option<Found>, FormatError> {
        match &self.failed {
            Some(error) => Err(error.clone()),
            None => self.read().inspect_err(|error| {
                self.failed = Some(error.clone());
                self.bytes = Vec::new();
            }),
        }
    }

    fn read(&mut self) -> Result<Option<Found>, FormatError> {
        if !self.is_greeted {
            let known = self.bytes.len().min(MAGIC.len());
            if self.bytes[..known] != MAGIC[..known] {
                return Err(FormatError::Foreign);
            }
            let Some(version) = self.bytes.get(MAGIC.len()..GREETING_BYTES) else { return Ok(None) };
            match u16::from_be_bytes([version[0], version[1]]) {
                0 => return Err(FormatError::Foreign),
                version if version > VERSION => return Err(FormatError::Future(version)),
                _ => {}
            }
            self.bytes.drain(..GREETING_BYTES);
            self.is_greeted = true;
        }
        let Some(&[k0, k1, flags, descriptors, l0, l1, l2, l3]) = self.bytes.first_chunk::<HEAD_BYTES>()
        else {
            return Ok(None);
        };
        let (number, length) = (u16::from_be_bytes([k0, k1]), u32::from_be_bytes([l0, l1, l2, l3]));
        let Some(body) = usize::try_from(length).ok().filter(|length| *length <= BODY_MAX) else {
            return Err(FormatError::TooLarge(length));
        };
        let kind = Kind::of(number);
        if kind.is_none() && flags & OPTIONAL == 0 {
            return Err(FormatError::Unknown(number));
        }
        if self.bytes.len() < HEAD_BYTES + body {
            return Ok(None);
        }
        let rest = self.bytes.split_off(HEAD_BYTES + body);
        let whole = std::mem::replace(&mut self.bytes, rest);
        Ok(Some(match kind {
            Some(kind) => Found::Part(Part { kind, descriptors, body: whole[HEAD_BYTES..].to_vec() }),
            None => Found::Skipped(descriptors),
        }))
    }
}
