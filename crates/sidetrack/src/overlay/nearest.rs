//! Opens a session to the node that a carrier names, or to the nearest member of a group whose server can be reached.
//!
//! ```text
//!             the next path to it
//!               +--------+
//!               v        | the path failed
//!  nearest ->  ask a member ----------------> open
//!               |    ^      its server answers
//!   its server  |    |
//!   cannot be   |    | the next nearest; after the last one, after a pause, again those that have not refused
//!   reached     v    |
//!              next member ------> failed: every member has refused, or one has denied the flow
//! ```

use super::datagrams;
use super::endpoint::{Endpoint, Path};
use super::ingress::{ATTEMPT, Ingress, REST_FIRST, REST_MAX, Setback, failure, new_session};
use super::shared::Shared;
use crate::carry::{Failure, OverlayOrder};
use sidetrack_core::flow::EndReason;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{self, Refusal, SessionId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Longest attempt to open a path to a member while there is a farther one; it includes the member's connect. A server that is
/// there answers the second SYN, which Linux sends after 1 s.
const MEMBER_ATTEMPT: Duration = Duration::from_secs(3);

/// What a carrier has ahead of the name of a group.
const NEAREST: &str = "nearest:";

/// A session that is open: its near end, its id, and its first path.
pub(super) type Open = (Ingress, SessionId, (Path, frame::Path));

/// Opens a session: tries one member after the other, the nearest one first, and for each one path after the other. A carrier that
/// names a node has that one member.
///
/// # Errors
/// Returns why no member is reached, or why the last one that was asked refuses.
pub(super) async fn open(shared: &Arc<Shared>, order: &OverlayOrder) -> Result<Open, Failure> {
    let name = &order.carrier.node;
    let (mut refusals, mut avoid) = (Refusals::default(), BTreeMap::<NodeId, BTreeSet<NodeId>>::new());
    let mut rest = REST_FIRST;
    loop {
        // Asked anew in each round: members come and go.
        let members = refusals.without(destinations(shared, name));
        if members.is_empty() {
            return Err(refusals.failure(name).unwrap_or_else(|| no_node(name)));
        }
        let mut is_over = true;
        for (at, to) in members.iter().enumerate() {
            let is_last = at + 1 == members.len();
            let ingress = Ingress { shared: shared.clone(), order: order.clone(), to: *to };
            let patience = if is_last { ATTEMPT } else { MEMBER_ATTEMPT };
            match ask(&ingress, avoid.entry(*to).or_default(), patience).await? {
                Ok((session, path)) => return Ok((ingress, session, path)),
                Err(Setback::Final(reason, detail)) => {
                    tracing::debug!(%name, node = shared.identity.name(*to), ?reason, %detail, "no server");
                    refusals.add(*to, reason, detail);
                    if !lets_others_try(reason) {
                        return Err(refusals.failure(name).unwrap_or_else(|| no_node(name)));
                    }
                }
                Err(Setback::Passing(detail)) => {
                    tracing::debug!(%name, node = shared.identity.name(*to), %detail, "no session yet");
                    is_over = false;
                }
                Err(Setback::Late) => {
                    tracing::debug!(%name, node = shared.identity.name(*to), "no answer in time: no session yet");
                    is_over = false;
                }
            }
        }
        if !is_over {
            sleep(rest).await;
            rest = (rest * 2).min(REST_MAX);
        }
    }
}

/// Asks one member for at most `patience`, over one path after the other until there is none left that has not failed.
///
/// # Errors
/// Fails if the system has no random numbers for an id.
async fn ask(
    ingress: &Ingress,
    avoid: &mut BTreeSet<NodeId>,
    patience: Duration,
) -> Result<Result<(SessionId, (Path, frame::Path)), Setback>, Failure> {
    let (mut rest, until) = (REST_FIRST, Instant::now() + patience);
    loop {
        let session = new_session().map_err(|error| Failure::new(EndReason::Internal, error.to_string()))?;
        let tried = avoid.len();
        let left = until.saturating_duration_since(Instant::now());
        match ingress.attempt(session, None, Endpoint::first_window(), avoid, left).await {
            Ok(path) => return Ok(Ok((session, path))),
            // A relay of the path failed: there may be another one.
            Err(Setback::Passing(detail)) if avoid.len() > tried => {
                tracing::debug!(node = %ingress.node(), %detail, "another path");
            }
            Err(setback) => return Ok(Err(setback)),
        }
        sleep(rest).await;
        rest = (rest * 2).min(REST_MAX);
    }
}

/// Returns the nodes that a carrier names, in the order in which they are asked. Empty if there is no such node, or no member of the
/// group can be reached.
pub(super) fn destinations(shared: &Shared, name: &str) -> Vec<NodeId> {
    match name.strip_prefix(NEAREST) {
        Some(group) => group.parse().map(|group| datagrams::by_distance(shared, &group)).unwrap_or_default(),
        None => shared.identity.node_named(name).into_iter().collect(),
    }
}

/// Returns why there is no node to ask.
pub(super) fn no_node(name: &str) -> Failure {
    let detail = match name.strip_prefix(NEAREST) {
        Some(group) => format!("no other member of the group '{group}' can be reached"),
        None => format!("the overlay has no node '{name}'"),
    };
    Failure::new(EndReason::Unreachable, detail)
}

/// Whether a refusal is about this member's way to its server, so that another member may succeed. What a member's rules deny is an
/// answer: a farther member is not asked to allow it.
fn lets_others_try(refusal: Refusal) -> bool {
    match refusal {
        Refusal::ConnectionRefused
        | Refusal::Unreachable
        | Refusal::TimedOut
        | Refusal::Dns
        | Refusal::Limit
        | Refusal::NoLink => true,
        Refusal::Denied | Refusal::BadRequest | Refusal::UnknownSession => false,
    }
}

/// The members that have refused a flow. There are at most as many as nodes.
#[derive(Default)]
struct Refusals(Vec<(NodeId, Refusal, String)>);

impl Refusals {
    fn add(&mut self, by: NodeId, reason: Refusal, detail: String) {
        self.0.push((by, reason, detail));
    }

    /// Returns these members without those that have refused.
    fn without(&self, mut members: Vec<NodeId>) -> Vec<NodeId> {
        members.retain(|member| self.0.iter().all(|(by, ..)| by != member));
        members
    }

    /// Returns the reason of the last refusal, with what all of them said. `None`: no member has refused.
    fn failure(&self, name: &str) -> Option<Failure> {
        let (_, reason, _) = self.0.last()?;
        let said: Vec<_> = self.0.iter().map(|(_, _, detail)| detail.as_str()).collect();
        Some(failure(*reason, name, said.join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_that_refused_are_not_asked_again_and_the_last_reason_counts() {
        let (one, two, three) = (NodeId(1), NodeId(2), NodeId(3));
        let mut refusals = Refusals::default();
        assert!(refusals.failure("nearest:web").is_none());
        refusals.add(two, Refusal::ConnectionRefused, "b: connection refused".into());
        assert_eq!(refusals.without(vec![two, one, three]), [one, three]);
        refusals.add(one, Refusal::TimedOut, "a: timed out".into());
        assert_eq!(refusals.without(vec![one, two]), []);
        let failure = refusals.failure("nearest:web").unwrap();
        assert_eq!(failure.reason, EndReason::ConnectTimeout);
        assert_eq!(failure.detail, "overlay:nearest:web: b: connection refused; a: timed out");
    }

    #[test]
    fn what_a_member_denies_is_final() {
        for refusal in [Refusal::Denied, Refusal::BadRequest, Refusal::UnknownSession] {
            assert!(!lets_others_try(refusal));
        }
        for refusal in [
            Refusal::ConnectionRefused,
            Refusal::Unreachable,
            Refusal::TimedOut,
            Refusal::Dns,
            Refusal::Limit,
        ] {
            assert!(lets_others_try(refusal));
        }
    }
}
