//! `reverse`: a port of ours stands for a server, or for several told apart by SNI or HTTP Host (seed 000 Sec. IV-A,
//! the redirection table).

use crate::carry::Failure;
use crate::config::ReverseTarget;
use crate::session::Client;
use sidetrack_core::flow::{Destination, EndReason, HostName};
use std::time::Duration;

/// The server this connection is for, and the name in its first bytes if they had to be read. `patience` bounds the
/// wait where nothing can be done without a name.
///
/// # Errors
/// `bad_request` if only a name could tell and there is none that the table has.
pub async fn server(
    target: &ReverseTarget,
    client: &mut Client,
    wait: Duration,
    patience: Duration,
) -> Result<(Destination, Option<HostName>), Failure> {
    let (name, has_default) = match target {
        ReverseTarget::Fixed(server) => return Ok((server.clone(), None)),
        ReverseTarget::ByName { default, .. } => {
            let wait = if default.is_some() { wait } else { patience };
            (client.sniff(wait).await, default.is_some())
        }
    };
    match target.server_for(name.as_ref()) {
        Some(server) => Ok((server.clone(), name)),
        None => {
            debug_assert!(!has_default);
            let what =
                name.map_or_else(|| "no name in the first bytes".to_owned(), |name| format!("'{name}'"));
            let detail = format!("{what}: no server in the listener's 'names', and it has no 'default'");
            Err(Failure::new(EndReason::BadRequest, detail))
        }
    }
}
