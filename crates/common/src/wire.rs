//! Requests and answers on the socket pair: JSON in one message, or in an attached file if it is too large.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sidetrack_sys::scm;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Most bytes of JSON in the message itself.
const INLINE_MAX: usize = 64 << 10;

/// Most bytes of attached JSON if the caller sets no limit, for example for a list of the kernel's flows.
const ATTACHED_MAX: usize = 64 << 20;

/// The content of a message whose JSON is attached as its last descriptor. JSON never begins like this.
const ATTACHED: &[u8] = b"\0";

/// Sends a value with these descriptors.
///
/// # Errors
/// The other end is closed, or there is no memory for the attachment.
pub fn send<T: Serialize>(end: impl AsFd, value: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let json = serde_json::to_vec(value)?;
    if json.len() <= INLINE_MAX {
        return scm::send(end, &json, fds);
    }
    let attached = scm::attach(&json)?;
    let all: Vec<_> = fds.iter().copied().chain([attached.as_fd()]).collect();
    scm::send(end, ATTACHED, &all)
}

/// Receives a value and its descriptors; `None` if the other end is closed.
///
/// # Errors
/// `InvalidData` if the message is not such a value; the connection can still be used. Other errors end it.
pub fn receive<T: DeserializeOwned>(end: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    receive_at_most(end, ATTACHED_MAX)
}

/// Receives a value of at most `most` bytes of JSON. Its errors name the position, but never quote the input.
///
/// # Errors
/// As [`receive`].
pub fn receive_at_most<T: DeserializeOwned>(
    end: impl AsFd,
    most: usize,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let Some(message) = scm::receive(end)? else { return Ok(None) };
    let scm::Message { mut bytes, mut fds } = message;
    if bytes == ATTACHED {
        let attached = fds.pop().ok_or(io::Error::new(io::ErrorKind::InvalidData, "nothing is attached"))?;
        bytes = scm::attached(attached, most)?;
    }
    let wrong = |error: serde_json::Error| {
        let place = format!("wrong at line {}, column {}", error.line(), error.column());
        io::Error::new(io::ErrorKind::InvalidData, place)
    };
    let value = serde_json::from_slice(&bytes).map_err(wrong)?;
    Ok(Some((value, fds)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_values_arrive() {
        let (near, far) = scm::pair().unwrap();
        for length in [0, INLINE_MAX, 3 * scm::MAX_BYTES] {
            let value = "x".repeat(length);
            send(&near, &value, &[near.as_fd()]).unwrap();
            let (back, fds) = receive::<String>(&far).unwrap().unwrap();
            assert!(back == value && fds.len() == 1, "{length}");
        }
        drop(near);
        assert!(receive::<String>(&far).unwrap().is_none());
    }

    #[test]
    fn what_is_no_value_is_refused_and_the_connection_stays() {
        let (near, far) = scm::pair().unwrap();
        let refused = |bytes: &[u8], fds: &[BorrowedFd<'_>]| {
            scm::send(&near, bytes, fds).unwrap();
            receive::<u8>(&far).unwrap_err().kind() == io::ErrorKind::InvalidData
        };
        assert!(refused(b"{", &[]));
        assert!(refused(b"\"no number\"", &[]));
        assert!(refused(ATTACHED, &[]), "nothing is attached");
        assert!(refused(ATTACHED, &[near.as_fd()]), "no file");
        send(&near, &7u8, &[]).unwrap();
        assert_eq!(receive::<u8>(&far).unwrap().unwrap().0, 7);
    }
}
