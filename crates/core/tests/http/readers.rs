//! Holds the two readers of HTTP/1 request heads against each other. `head` recognises a request and its host, where the bytes
//! pass unchanged or go to the other reader. `message` judges: it refuses everything that recipients might read differently,
//! and only what it accepts is forwarded. The fuzz target `http_readers` includes this file.

use sidetrack_core::flow::Host;
use sidetrack_core::http::head::{Head, MAX_HEAD, RequestHead, request_head};
use sidetrack_core::http::message::{MessageError, Request, Scan, Sender};
use sidetrack_core::http::uri::Target;

/// What the strict reader says: a whole head and its length.
fn strict(bytes: &[u8]) -> Result<Option<(usize, Request)>, MessageError> {
    let Some(length) = Scan::default().advance(bytes, Sender::Client)? else { return Ok(None) };
    Request::parse(&bytes[..length]).map(|request| Some((length, request)))
}

fn host(found: &RequestHead) -> Option<&Host> {
    found.authority.as_ref().map(|authority| &authority.host)
}

/// Fails if the readers contradict each other about the first request of a connection.
///
/// - If both read a head, it has the same length and names the same server.
/// - A head that is whole for the strict reader is never incomplete for the other one.
/// - A bare LF, for which the strict reader refuses a head, is read like CR LF by the other one.
pub(crate) fn agree(bytes: &[u8]) {
    match (strict(bytes), request_head(bytes)) {
        (Ok(Some((length, request))), Head::Request(found)) => {
            assert_eq!(found.length, length);
            match Target::of(&request) {
                Ok((Target::Resource(resource), _)) => assert_eq!(host(&found), Some(&resource.server.host)),
                Ok((Target::Tunnel(to), _)) => assert_eq!(host(&found), Some(&to.host)),
                Ok((Target::Server, _)) | Err(_) => {}
            }
        }
        (Ok(Some(_)), found) => assert_ne!(found, Head::Incomplete),
        (Err(MessageError::BareLineEnd), Head::Request(found)) => {
            let head = &bytes[..found.length];
            let mut usual = Vec::new();
            for line in head.split_inclusive(|byte| *byte == b'\n') {
                let line = line.strip_suffix(b"\n").unwrap_or(line);
                usual.extend_from_slice(line.strip_suffix(b"\r").unwrap_or(line));
                usual.extend_from_slice(b"\r\n");
            }
            if usual.len() <= MAX_HEAD {
                let Head::Request(again) = request_head(&usual) else { panic!("not with CR LF: {found:?}") };
                assert_eq!((again.form, &again.authority), (found.form, &found.authority));
            }
        }
        _ => {}
    }
}
