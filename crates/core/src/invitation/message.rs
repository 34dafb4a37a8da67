//! The messages of a join.

use super::ADDRESSES_MAX;
use super::token::{address, guest_name};
use crate::flow::Destination;
use crate::overlay::NODES_MAX;
use crate::overlay::key::PublicKey;
use crate::tunnel::field::{self, Fields, Writer, once, unknown};
use crate::tunnel::{DETAIL_MAX, MessageError, Parsed};

const ASK: u8 = 1;
const TUNNEL: u8 = 2;
const OVERLAY: u8 = 3;
const TAKE: u8 = 4;
const GIVEN: u8 = 5;
const FINISH: u8 = 6;
const REFUSED: u8 = 7;

const PROOF: u8 = 128;
const ADDRESS: u8 = 129;
const HOST: u8 = 130;
const NODE: u8 = 131;
const EDGE: u8 = 132;
const REASON: u8 = 133;
const WORDS: u8 = 2;

/// Most links of an offer.
const EDGES_MAX: usize = 1024;

/// A message of either end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The guest's first message.
    Ask {
        /// HMAC-SHA-256 of [`super::proven`] with the secret.
        proof: [u8; 32],
        /// Overlay: the addresses where other nodes may dial the guest.
        addresses: Vec<Destination>,
    },
    /// What a near side of a tunnel needs.
    Tunnel(TunnelOffer),
    /// What a node of an overlay needs.
    Overlay(OverlayOffer),
    /// The guest can use the offer, and has its key in a file.
    Take,
    /// The host has written the guest's key.
    Given {
        /// What is left to do at the host, in words; empty: nothing. At most [`DETAIL_MAX`] bytes.
        left: String,
    },
    /// The guest has written its configuration.
    Finish,
    /// The host ends the join.
    Refused {
        /// The reason.
        reason: Refusal,
        /// More about it, in words; may be empty. At most [`DETAIL_MAX`] bytes.
        words: String,
    },
}

/// What a near side of a tunnel needs. The pin of the far side is that of the invitation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelOffer {
    /// The name of the far side: that of its certificate.
    pub host: String,
    /// The addresses of its tunnel listener, 1 to [`ADDRESSES_MAX`].
    pub addresses: Vec<Destination>,
}

/// What a node of an overlay needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayOffer {
    /// The name of the host, one of `nodes`.
    pub host: String,
    /// Where the guest dials the host, at most [`ADDRESSES_MAX`]. Empty: the host dials the guest.
    pub addresses: Vec<Destination>,
    /// All nodes, without the guest. At most [`NODES_MAX`].
    pub nodes: Vec<Node>,
    /// The links that nodes may announce, with that between guest and host. Empty: all links are allowed.
    pub edges: Vec<Edge>,
}

/// A node of the overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Its key.
    pub key: PublicKey,
}

/// A link that its two ends may announce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The names of its ends.
    pub ends: [String; 2],
    /// The lowest cost that counts, microseconds; 0: the default.
    pub least_us: u32,
}

/// Why a host ends a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The proof is wrong.
    Proof,
    /// The invitation was used with another key.
    Used,
    /// The invitation has expired.
    Expired,
    /// There were too many wrong proofs.
    Guessed,
    /// Another guest is joining at this moment.
    Busy,
    /// The host cannot write its configuration, or the name is taken.
    Failed,
}

impl Refusal {
    /// All reasons.
    pub const ALL: [Self; 6] =
        [Self::Proof, Self::Used, Self::Expired, Self::Guessed, Self::Busy, Self::Failed];

    const fn byte(self) -> u8 {
        match self {
            Self::Proof => 1,
            Self::Used => 2,
            Self::Expired => 3,
            Self::Guessed => 4,
            Self::Busy => 5,
            Self::Failed => 6,
        }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Proof => "the secret of the invitation is wrong",
            Self::Used => "the invitation was used already, with another key",
            Self::Expired => "the invitation has expired",
            Self::Guessed => "the invitation is void: too many wrong secrets came for it",
            Self::Busy => "another guest is using the invitation now",
            Self::Failed => "the other end could not add this one",
        })
    }
}

impl Message {
    /// Returns a refusal, with its text shortened to the allowed length.
    pub fn refused(reason: Refusal, words: &str) -> Self {
        Self::Refused { reason, words: shortened(words) }
    }

    /// Returns the confirmation, with its text shortened to the allowed length.
    pub fn given(left: &str) -> Self {
        Self::Given { left: shortened(left) }
    }

    /// Encodes the message.
    ///
    /// # Errors
    /// `TooLong` if there are too many nodes, or a text is longer than allowed.
    pub fn encode(&self) -> Result<Vec<u8>, MessageError> {
        let mut writer;
        match self {
            Self::Ask { proof, addresses } => {
                writer = Writer::new(ASK);
                writer.put(PROOF, &[proof]);
                put_addresses(&mut writer, addresses);
            }
            Self::Tunnel(TunnelOffer { host, addresses }) => {
                writer = Writer::new(TUNNEL);
                writer.put(HOST, &[host.as_bytes()]);
                put_addresses(&mut writer, addresses);
            }
            Self::Overlay(offer) => return offer.encode(),
            Self::Take => writer = Writer::new(TAKE),
            Self::Given { left } => {
                writer = Writer::new(GIVEN);
                put_words(&mut writer, left)?;
            }
            Self::Finish => writer = Writer::new(FINISH),
            Self::Refused { reason, words } => {
                writer = Writer::new(REFUSED);
                writer.put(REASON, &[&[reason.byte()]]);
                put_words(&mut writer, words)?;
            }
        }
        writer.finish()
    }

    /// Parses the message at the beginning of `bytes`.
    pub fn parse(bytes: &[u8]) -> Parsed<Self> {
        let kinds = [ASK, TUNNEL, OVERLAY, TAKE, GIVEN, FINISH, REFUSED];
        field::parse(bytes, &kinds, |kind, fields| Raw::of(fields)?.message(kind))
    }
}

impl OverlayOffer {
    fn encode(&self) -> Result<Vec<u8>, MessageError> {
        let mut writer = Writer::new(OVERLAY);
        writer.put(HOST, &[self.host.as_bytes()]);
        put_addresses(&mut writer, &self.addresses);
        self.nodes.iter().for_each(|node| writer.put(NODE, &[&node.key.0, node.name.as_bytes()]));
        for Edge { ends: [one, other], least_us } in &self.edges {
            let length = u8::try_from(one.len()).map_err(|_| MessageError::TooLong)?;
            writer.put(EDGE, &[&least_us.to_be_bytes(), &[length], one.as_bytes(), other.as_bytes()]);
        }
        writer.finish()
    }
}

/// The fields of any message. Each kind uses some of them, and rejects none of the others.
#[derive(Default)]
struct Raw {
    proof: Option<[u8; 32]>,
    addresses: Vec<Destination>,
    host: Option<String>,
    nodes: Vec<Node>,
    edges: Vec<Edge>,
    reason: Option<Refusal>,
    words: Option<String>,
}

impl Raw {
    fn of(fields: Fields<'_>) -> Result<Self, MessageError> {
        let mut raw = Self::default();
        for item in fields {
            let (field, value) = item?;
            let bad = MessageError::BadField(field);
            match field {
                PROOF => once(&mut raw.proof, field, value.try_into().map_err(|_| bad)?)?,
                ADDRESS => raw.addresses.push(address(field, value)?),
                HOST => once(&mut raw.host, field, guest_name(field, value)?)?,
                NODE => {
                    let (key, name) = value.split_first_chunk().ok_or(bad)?;
                    raw.nodes.push(Node { name: guest_name(field, name)?, key: PublicKey(*key) });
                }
                EDGE => raw.edges.push(edge(field, value)?),
                REASON => {
                    let known = Refusal::ALL.into_iter().find(|reason| [reason.byte()] == value);
                    once(&mut raw.reason, field, known.unwrap_or(Refusal::Failed))?;
                }
                WORDS if value.len() > DETAIL_MAX => return Err(bad),
                WORDS => {
                    // The text goes to terminals: remove control characters.
                    let words = field::text(field, value)?;
                    once(&mut raw.words, field, words.replace(|c: char| c.is_control(), " "))?;
                }
                other => unknown(other)?,
            }
            for (is_too_many, field) in [
                (raw.addresses.len() > ADDRESSES_MAX, ADDRESS),
                (raw.nodes.len() > NODES_MAX, NODE),
                (raw.edges.len() > EDGES_MAX, EDGE),
            ] {
                if is_too_many {
                    return Err(MessageError::BadField(field));
                }
            }
        }
        Ok(raw)
    }

    fn message(self, kind: u8) -> Result<Message, MessageError> {
        let Self { proof, addresses, host, nodes, edges, reason, words } = self;
        let missing = MessageError::Missing;
        let words = words.unwrap_or_default();
        Ok(match kind {
            ASK => Message::Ask { proof: proof.ok_or(missing(PROOF))?, addresses },
            TUNNEL if addresses.is_empty() => return Err(missing(ADDRESS)),
            TUNNEL => Message::Tunnel(TunnelOffer { host: host.ok_or(missing(HOST))?, addresses }),
            OVERLAY if nodes.is_empty() => return Err(missing(NODE)),
            OVERLAY => {
                Message::Overlay(OverlayOffer { host: host.ok_or(missing(HOST))?, addresses, nodes, edges })
            }
            TAKE => Message::Take,
            GIVEN => Message::Given { left: words },
            FINISH => Message::Finish,
            REFUSED => Message::Refused { reason: reason.ok_or(missing(REASON))?, words },
            other => return Err(MessageError::Kind(other)),
        })
    }
}

fn edge(field: u8, value: &[u8]) -> Result<Edge, MessageError> {
    let bad = MessageError::BadField(field);
    let (&[a, b, c, d, length], names) = value.split_first_chunk().ok_or(bad)?;
    let (one, other) = names.split_at_checked(length.into()).ok_or(bad)?;
    let ends = [guest_name(field, one)?, guest_name(field, other)?];
    Ok(Edge { ends, least_us: u32::from_be_bytes([a, b, c, d]) })
}

fn put_addresses(writer: &mut Writer, addresses: &[Destination]) {
    addresses.iter().for_each(|address| writer.put_destination(ADDRESS, address));
}

fn put_words(writer: &mut Writer, words: &str) -> Result<(), MessageError> {
    if words.len() > DETAIL_MAX {
        return Err(MessageError::TooLong);
    }
    if !words.is_empty() {
        writer.put(WORDS, &[words.as_bytes()]);
    }
    Ok(())
}

fn shortened(words: &str) -> String {
    words.get(..words.floor_char_boundary(DETAIL_MAX)).unwrap_or_default().to_owned()
}
