//! How a flow used several paths of the overlay: counted by the overlay, told in the flow's record.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use sidetrack_core::overlay::session::PATHS_MAX;

/// The paths of one flow over the overlay, and the bytes of the client that this node has sent on each.
#[derive(Debug, Default)]
pub struct Spread {
    /// Paths that were open, in total: one that died and its successor are two.
    opened: AtomicU64,
    /// Bytes of the flow that were sent on the paths with each number, repeated ones included.
    sent: [AtomicU64; PATHS_MAX as usize],
}

impl Spread {
    /// Counts a path that is open now.
    pub fn opened(&self) {
        self.opened.fetch_add(1, Relaxed);
    }

    /// Returns all counts, for another process of this node that continues the flow.
    pub fn counts(&self) -> (u64, Vec<u64>) {
        (self.opened.load(Relaxed), self.sent_bytes().collect())
    }

    /// Returns counts that another process has begun.
    pub fn again((opened, sent): &(u64, Vec<u64>)) -> Self {
        let this = Self { opened: AtomicU64::new(*opened), ..Self::default() };
        this.sent.iter().zip(sent).for_each(|(place, bytes)| place.store(*bytes, Relaxed));
        this
    }

    /// Counts bytes that are sent on the path with this number.
    pub fn sent(&self, path: u8, bytes: usize) {
        if let Some(sent) = self.sent.get(usize::from(path)) {
            sent.fetch_add(bytes as u64, Relaxed);
        }
    }

    /// Returns the bytes sent on the paths with each number.
    pub fn sent_bytes(&self) -> impl Iterator<Item = u64> {
        self.sent.iter().map(|sent| sent.load(Relaxed))
    }
}

/// `3 paths opened, bytes sent on each: 600, 580`: a path that replaced another one counts with it.
impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let opened = self.opened.load(Relaxed);
        write!(f, "{opened} path{} opened", if opened == 1 { "" } else { "s" })?;
        let sent: Vec<_> = self.sent_bytes().collect();
        let used = sent.iter().rposition(|bytes| *bytes > 0).map_or(0, |last| last + 1);
        for (at, bytes) in sent[..used].iter().enumerate() {
            write!(f, "{}{bytes}", if at == 0 { ", bytes sent on each: " } else { ", " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_told_in_words() {
        let spread = Spread::default();
        spread.opened();
        assert_eq!(spread.to_string(), "1 path opened");
        assert_eq!(Spread::again(&spread.counts()).to_string(), spread.to_string());
        spread.opened();
        spread.sent(0, 600);
        spread.sent(1, 500);
        spread.sent(1, 80);
        // A number that no path has is not counted.
        spread.sent(PATHS_MAX, 7);
        assert_eq!(spread.to_string(), "2 paths opened, bytes sent on each: 600, 580");
    }
}
