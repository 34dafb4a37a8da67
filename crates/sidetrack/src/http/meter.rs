//! Applies functions that only count to the content of requests: bandwidth limits hold for content from servers and from
//! the cache.

use crate::live::Clock;
use crate::reactor;
use sidetrack_core::chain::Chain;
use sidetrack_core::flow::Side;
use sidetrack_core::function::Interest;
use std::cell::RefCell;
use std::fmt;
use std::time::Duration;

/// Longest sleep if no function has a deadline.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// The functions of one request.
pub(super) struct Meter(RefCell<Chain>);

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meter")
    }
}

impl Meter {
    /// Returns a meter of these functions; `None` if one of them must see the bytes, which is not possible for requests.
    pub(super) fn new(chain: Chain) -> Option<Self> {
        let counts = |from| chain.interest(from) <= Interest::Count;
        (counts(Side::Client) && counts(Side::Server)).then(|| Self(RefCell::new(chain)))
    }

    /// Waits until bytes from this side may pass; counts and returns at least one, at most `wanted`.
    pub(super) async fn room(&self, clock: Clock, from: Side, wanted: usize) -> usize {
        loop {
            let wait = {
                let mut chain = self.0.borrow_mut();
                let now = clock.now();
                for side in [Side::Client, Side::Server] {
                    // These functions hold no bytes, so an error cannot occur.
                    let _ = chain.advance(now, side);
                }
                let room = chain.allowance(now, from).min(wanted);
                if room > 0 || wanted == 0 {
                    chain.count(now, from, room);
                    return room;
                }
                chain.deadline().map_or(ASK_AGAIN, |due| due.since(now))
            };
            reactor::sleep(wait).await;
        }
    }
}
