//! `reverse`: a port of ours stands for a server, or for several told apart by SNI or HTTP Host (EPI framework, Sec. IV-A,
//! the redirection table).

use crate::carry::Failure;
use crate::config::ReverseTarget;
use crate::session::{Client, Sniffed};
use sidetrack_core::flow::{Destination, EndReason, HostName};
use std::time::Duration;

/// The server this connection is for, and the name in its first bytes if they had to be read. `patience` bounds the
/// wait where nothing can be done without a name.
///
/// # Errors
/// Only a name could tell, and: `bad_request`, there is none that the table has; `client_gone`, none will come any
/// more; `handshake_timeout`, none came in time.
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
