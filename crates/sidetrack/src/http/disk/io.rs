//! Threads that block on the disk, so that workers do not.

use sidetrack_sys::sync::lock;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// A few threads and their queue. On drop the threads finish the queued jobs and end.
#[derive(Debug)]
pub(super) struct Io(Arc<Queue>);

struct Queue {
    jobs: Mutex<Jobs>,
    more: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    is_closed: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Queue")
    }
}

impl Queue {
    fn serve(&self) {
        let mut jobs = lock(&self.jobs);
        loop {
            if let Some(job) = jobs.waiting.pop_front() {
                drop(jobs);
                // A job that panics loses its own answer, and does not stop other jobs.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                jobs = lock(&self.jobs);
            } else if jobs.is_closed {
                return;
            } else {
                jobs = self.more.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Io {
    /// Starts `threads` threads.
    ///
    /// # Errors
    /// The system has no more threads.
    pub(super) fn start(name: &str, threads: usize) -> io::Result<Self> {
        let queue = Arc::new(Queue { jobs: Mutex::default(), more: Condvar::new() });
        // Made first: if a thread cannot be started, dropping it ends the others.
        let io = Self(queue);
        for _ in 0..threads {
            let queue = io.0.clone();
            std::thread::Builder::new().name(name.to_owned()).spawn(move || queue.serve())?;
        }
        Ok(io)
    }

    /// Queues a job; jobs start in their order. The queue has no limit: the callers limit their jobs.
    pub(super) fn send(&self, job: impl FnOnce() + Send + 'static) {
        lock(&self.0.jobs).waiting.push_back(Box::new(job));
        self.0.more.notify_one();
    }

    /// Queues a job and waits for its result; `None` if it panicked.
    pub(super) async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        self.send(move || {
            // The caller may have gone.
            let _ = answer.send(job());
        });
        answered.await.ok()
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        lock(&self.0.jobs).is_closed = true;
        self.0.more.notify_all();
    }
}
