//! Decides whether the end of a side is in order, where a side is a function in a container. If a function ends
//! a flow that neither the client nor the server has ended, it has cut the flow. That must not look like an
//! orderly end.

use super::Pump;
use crate::carry::Wire;
use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::splice::Input;
use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Context;

/// Which ends of a flow have sent their FIN. Shared by the pumps of its parts.
#[derive(Debug, Default)]
pub struct Ends {
    client: Cell<bool>,
    server: Cell<bool>,
}

/// The functions at the sides of one part of a flow.
#[derive(Debug)]
pub struct Law {
    /// The ends of the whole flow.
    pub ends: Rc<Ends>,
    /// The function on the client's side of this part, if there is one.
    pub client: Option<Arc<str>>,
    /// The function on the server's side of this part, if there is one.
    pub server: Option<Arc<str>>,
    /// Whether the server-side function has received all that the server sent, with its end. The next part sets
    /// it.
    pub handed: Rc<Cell<bool>>,
    /// The same for the client-side function: this part sets it for the part before.
    pub hands: Rc<Cell<bool>>,
}

impl Law {
    /// Whether this side may end now. Notes the end if the side is the client or the server of the flow.
    ///
    /// A function may end towards the server once the client or the server has ended: it needs no more bytes
    /// then. (Proxies without half-closed connections close both sides.) Towards the client it may end only
    /// after it has received all that the server sent. Otherwise a cut answer would look complete.
    fn may_end(&self, side: Side) -> Result<(), &Arc<str>> {
        let Ends { client, server } = &*self.ends;
        match (side, &self.client, &self.server) {
            (Side::Client, None, _) => client.set(true),
            (Side::Server, _, None) => server.set(true),
            _ => return self.cut_by(side).map_or(Ok(()), Err),
        }
        Ok(())
    }

    /// Returns the function that would cut the flow if this side ended now.
    fn cut_by(&self, side: Side) -> Option<&Arc<str>> {
        let Ends { client, server } = &*self.ends;
        match side {
            Side::Client => self.client.as_ref().filter(|_| !client.get() && !server.get()),
            Side::Server => self.server.as_ref().filter(|_| !self.handed.get()),
        }
    }
}

impl<W: Wire> Pump<W> {
    /// Makes this the pump of one part of a flow that passes through containers.
    pub fn under(mut self, law: Law) -> Self {
        self.law = Some(Box::new(law));
        self
    }

    /// Returns the core's input for the end of a side that may not end now.
    pub(super) fn judge_end(&mut self, side: Side) -> Option<Input> {
        let function = self.law.as_ref()?.may_end(side).err()?;
        let words = format!("function '{function}': ended the flow, which neither side had done");
        self.error = Some(io::Error::other(words));
        Some(Input::End(EndReason::FunctionFailed))
    }

    /// Whether bytes to this side are an answer for a function to pass on.
    pub(super) fn hands_to_function(&self, side: Side) -> bool {
        side == Side::Client && self.law.as_ref().is_some_and(|law| law.client.is_some())
    }

    /// Called after the FIN was sent to this side. A function that had closed its side before answers with a
    /// reset, which has arrived by now: it did not take the last bytes.
    pub(super) fn hand_end(&mut self, side: Side) -> io::Result<()> {
        if self.hands_to_function(side) {
            self.wire(side).take_error().map_or(Ok(()), Err)?;
            self.law.iter().for_each(|law| law.hands.set(true));
        }
        Ok(())
    }

    /// Like [`Pump::hand_end`], but sends the FIN first, where closing would send it. The function's reaction
    /// must be seen.
    pub(super) fn hand_last_end(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let is_owed = |law: &Law| law.client.is_some() && !law.hands.get();
        if self.law.as_ref().is_some_and(|law| is_owed(law)) {
            self.wire(Side::Client).finish(cx)?;
            self.hand_end(Side::Client)?;
        }
        Ok(())
    }

    /// Whether an end of this side would count as orderly now.
    pub(super) fn would_end_in_order(&self, side: Side) -> bool {
        self.law.as_ref().is_none_or(|law| law.cut_by(side).is_none())
    }

    /// Ends both sides at once with resets.
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
