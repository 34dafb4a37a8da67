//! Invitations: how a new end of a tunnel, or a new node of an overlay, gets its keys and addresses from a host that is in
//! already. No key is copied by hand.
//!
//! The host makes an [`Invitation`], one line of text with a secret that works once. The guest connects to the host by TLS 1.3
//! and checks the host's key against the pin of the invitation. Both ends show a raw public key (RFC 7250). Then the guest proves
//! that it has the secret, for exactly this connection and this key ([`proven`]):
//!
//! ```text
//!   guest                                   host
//!     | Ask: proof ------------------------> |  checks the proof; counts wrong ones
//!     | <---------------------------- Offer  |  what the guest needs; nothing is written yet
//!     | checks the configuration it will     |
//!     | write; keeps its key in a file       |
//!     | Take ------------------------------> |  writes the guest's key to its configuration
//!     | <---------------------------- Given  |
//!     | writes its configuration             |
//!     | Finish ----------------------------> |  the invitation is used
//! ```
//!
//! If the connection breaks before `Take`, nothing was written. If it breaks after `Take`, the invitation belongs to the guest's
//! key, and the same guest can repeat everything ([`host`]). Messages have the form of those of a tunnel ([`crate::tunnel`]):
//! `kind (1) length (2) fields`, a field `type (1) length (2) value`; `docs/invitations.md` has the tables.

pub mod host;
mod message;
pub mod table;
mod token;

pub use message::{Edge, Message, Node, OverlayOffer, Refusal, TunnelOffer};
pub use token::{Invitation, InvitationError, Kind, SECRET_BYTES, Secret};

/// The application protocol of a join (ALPN, RFC 7301). A change that old ends cannot read gets a new name.
pub const ALPN: &[u8] = b"sidetrack-join/1";

/// The label of the TLS exporter (RFC 8446 Sec. 7.5) that ties a proof to its connection.
pub const EXPORTER: &[u8] = b"EXPORTER-sidetrack-join";

/// Most addresses of an invitation or an offer.
pub const ADDRESSES_MAX: usize = 8;

/// Returns the bytes that the proof of a guest authenticates (HMAC-SHA-256 with the secret): the connection, the keys of both
/// ends as SHA-256 of their SubjectPublicKeyInfo, and the invited name. The exporter alone does not cover the guest's key.
pub fn proven(exported: &[u8; 32], host: &[u8; 32], guest: &[u8; 32], name: &str) -> Vec<u8> {
    [b"sidetrack join 1\0", &exported[..], host, guest, name.as_bytes()].concat()
}
