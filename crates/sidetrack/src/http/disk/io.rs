//! Threads that wait for the disk, so that no worker does.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// A few threads and their queue. When it is dropped they finish what is queued, and end.
#[derive(Debug)]
pub struct Io(Arc<Queue>);

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
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut jobs = self.lock();
        loop {
            if let Some(job) = jobs.waiting.pop_front() {
                drop(jobs);
                // A job that panics takes its answer with it, and no other job.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                jobs = self.lock();
            } else if jobs.is_closed {
                return;
            } else {
                jobs = self.more.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Io {
    /// Starts so many threads.
    ///
    /// # Errors
    /// The system has no more threads.
    pub fn start(name: &str, threads: usize) -> io::Result<Self> {
        let queue = Arc::new(Queue { jobs: Mutex::default(), more: Condvar::new() });
        // Made first: if a thread cannot be started, those that were end.
        let io = Self(queue);
        for _ in 0..threads {
            let queue = io.0.clone();
            std::thread::Builder::new().name(name.to_owned()).spawn(move || queue.serve())?;
        }
        Ok(io)
    }

    /// Queues a job; jobs are begun in their order. Whoever sends them bounds them.
    pub fn send(&self, job: impl FnOnce() + Send + 'static) {
        self.0.lock().waiting.push_back(Box::new(job));
        self.0.more.notify_one();
    }

    /// Queues a job and waits for what it gives; `None` if it panicked.
    pub async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        self.send(move || {
            // Who asked may have gone.
            let _ = answer.send(job());
        });
        answered.await.ok()
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
        self.0.more.notify_all();
    }
}
