//! Finds the processes behind connections that pass through, for rules that ask. A process is on this host if it lives in
//! a container or another network namespace. Searching /proc takes milliseconds, so a separate thread does it.

use crate::process::in_any_network;
use rustix::event::{EventfdFlags, eventfd};
use sidetrack_core::flow::Process;
use sidetrack_core::shunt::{Identity, Tuple};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

/// Most requests that wait; further ones are not searched for.
const WAITING_MAX: usize = 1024;

/// One connection.
type Whose = (Tuple, Identity);

/// Searches for processes. The thread starts with the first request, and ends with this value.
pub(super) struct OwnerSearch {
    ask: Option<SyncSender<Whose>>,
    /// For the thread, and for requests that are not given to it.
    answer: Sender<(Whose, Process)>,
    answers: Receiver<(Whose, Process)>,
    /// The number of requests without an answer.
    open: usize,
    /// Readable when there is an answer.
    bell: Arc<OwnedFd>,
}

impl OwnerSearch {
    /// Returns a search without a thread.
    ///
    /// # Errors
    /// Fails if no descriptor is left.
    pub(super) fn new() -> io::Result<Self> {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (answer, answers) = channel();
        Ok(Self { ask: None, answer, answers, open: 0, bell })
    }

    /// Searches for the process behind a connection.
    pub(super) fn look_for(&mut self, whose: Whose) {
        if self.ask.is_none() {
            self.ask =
                self.start().inspect_err(|error| tracing::warn!(%error, "no thread for processes")).ok();
        }
        self.open += 1;
        let is_asked = self.ask.as_ref().is_some_and(|ask| ask.try_send(whose).is_ok());
        if !is_asked {
            tracing::warn!(flow = %whose.0, "too many connections at once ask for their process: it is not looked for");
            say(&self.answer, &self.bell, (whose, Process::default()));
        }
    }

    fn start(&self) -> io::Result<SyncSender<Whose>> {
        let (ask, asked) = sync_channel::<Whose>(WAITING_MAX);
        let (answer, bell) = (self.answer.clone(), self.bell.clone());
        let look = move || {
            for (tuple, identity) in asked {
                let process = in_any_network(tuple.client(), tuple.server());
                say(&answer, &bell, ((tuple, identity), process));
            }
        };
        std::thread::Builder::new().name("owners".into()).spawn(look)?;
        Ok(ask)
    }

    /// Returns the available answers. The process is unknown if it was not found, or the client is on another host.
    pub(super) fn answers(&mut self) -> Vec<(Whose, Process)> {
        if self.open == 0 {
            return Vec::new();
        }
        // The bell is reset before the answers are taken, so that a later answer rings it again. An error means that it
        // was not rung.
        let _ = rustix::io::read(&*self.bell, &mut [0_u8; 8]);
        let answers: Vec<_> = self.answers.try_iter().collect();
        self.open -= answers.len();
        answers
    }
}

fn say(answer: &Sender<(Whose, Process)>, bell: &OwnedFd, found: (Whose, Process)) {
    if answer.send(found).is_ok() {
        // If the counter is full, the reader is woken anyway.
        let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
    }
}

impl AsFd for OwnerSearch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
