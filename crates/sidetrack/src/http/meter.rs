//! Functions that only count, on the content of requests: bandwidth is kept whatever it comes from, a server or the
//! cache.

use crate::live::Clock;
use crate::reactor;
use sidetrack_core::chain::Chain;
use sidetrack_core::flow::Side;
use sidetrack_core::function::Interest;
use std::cell::RefCell;
use std::fmt;
use std::time::Duration;

/// Longest sleep where no function says when to ask again.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// The functions of one request.
pub struct Meter(RefCell<Chain>);

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meter")
    }
}

impl Meter {
    /// A meter of these functions; none if one of them has to see the bytes, which requests cannot pass.
    pub fn new(chain: Chain) -> Option<Self> {
        let counts = |from| chain.interest(from) <= Interest::Count;
        (counts(Side::Client) && counts(Side::Server)).then(|| Self(RefCell::new(chain)))
    }

    /// Waits until some bytes from this side may move, and counts them: at least one, at most `wanted`.
    pub async fn room(&self, clock: Clock, from: Side, wanted: usize) -> usize {
        loop {
            let wait = {
                let mut chain = self.0.borrow_mut();
                let now = clock.now();
                for side in [Side::Client, Side::Server] {
                    // Of functions that hold no bytes nothing can stop.
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
