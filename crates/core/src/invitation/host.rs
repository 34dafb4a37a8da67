//! The host's side of one invitation: which guest may go on, and when the invitation is over.
//!
//! ```text
//!                 ask, right                take              written            finish
//!   Open ------------------------> Open ---------> Writing ---------> Given ---------------> Over(Joined)
//!    |  \                           ^               |  |               |  \
//!    |   \ ask, wrong, WRONG_MAX    +-- not written-+  | others: Busy  |   \ take by the same key: Again
//!    |    +----> Over(Guessed)                                         |    \ other keys: Used
//!    | expire                                                          | expire
//!    +---------> Over(Expired)                                         +---------> Over(Unconfirmed)
//! ```
//!
//! `Given` exists because the last message can be lost: the guest's key is in the host's configuration, and the guest may not know.
//! The guest may repeat the join with the same key until the invitation expires. A guest with another key is refused.

use super::Refusal;

/// Wrong proofs after which an invitation is void. A secret has 128 bits, so this many guesses find nothing.
pub const WRONG_MAX: u32 = 20;

/// How an invitation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest has joined and said so.
    Joined,
    /// No guest has joined in time.
    Expired,
    /// The guest's key was written, and the guest did not confirm.
    Unconfirmed,
    /// Too many wrong proofs came.
    Guessed,
}

/// What the host does after a `Take`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// Write the guest's key now, then call [`Host::written`].
    Write,
    /// It is written already: confirm it again.
    Again,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State<K> {
    Open,
    Writing(K),
    Given(K),
    Over(End),
}

/// One invitation at the host. `K` is the key of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host<K> {
    state: State<K>,
    wrong: u32,
}

impl<K> Default for Host<K> {
    fn default() -> Self {
        Self { state: State::Open, wrong: 0 }
    }
}

impl<K: Eq + Clone> Host<K> {
    /// A guest with this key has asked, with a right or a wrong proof.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn ask(&mut self, key: &K, is_right: bool) -> Result<(), Refusal> {
        self.is_over()?;
        if !is_right {
            self.wrong = (self.wrong + 1).min(WRONG_MAX);
            // After a guest was given the invitation, wrong proofs cannot take it from this guest.
            if self.wrong >= WRONG_MAX && self.state == State::Open {
                self.state = State::Over(End::Guessed);
            }
            return Err(Refusal::Proof);
        }
        match &self.state {
            State::Given(other) if other != key => Err(Refusal::Used),
            _ => Ok(()),
        }
    }

    /// A guest, whose proof was right, wants to be written.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn take(&mut self, key: &K) -> Result<Take, Refusal> {
        self.is_over()?;
        match &self.state {
            State::Writing(_) => Err(Refusal::Busy),
            State::Given(other) if other == key => Ok(Take::Again),
            State::Given(_) => Err(Refusal::Used),
            State::Open | State::Over(_) => {
                self.state = State::Writing(key.clone());
                Ok(Take::Write)
            }
        }
    }

    /// The key of the guest was written, or could not be: then the invitation is as it was.
    pub fn written(&mut self, is_written: bool) {
        if let State::Writing(key) = &self.state {
            self.state = if is_written { State::Given(key.clone()) } else { State::Open };
        }
    }

    /// The guest has written its own configuration.
    pub fn finish(&mut self, key: &K) {
        if matches!(&self.state, State::Given(given) if given == key) {
            self.state = State::Over(End::Joined);
        }
    }

    /// The time of the invitation is over.
    pub fn expire(&mut self) {
        self.state = match &self.state {
            State::Open => State::Over(End::Expired),
            State::Given(_) => State::Over(End::Unconfirmed),
            // What is being written is not taken back: `written` comes, and then this again.
            State::Writing(_) | State::Over(_) => return,
        };
    }

    /// Returns how the invitation ended, if it has.
    pub const fn end(&self) -> Option<End> {
        match self.state {
            State::Over(end) => Some(end),
            _ => None,
        }
    }

    fn is_over(&self) -> Result<(), Refusal> {
        match self.end() {
            None => Ok(()),
            Some(End::Joined) => Err(Refusal::Used),
            Some(End::Expired | End::Unconfirmed) => Err(Refusal::Expired),
            Some(End::Guessed) => Err(Refusal::Guessed),
        }
    }
}
