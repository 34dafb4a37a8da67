//! Connections to servers that belong to one client connection, because a message on them may have authenticated them
//! (NTLM, Negotiate). They never go to the pool: another client's request would be served with this client's rights.

use super::pool::{Route, Server};
use std::cell::RefCell;

/// At most this number of servers per client connection: a proxy's client may talk to several in turn.
const SERVERS_MAX: usize = 8;

/// The server connections of one client connection.
#[derive(Debug, Default)]
pub(super) struct Bound(RefCell<Vec<(Route, Server)>>);

impl Bound {
    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// Takes the connection to the server of this route, if there is one and it is still open.
    pub(super) fn take(&self, route: &Route) -> Option<Server> {
        let mut held = self.0.borrow_mut();
        let at = held.iter().position(|(other, _)| other.leads_where(route))?;
        let (_, server) = held.swap_remove(at);
        server.stream.is_quiet().then_some(server)
    }

    /// Keeps a connection that is idle. At the limit the oldest is closed, and its client has to authenticate again.
    pub(super) fn put(&self, route: &Route, mut server: Server) {
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
