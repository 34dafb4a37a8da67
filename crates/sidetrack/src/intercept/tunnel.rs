//! `tunnel`: the far side of a tunnel. The near side sends the destination at the beginning of the flow's
//! stream.

use crate::carry::{Client, Failure};
use sidetrack_core::flow::EndReason;
use sidetrack_core::tunnel::{Parsed, Reply, Request};
use std::net::SocketAddr;

/// Reads the request. The client's own bytes after it stay buffered.
///
/// # Errors
/// Fails with `bad_request` if there is none, and with `client_gone` if the stream ends inside it.
pub async fn request(client: &mut Client) -> Result<Request, Failure> {
    let gone = |why: &str| Failure::new(EndReason::ClientGone, format!("the request: {why}"));
    let mut bytes = client.take_held();
    loop {
        match Request::parse(&bytes) {
            Parsed::Message(request, consumed) => {
                client.put_first(bytes.split_off(consumed));
                return Ok(request);
            }
            Parsed::Malformed(error) => {
                let failure = Failure::new(EndReason::BadRequest, format!("the request: {error}"));
                refused(client, &failure).await;
                return Err(failure);
            }
            Parsed::Incomplete => {}
        }
        match client.read_more().await {
            Ok(n) if n > 0 => bytes.append(&mut client.take_held()),
            Ok(_) => return Err(gone("the stream ended inside it")),
            Err(error) => return Err(gone(&error.to_string())),
        }
    }
}

/// Tells the near side that the path is set up.
///
/// # Errors
/// Fails with `client_gone` if the near side has disconnected.
pub async fn connected(client: &mut Client, bound: Option<SocketAddr>) -> Result<(), Failure> {
    let reply = Reply::Connected { bound: bound.map(Into::into) };
    answer(client, &reply).await.map_err(|error| {
        Failure::new(EndReason::ClientGone, format!("the near side left before it was answered: {error}"))
    })
}

/// Tells the near side why there is no path, if it is still connected.
pub async fn refused(client: &mut Client, failure: &Failure) {
    let _ = answer(client, &Reply::refused(failure.reason, &failure.detail)).await;
}

async fn answer(client: &mut Client, reply: &Reply) -> std::io::Result<()> {
    let bytes = reply.encode().map_err(std::io::Error::other)?;
    client.answer(&bytes).await
}
