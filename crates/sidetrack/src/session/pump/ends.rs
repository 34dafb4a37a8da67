//! What the end of a side means where one side, or both, is a function in a container: a function that ends a flow which
//! nobody else has ended has cut it, and that must not look like an end in order.

use super::Pump;
use crate::carry::Wire;
use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::splice::Input;
use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Context;

/// Which ends of a flow have said their last byte; shared by the pumps of its parts.
#[derive(Debug, Default)]
pub struct Ends {
    client: Cell<bool>,
    server: Cell<bool>,
}

/// What one part of a flow has for sides.
#[derive(Debug)]
pub struct Law {
    /// Of the whole flow.
    pub ends: Rc<Ends>,
    /// The function that the part has for its client, if it is one.
    pub client: Option<Arc<str>>,
    /// The function that it has for its server.
    pub server: Option<Arc<str>>,
    /// Whether that function has been handed all that the server said, with its end: told by the next part.
    pub handed: Rc<Cell<bool>>,
    /// The same of the function that the part has for its client: what it tells the part before.
    pub hands: Rc<Cell<bool>>,
}

impl Law {
    /// Whether this side may say its last byte now; notes it of an end of the flow.
    ///
    /// A function may end towards the server when the client has ended, or the server: then nothing that comes is of use to it
    /// (proxies that know no half-closed connections close both sides). Towards the client it may end only when it has taken
    /// all that the server said: an answer is never cut in order.
    fn may_end(&self, side: Side) -> Result<(), &Arc<str>> {
        let Ends { client, server } = &*self.ends;
        match (side, &self.client, &self.server) {
            (Side::Client, None, _) => client.set(true),
            (Side::Server, _, None) => server.set(true),
            _ => return self.cut_by(side).map_or(Ok(()), Err),
        }
        Ok(())
    }

    /// The function that would cut the flow if this side said its last byte now.
    fn cut_by(&self, side: Side) -> Option<&Arc<str>> {
        let Ends { client, server } = &*self.ends;
        match side {
            Side::Client => self.client.as_ref().filter(|_| !client.get() && !server.get()),
            Side::Server => self.server.as_ref().filter(|_| !self.handed.get()),
        }
    }
}

impl<W: Wire> Pump<W> {
    /// The same as a part of a flow that passes containers.
    pub fn under(mut self, law: Law) -> Self {
        self.law = Some(Box::new(law));
        self
    }

    /// What the core is told of the end of a side that may not end now.
    pub(super) fn judge_end(&mut self, side: Side) -> Option<Input> {
        let function = self.law.as_ref()?.may_end(side).err()?;
        let words = format!("function '{function}': ended the flow, which neither side had done");
        self.error = Some(io::Error::other(words));
        Some(Input::End(EndReason::FunctionFailed))
    }

    /// Whether what goes to this side is an answer that a function is to pass on.
    pub(super) fn hands_to_function(&self, side: Side) -> bool {
        side == Side::Client && self.law.as_ref().is_some_and(|law| law.client.is_some())
    }

    /// An end has been sent to this side. A function that had closed its own before answers with a reset, which is here by now:
    /// it has not taken the last of it.
    pub(super) fn hand_end(&mut self, side: Side) -> io::Result<()> {
        if self.hands_to_function(side) {
            self.wire(side).take_error().map_or(Ok(()), Err)?;
            self.law.iter().for_each(|law| law.hands.set(true));
        }
        Ok(())
    }

    /// The same where closing would send the end: a function has to be seen taking it.
    pub(super) fn hand_last_end(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let is_owed = |law: &Law| law.client.is_some() && !law.hands.get();
        if self.law.as_ref().is_some_and(|law| is_owed(law)) {
            self.wire(Side::Client).finish(cx)?;
            self.hand_end(Side::Client)?;
        }
        Ok(())
    }

    /// Whether the end of this side would be taken for an end in order now.
    pub(super) fn would_end_in_order(&self, side: Side) -> bool {
        self.law.as_ref().is_none_or(|law| law.cut_by(side).is_none())
    }

    /// Ends at once, by resets.
    pub fn abort(&mut self) {
        self.close(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> [Law; 2] {
        let (ends, handed) = (Rc::new(Ends::default()), Rc::new(Cell::new(false)));
        let (function, nobody): (Arc<str>, _) = ("f".into(), Rc::default());
        [
            Law {
                ends: ends.clone(),
                client: None,
                server: Some(function.clone()),
                handed: handed.clone(),
                hands: Rc::default(),
            },
            Law { ends, client: Some(function), server: None, handed: nobody, hands: handed },
        ]
    }

    #[test]
    fn a_function_may_end_what_an_end_of_the_flow_has_ended() {
        let [near, far] = parts();
        assert!(far.may_end(Side::Client).is_err() && near.may_end(Side::Server).is_err());
        assert!(near.may_end(Side::Client).is_ok(), "the client itself");
        assert!(far.may_end(Side::Client).is_ok(), "what the client said is over");
        assert!(near.may_end(Side::Server).is_err(), "the answer is not");
        assert!(far.may_end(Side::Server).is_ok());
        assert!(near.may_end(Side::Server).is_err(), "it has not been given the answer's end");
        far.hands.set(true);
        assert!(near.may_end(Side::Server).is_ok());
    }

    #[test]
    fn when_the_server_has_ended_a_function_may_end_both_directions() {
        let [near, far] = parts();
        assert!(far.may_end(Side::Server).is_ok());
        assert!(far.may_end(Side::Client).is_ok());
        far.hands.set(true);
        assert!(near.may_end(Side::Server).is_ok());
    }
}
