//! Functions on flows of UDP: those that count bytes and never touch them.

use super::Library;
use sidetrack_core::flow::{Flow, Side};
use sidetrack_core::function::{ChainSpec, Interest, Stage, Stop};
use sidetrack_core::time::Instant;

/// The functions of one flow of UDP, in order from the client to the server.
pub struct Datagrams(Vec<Box<dyn Stage>>);

impl std::fmt::Debug for Datagrams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Datagrams").field(&self.0.len()).finish()
    }
}

impl Library {
    /// Makes the functions of one flow of UDP. `None`: there are none.
    ///
    /// # Errors
    /// Fails if a function ends the flow at once.
    pub fn datagrams(&self, spec: Option<&ChainSpec>, flow: &Flow) -> Result<Option<Box<Datagrams>>, Stop> {
        let Some(spec) = spec.filter(|spec| !spec.functions.is_empty()) else { return Ok(None) };
        let mut named = Vec::new();
        self.named(&spec.functions, flow, &mut named)?;
        Ok(Some(Box::new(Datagrams(named.into_iter().map(|(_, stage)| stage).collect()))))
    }
}

impl Datagrams {
    /// Whether a datagram of this many bytes passes. A datagram is never held back: one for which a function has no bandwidth
    /// is to be dropped, and no function behind it counts it.
    pub fn passes(&mut self, now: Instant, from: Side, bytes: usize) -> bool {
        let mut pass = |stage: &mut Box<dyn Stage>| {
            if stage.interest(from) != Interest::Count {
                return true;
            }
            // A bandwidth that is not used up carries a whole datagram, and goes into debt.
            if bytes > 0 && stage.allowance(now, from) == 0 {
                return false;
            }
            stage.count(now, from, bytes);
            true
        };
        match from {
            Side::Client => self.0.iter_mut().all(&mut pass),
            Side::Server => self.0.iter_mut().rev().all(&mut pass),
        }
    }
}
