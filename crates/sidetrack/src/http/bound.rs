//! Connections to servers that belong to one connection of a client, because a message on them may have authenticated
//! it (NTLM, Negotiate). They never go to the pool: another client's request would be served with this one's rights.

use super::pool::{Route, Server};
use std::cell::RefCell;

/// Most servers that one client's connection is authenticated at: a proxy's client may speak with several in turn.
const SERVERS_MAX: usize = 8;

/// The connections that belong to one connection of a client.
#[derive(Debug, Default)]
pub struct Bound(RefCell<Vec<(Route, Server)>>);

impl Bound {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// The connection to the server of this route, if there is one that still stands.
    pub fn take(&self, route: &Route) -> Option<Server> {
        let mut held = self.0.borrow_mut();
        let at = held.iter().position(|(other, _)| other.leads_where(route))?;
        let (_, server) = held.swap_remove(at);
        server.stream.is_quiet().then_some(server)
    }

    /// Keeps a connection on which nothing is under way. Beyond the limit the oldest is closed: its client has to
    /// authenticate again.
    pub fn put(&self, route: &Route, mut server: Server) {
        if !server.buffer.is_empty() {
            return;
        }
        server.is_reused = true;
        server.buffer.release();
        let mut held = self.0.borrow_mut();
        held.retain(|(other, _)| !other.leads_where(route));
        if held.len() >= SERVERS_MAX {
            held.remove(0);
        }
        held.push((route.clone(), server));
    }
}
