//! Secrets that a command never sees. The command gets a placeholder instead; requests to the host that a secret is for get the
//! secret.
//!
//! ```text
//!  command              sidetrack                        server
//!     | KEY: placeholder   |  Guard::head, Swapping up     |
//!     |------------------->|----------------------------->| KEY: secret
//!     | placeholder        |  Guard::cover, Swapping down  |
//!     |<-------------------|<-----------------------------| secret
//! ```
//!
//! A placeholder in a request to any other server, or outside TLS, is [`Misplaced`]: the request is refused. Connections and
//! datagrams that are not read as requests are searched for it ([`Search`]).

mod guard;
mod search;
mod secrets;
mod swap;
mod value;
mod wanted;

pub use guard::Guard;
pub use search::Search;
pub use secrets::{Coding, Named, Secrets};
pub use swap::{Misplaced, Spot, Swapping};
pub use value::{Secret, SecretError, Wiped};
pub use wanted::{Source, Wanted, WantedError};

use data_encoding::HEXLOWER;

/// The beginning of each placeholder.
pub const PREFIX: &str = "sidetrack-secret-";

/// Returns the placeholder for 16 random bytes: [`PREFIX`] and 32 hexadecimal digits. It has no character that JSON or a form
/// writes in another way.
pub fn placeholder(random: [u8; 16]) -> String {
    format!("{PREFIX}{}", HEXLOWER.encode(&random))
}
