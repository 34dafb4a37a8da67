//! Tasks of one thread. A task is queued at most once; wakes from its own thread cost no lock.

use super::profile::Stage;
use super::{CURRENT, Loop, NOW};
use sidetrack_sys::sync::lock;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

/// The index of the future that was given to [`block_on`].
const MAIN: usize = usize::MAX;

/// The future of a task.
type Run = Pin<Box<dyn Future<Output = ()>>>;

/// What a waker knows about its task.
#[derive(Debug)]
pub(super) struct Header {
    index: usize,
    queued: AtomicBool,
    remote: Arc<Remote>,
}

impl Wake for Header {
    fn wake(self: Arc<Self>) {
        if self.is_to_be_queued() {
            self.enqueue();
        }
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.is_to_be_queued() {
            self.clone().enqueue();
        }
    }
}

impl Header {
    /// Marks the task as queued; returns whether it was not. The swaps here and in [`Tasks::run`] are atomic, so
    /// one sees the other. If a wake comes too late for the queue, the task has not polled its future yet and
    /// sees the event then.
    fn is_to_be_queued(&self) -> bool {
        !self.queued.swap(true, Ordering::AcqRel)
    }

    fn enqueue(self: Arc<Self>) {
        CURRENT.with_borrow(|current| match current {
            Some(own) if Arc::ptr_eq(&own.remote, &self.remote) => {
                own.tasks.ready.borrow_mut().push_back(self)
            }
            _ => self.remote.clone().push(self),
        });
    }
}

/// The queue by which other threads wake tasks.
#[derive(Debug)]
pub(super) struct Remote {
    /// Tasks that were woken and not yet taken, each at most once.
    woken: Mutex<Vec<Arc<Header>>>,
    rung: AtomicBool,
    bell: OwnedFd,
}

impl Remote {
    pub(super) fn new(bell: OwnedFd) -> Self {
        Self { woken: Mutex::default(), rung: AtomicBool::new(false), bell }
    }

    fn push(&self, header: Arc<Header>) {
        lock(&self.woken).push(header);
        if !self.rung.swap(true, Ordering::AcqRel) {
            // A write to a full eventfd counter fails, but then the loop wakes up anyway.
            let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }

    /// Whether another thread has woken a task.
    pub(super) fn is_rung(&self) -> bool {
        self.rung.load(Ordering::Acquire)
    }

    /// Resets the eventfd.
    pub(super) fn clear(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0_u8; 8]);
    }

    /// Queues the tasks that other threads have woken.
    pub(super) fn take(&self, tasks: &Tasks) {
        if self.rung.swap(false, Ordering::AcqRel) {
            let woken = std::mem::take(&mut *lock(&self.woken));
            tasks.ready.borrow_mut().extend(woken);
        }
    }
}

struct Task {
    /// `None` while it is being polled.
    future: Option<Run>,
    header: Arc<Header>,
}

/// All tasks of a thread.
#[derive(Default)]
pub(super) struct Tasks {
    slots: RefCell<Vec<Option<Task>>>,
    free: RefCell<Vec<usize>>,
    ready: RefCell<VecDeque<Arc<Header>>>,
    main_is_ready: Cell<bool>,
}

impl std::fmt::Debug for Tasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tasks").field("ready", &self.ready.borrow().len()).finish_non_exhaustive()
    }
}

impl Tasks {
    /// Whether a task is waiting to be polled.
    pub(super) fn is_ready(&self) -> bool {
        self.main_is_ready.get() || !self.ready.borrow().is_empty()
    }

    fn add(&self, future: Run, remote: &Arc<Remote>) {
        let mut slots = self.slots.borrow_mut();
        let index = self.free.borrow_mut().pop().unwrap_or_else(|| {
            slots.push(None);
            slots.len() - 1
        });
        let header = Arc::new(Header { index, queued: AtomicBool::new(true), remote: remote.clone() });
        slots[index] = Some(Task { future: Some(future), header: header.clone() });
        self.ready.borrow_mut().push_back(header);
    }

    /// Polls the tasks that are queued now. Tasks that these wake are polled in the next round.
    fn run(&self) {
        let queued = self.ready.borrow().len();
        for _ in 0..queued {
            let Some(header) = self.ready.borrow_mut().pop_front() else { return };
            // See `Header::is_to_be_queued`.
            header.queued.swap(false, Ordering::AcqRel);
            if header.index == MAIN {
                self.main_is_ready.set(true);
            } else {
                self.poll(header);
            }
        }
    }

    fn poll(&self, header: Arc<Header>) {
        let index = header.index;
        let taken = match self.slots.borrow_mut().get_mut(index) {
            // After a late wake of a finished task, its index may belong to another task, or be free.
            Some(Some(task)) if Arc::ptr_eq(&task.header, &header) => task.future.take(),
            _ => None,
        };
        let Some(mut future) = taken else { return };
        let waker = Waker::from(header);
        let polled =
            catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut Context::from_waker(&waker))));
        if matches!(polled, Ok(Poll::Pending)) {
            if let Some(Some(task)) = self.slots.borrow_mut().get_mut(index) {
                task.future = Some(future);
            }
            return;
        }
        if polled.is_err() {
            tracing::error!("the task of a flow panicked; other flows continue");
        }
        self.slots.borrow_mut()[index] = None;
        self.free.borrow_mut().push(index);
        drop(future);
    }

    /// Drops all tasks. Dropping one may wake or add others, which are dropped too.
    fn clear(&self) {
        loop {
            self.ready.borrow_mut().clear();
            let slots = std::mem::take(&mut *self.slots.borrow_mut());
            self.free.borrow_mut().clear();
            if slots.is_empty() {
                return;
            }
        }
    }
}

/// Adds a task to the loop of this thread. A panic in it ends only this task.
///
/// # Panics
/// Outside of [`block_on`].
pub fn spawn(future: impl Future<Output = ()> + 'static) {
    let own = Loop::current();
    own.tasks.add(Box::pin(future), &own.remote);
}

/// Lets all other queued tasks run first.
pub async fn yield_now() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// On drop, removes the loop from the thread, also after a panic.
struct Leave(Rc<Loop>);

impl Drop for Leave {
    fn drop(&mut self) {
        self.0.tasks.clear();
        CURRENT.with_borrow_mut(|current| *current = None);
        NOW.set(None);
    }
}

/// Runs the loop on this thread until `main` is ready. Remaining tasks are dropped.
///
/// # Errors
/// Fails if the system gives no epoll instance, or if waiting on it fails.
pub fn block_on<T>(main: impl Future<Output = T>) -> io::Result<T> {
    let own = Rc::new(Loop::new()?);
    CURRENT.with_borrow_mut(|current| *current = Some(own.clone()));
    let leave = Leave(own);
    let own = &leave.0;
    let header = Arc::new(Header { index: MAIN, queued: AtomicBool::new(false), remote: own.remote.clone() });
    let waker = Waker::from(header);
    let mut main = pin!(main);
    own.tasks.main_is_ready.set(true);
    loop {
        let span = Stage::Loop.enter();
        if own.tasks.main_is_ready.take()
            && let Poll::Ready(done) = main.as_mut().poll(&mut Context::from_waker(&waker))
        {
            return Ok(done);
        }
        own.tasks.run();
        drop(span);
        own.turn()?;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{sleep, timeout};
    use super::*;
    use std::time::{Duration, Instant};

    /// A one-shot channel that counts polls.
    fn channel() -> (Rc<Cell<Option<Waker>>>, Rc<Cell<bool>>) {
        Default::default()
    }

    #[test]
    fn tasks_run_and_wake_each_other_and_main_ends_all() {
        let order = Rc::new(RefCell::new(Vec::new()));
        let (waker, done) = channel();
        let seen = order.clone();
        block_on(async move {
            let (theirs, flag, log) = (waker.clone(), done.clone(), seen.clone());
            spawn(async move {
                poll_fn(|cx| {
                    theirs.set(Some(cx.waker().clone()));
                    if flag.get() { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                log.borrow_mut().push("woken");
            });
            yield_now().await;
            seen.borrow_mut().push("main");
            done.set(true);
            waker.take().unwrap().wake();
            yield_now().await;
            yield_now().await;
            spawn(async { std::future::pending().await });
        })
        .unwrap();
        assert_eq!(*order.borrow(), ["main", "woken"]);
        assert!(CURRENT.with_borrow(Option::is_none));
    }

    #[test]
    fn a_panic_ends_its_task_alone() {
        let ended = Rc::new(Cell::new(false));
        let seen = ended.clone();
        block_on(async move {
            spawn(async { panic!("this one only") });
            spawn(async move { seen.set(true) });
            yield_now().await;
            yield_now().await;
        })
        .unwrap();
        assert!(ended.get());
    }

    #[test]
    fn another_thread_wakes_a_loop_that_waits() {
        let (send, receive) = tokio::sync::oneshot::channel();
        let mut thread = None;
        let got = block_on(async {
            thread = Some(std::thread::spawn(move || send.send(7)));
            receive.await
        });
        assert_eq!(got.unwrap(), Ok(7));
        assert_eq!(thread.unwrap().join().unwrap(), Ok(()));
    }

    #[test]
    fn wakes_from_many_threads_are_never_lost() {
        let total = block_on(async {
            let (send, mut receive) = tokio::sync::mpsc::unbounded_channel();
            for thread in 0..4_u64 {
                let send = send.clone();
                std::thread::spawn(move || (0..10_000).for_each(|n| send.send(thread * 10_000 + n).unwrap()));
            }
            drop(send);
            let mut total = 0;
            while let Some(n) = receive.recv().await {
                total += n;
            }
            total
        });
        assert_eq!(total.unwrap(), 40_000 * 39_999 / 2);
    }

    #[test]
    fn a_late_wake_of_a_task_that_is_gone_does_nothing() {
        let (waker, _) = channel();
        let polls = Rc::new(Cell::new(0));
        let count = polls.clone();
        block_on(async move {
            let theirs = waker.clone();
            spawn(poll_fn(move |cx| {
                theirs.set(Some(cx.waker().clone()));
                Poll::Ready(())
            }));
            yield_now().await;
            // This task gets the index of the first.
            spawn(poll_fn(move |_| {
                count.set(count.get() + 1);
                Poll::Pending
            }));
            yield_now().await;
            waker.take().unwrap().wake();
            yield_now().await;
            yield_now().await;
        })
        .unwrap();
        assert_eq!(polls.get(), 1);
    }

    #[test]
    fn timers_fire_in_order_and_those_dropped_never() {
        block_on(async move {
            let order = Rc::new(RefCell::new(Vec::new()));
            let start = Instant::now();
            for ms in [30_u64, 10, 20] {
                let seen = order.clone();
                spawn(async move {
                    sleep(Duration::from_millis(ms)).await;
                    assert!(start.elapsed() >= Duration::from_millis(ms));
                    seen.borrow_mut().push(ms);
                });
            }
            assert!(timeout(Duration::from_millis(1), std::future::pending::<()>()).await.is_err());
            assert_eq!(timeout(Duration::from_secs(60), async { 5 }).await, Ok(5));
            // On a busy machine all timers may be due in the same turn, in which this task runs first.
            for _ in 0..1000 {
                if order.borrow().len() == 3 {
                    break;
                }
                sleep(Duration::from_millis(10)).await;
            }
            assert_eq!(*order.borrow(), [10, 20, 30]);
        })
        .unwrap();
    }
}
