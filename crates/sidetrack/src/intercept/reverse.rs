//! `reverse`: one of our ports is for a server, or for several by SNI or HTTP Host (EPI framework, Sec. IV-A,
//! the redirection table).

use crate::carry::{Client, Failure, Sniffed};
use crate::config::ReverseTarget;
use sidetrack_core::flow::{Destination, EndReason, HostName};
use std::time::Duration;

/// Returns the server for this connection, and the name in its first bytes if they were needed. `patience`
/// limits the wait if there is no default server, `wait` if there is one.
///
/// # Errors
/// Fails if only a name could select the server. `bad_request`: there is none, or the table does not have it.
/// `client_gone`: the client ended before. `handshake_timeout`: none came in time.
pub async fn server(
    target: &ReverseTarget,
    client: &mut Client,
    wait: Duration,
    patience: Duration,
) -> Result<(Destination, Option<HostName>), Failure> {
    let sniffed = match target {
        ReverseTarget::Fixed(server) => return Ok((server.clone(), None)),
        ReverseTarget::ByName { default: Some(_), .. } => client.sniff(wait).await,
        ReverseTarget::ByName { default: None, .. } => client.sniff(patience).await,
    };
    let reason = match sniffed {
        Sniffed::Name(_) | Sniffed::Nameless => EndReason::BadRequest,
        Sniffed::TimedOut => EndReason::HandshakeTimeout,
        Sniffed::Ended => EndReason::ClientGone,
    };
    let name = sniffed.name();
    if let Some(server) = target.server_for(name.as_ref()) {
        return Ok((server.clone(), name));
    }
    let what = name.map_or_else(|| "no name in the first bytes".to_owned(), |name| format!("'{name}'"));
    let detail = format!("{what}: no server in the listener's 'names', and it has no 'default'");
    Err(Failure::new(reason, detail))
}
