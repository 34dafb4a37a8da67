//! Flows of a process that has no overlay yet, through the overlay of the process before it: until an upgrade is final, the links
//! stay where they are, and the new process accepts connections already.
//!
//! ```text
//!   new process                                 old process
//!   Door  --Ask::Open, one end of a pair-->  serve()  --Request--> sessions
//!         <--------Answer::Opened----------
//! ```
//!
//! Both ends are closed when the overlay changes hands. Requests without an answer are asked again then.

use super::control::Event;
use super::entry::Here;
use super::ingress::Request;
use super::moved::OrderPart;
use super::{Status, pair};
use crate::carry::{Entered, Failure, OverlayOrder};
use crate::live::Spread;
use crate::wire;
use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use sidetrack_core::flow::EndReason;
use sidetrack_core::overlay::session::Mode;
use sidetrack_sys::scm;
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::oneshot;

/// How long a message may wait for room. Both ends read at once, so there is room unless the other process hangs.
const SENT_WITHIN: Duration = Duration::from_millis(50);

/// Most questions without an answer.
const ASKED_MAX: usize = 65_536;

/// A question of the new process, with its number.
#[derive(Debug, Serialize, Deserialize)]
struct Ask {
    number: u64,
    what: What,
}

#[derive(Debug, Serialize, Deserialize)]
enum What {
    /// Open a session. One end of its connection comes along.
    Open(OrderPart),
    /// The state of the overlay.
    Status,
}

#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    number: u64,
    said: Said,
}

#[derive(Debug, Serialize, Deserialize)]
enum Said {
    Opened,
    /// The end reason and the detail.
    Failed(String, String),
    Status(Box<Status>),
}

/// The questions without an answer.
#[derive(Default)]
struct Waiting {
    next: u64,
    answers: BTreeMap<u64, oneshot::Sender<Said>>,
    is_closed: bool,
}

/// The side that asks.
pub(super) struct Door {
    end: Arc<OwnedFd>,
    waiting: Arc<Mutex<Waiting>>,
}

impl Drop for Door {
    fn drop(&mut self) {
        // Its thread reads the end then.
        let _ = scm::close(&*self.end);
    }
}

impl Door {
    /// Asks through this end.
    ///
    /// # Errors
    /// Fails if the system provides no thread.
    pub(super) fn new(end: OwnedFd) -> anyhow::Result<Self> {
        let _ = scm::send_within(&end, SENT_WITHIN);
        let (end, waiting) = (Arc::new(end), Arc::new(Mutex::new(Waiting::default())));
        let (reading, answered) = (end.clone(), waiting.clone());
        let read = move || {
            while let Ok(Some((Answer { number, said }, _))) = wire::receive::<Answer>(&*reading) {
                if let Some(waiting) = lock(&answered).answers.remove(&number) {
                    // The flow may have ended.
                    let _ = waiting.send(said);
                }
            }
            let mut left = lock(&answered);
            left.is_closed = true;
            left.answers.clear();
        };
        let thread = std::thread::Builder::new().name("overlay-door".to_owned()).spawn(read);
        thread.context("cannot start a thread for the way into the overlay")?;
        Ok(Self { end, waiting })
    }

    /// Asks. `None`: the door is closed.
    async fn ask(&self, what: What, fds: &[BorrowedFd<'_>]) -> Option<Said> {
        let (reply, answer) = oneshot::channel();
        let number = {
            let mut waiting = lock(&self.waiting);
            if waiting.is_closed {
                return None;
            }
            if waiting.answers.len() >= ASKED_MAX {
                let detail = "too many flows wait for the overlay of the process before this one";
                return Some(Said::Failed(EndReason::Limit.as_str().to_owned(), detail.to_owned()));
            }
            waiting.next += 1;
            let number = waiting.next;
            waiting.answers.insert(number, reply);
            number
        };
        if wire::send(&*self.end, &Ask { number, what }, fds).is_err() {
            lock(&self.waiting).answers.remove(&number);
            return None;
        }
        answer.await.ok()
    }

    /// Opens a session. `None`: the door is closed.
    pub(super) async fn open(&self, order: &OverlayOrder) -> Option<Result<Entered, Failure>> {
        let (near, leg) = match pair() {
            Ok(pair) => pair,
            Err(error) => {
                let detail = format!("a socket to the overlay: {error}");
                return Some(Err(Failure::new(EndReason::Internal, detail)));
            }
        };
        let said = self.ask(What::Open(OrderPart::of(order)), &[leg.as_fd()]).await?;
        match said {
            Said::Opened => Some(Ok(Entered { stream: near, spread: None })),
            Said::Failed(reason, detail) => {
                let known = EndReason::ALL.into_iter().find(|one| one.as_str() == reason);
                Some(Err(Failure::new(known.unwrap_or(EndReason::Internal), detail)))
            }
            Said::Status(_) => None,
        }
    }

    /// Returns the state of the overlay. `None`: the door is closed.
    pub(super) async fn status(&self) -> Option<Status> {
        match self.ask(What::Status, &[]).await? {
            Said::Status(status) => Some(*status),
            Said::Opened | Said::Failed(..) => None,
        }
    }
}

/// The side that answers; dropping this closes the door.
pub(super) struct Open(Arc<OwnedFd>);

impl Drop for Open {
    fn drop(&mut self) {
        let _ = scm::close(&*self.0);
    }
}

/// Opens a door to the overlay of this process. Returns the end for the other process, too.
///
/// # Errors
/// Fails if the system provides no sockets or no thread.
pub(super) fn open(here: Here) -> io::Result<(Open, OwnedFd)> {
    let (ours, theirs) = scm::pair()?;
    scm::send_within(&ours, SENT_WITHIN)?;
    let end = Arc::new(ours);
    let answering = end.clone();
    let serve = move || {
        while let Ok(Some((Ask { number, what }, fds))) = wire::receive::<Ask>(&*answering) {
            if !answer(&here, &answering, number, (what, fds)) {
                break;
            }
        }
        let _ = scm::close(&*answering);
    };
    std::thread::Builder::new().name("overlay-door".to_owned()).spawn(serve)?;
    Ok((Open(end), theirs))
}

/// Does what is asked, and answers once it is done. Returns false if the overlay leaves this process.
fn answer(here: &Here, end: &Arc<OwnedFd>, number: u64, (what, fds): (What, Vec<OwnedFd>)) -> bool {
    let Some(runtime) = here.shared.flows.get() else { return false };
    let end = end.clone();
    // Without room the other process hangs, and everything is taken back.
    let say = move |said| drop(wire::send(&*end, &Answer { number, said }, &[]));
    match what {
        What::Open(order) => {
            let (Ok(order), Some(leg)) = (order.order(), fds.into_iter().next()) else { return true };
            let (reply, opened) = oneshot::channel();
            let spread = (order.carrier.mode != Mode::Shortest).then(Arc::<Spread>::default);
            let request = Request { order, leg: TcpStream::from(leg), spread, reply };
            runtime.spawn(async move {
                // Without a result the overlay leaves this process: the other one asks again.
                if let Ok(opened) = opened.await {
                    say(match opened {
                        Ok(_session) => Said::Opened,
                        Err(Failure { reason, detail, .. }) => Said::Failed(reason.as_str().into(), detail),
                    });
                }
            });
            here.requests.blocking_send(request).is_ok()
        }
        What::Status => {
            let (reply, status) = oneshot::channel();
            let control = here.shared.control.clone();
            runtime.spawn(async move {
                if control.send(Event::Status(reply)).await.is_ok()
                    && let Ok(status) = status.await
                {
                    say(Said::Status(Box::new(status)));
                }
            });
            true
        }
    }
}
