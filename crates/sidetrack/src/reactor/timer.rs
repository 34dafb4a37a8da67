//! Timers of one thread.

use super::{Loop, now};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Timers that are waited for, ordered by time. The number distinguishes timers of the same time.
#[derive(Debug, Default)]
pub(super) struct Timers {
    waiting: BTreeMap<(Instant, u64), Waker>,
    count: u64,
}

impl Timers {
    /// The time of the first timer.
    pub(super) fn next(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|((at, _), _)| *at)
    }

    /// Wakes `waker` at this time. Keeps `number`, or assigns and returns a new one.
    pub(super) fn wait(&mut self, at: Instant, number: Option<u64>, waker: &Waker) -> u64 {
        let number = number.unwrap_or_else(|| {
            self.count += 1;
            self.count
        });
        self.waiting.insert((at, number), waker.clone());
        number
    }

    /// Removes a timer.
    pub(super) fn forget(&mut self, at: Instant, number: u64) {
        self.waiting.remove(&(at, number));
    }

    /// Wakes all timers that are due.
    pub(super) fn wake_due(&mut self, now: Instant) {
        while let Some(entry) = self.waiting.first_entry().filter(|entry| entry.key().0 <= now) {
            entry.remove().wake();
        }
    }
}

/// A timer; see [`sleep`].
#[derive(Debug)]
pub struct Sleep {
    at: Instant,
    /// The loop that it waits in, after the first poll.
    waiting: Option<(Rc<Loop>, u64)>,
}

/// Waits at least until this time.
pub(super) const fn sleep_until(at: Instant) -> Sleep {
    Sleep { at, waiting: None }
}

/// Returns the time after `wait`. A wait beyond the range of the clock becomes very long.
fn in_time(wait: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(wait).unwrap_or_else(|| now + Duration::from_secs(1 << 32))
}

/// Waits for at least this time.
pub fn sleep(wait: Duration) -> Sleep {
    sleep_until(in_time(wait))
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // The loop's time may lag behind the clock. A timer that became due meanwhile is seen in the loop's next
        // turn.
        if self.at <= now() {
            return Poll::Ready(());
        }
        let own = self.waiting.as_ref().map_or_else(Loop::current, |(own, _)| own.clone());
        let number = self.waiting.as_ref().map(|(_, number)| *number);
        let number = own.timers.borrow_mut().wait(self.at, number, cx.waker());
        self.waiting = Some((own, number));
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some((own, number)) = self.waiting.take() {
            own.timers.borrow_mut().forget(self.at, number);
        }
    }
}

/// The time limit was reached first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed;

/// Returns the output of `future` if it completes before `at`.
///
/// # Errors
/// Fails if the time limit is reached first.
pub async fn timeout_at<T>(at: Instant, future: impl Future<Output = T>) -> Result<T, Elapsed> {
    let mut future = pin!(future);
    let mut sleep = pin!(sleep_until(at));
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(done) => Poll::Ready(Ok(done)),
        Poll::Pending => sleep.as_mut().poll(cx).map(|()| Err(Elapsed)),
    })
    .await
}

/// Returns the output of `future` if it completes within `wait`.
///
/// # Errors
/// Fails if the time limit is reached first.
pub async fn timeout<T>(wait: Duration, future: impl Future<Output = T>) -> Result<T, Elapsed> {
    timeout_at(in_time(wait), future).await
}
