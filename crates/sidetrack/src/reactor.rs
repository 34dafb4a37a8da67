//! The event loop of a worker: one thread's epoll instance, its tasks and its timers.
//!
//! It is our own because a relay that dials for every connection pays for each call to the kernel. A socket is
//! registered once, edge-triggered, for all it may ever tell, and leaves the epoll instance with its close; a task is
//! polled on the thread that owns it and woken without an atomic queue. What is not on the path of every flow (names,
//! other protocols' libraries) stays with tokio: a worker enters the context of a runtime beside the workers, so that whatever needs
//! it finds it, and is woken across threads (`docs/adr/0005-own-event-loop.md` has the measurement).

mod lull;
mod net;
mod task;
mod timer;

pub use net::{QuicRuntime, TcpListener, TcpStream};
pub use task::{block_on, spawn, yield_now};
pub use timer::{Elapsed, Sleep, sleep, timeout, timeout_at};

use lull::{Lull, SHORT};
use net::Sources;
use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use task::{Remote, Tasks};
use timer::Timers;

/// Most events taken from the kernel at once.
const EVENTS_MAX: usize = 256;

/// Tells the eventfd, by which other threads wake the loop, from sockets.
const REMOTE: u64 = u64::MAX;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Loop>>> = const { RefCell::new(None) };
    static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// The time: inside a loop, when the events at hand were taken from the kernel, which is when they came; it costs
/// nothing then. Elsewhere the clock's.
pub fn now() -> Instant {
    NOW.get().unwrap_or_else(Instant::now)
}

/// One thread's loop.
struct Loop {
    epoll: OwnedFd,
    sources: RefCell<Sources>,
    tasks: Tasks,
    timers: RefCell<Timers>,
    remote: Arc<Remote>,
    events: RefCell<Vec<epoll::Event>>,
    lull: Cell<Lull>,
}

impl std::fmt::Debug for Loop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loop").field("epoll", &self.epoll).finish_non_exhaustive()
    }
}

impl Loop {
    fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(REMOTE), flags)?;
        Ok(Self {
            epoll,
            sources: RefCell::default(),
            tasks: Tasks::default(),
            timers: RefCell::default(),
            remote: Arc::new(Remote::new(wake)),
            events: RefCell::new(Vec::with_capacity(EVENTS_MAX)),
            lull: Cell::default(),
        })
    }

    /// The loop of this thread.
    ///
    /// # Panics
    /// Outside of [`block_on`].
    fn current() -> Rc<Self> {
        CURRENT.with_borrow(Clone::clone).expect("sockets, tasks and timers of a worker live inside its loop")
    }

    /// Takes what the kernel has, waiting for it if nothing else is to be done, and wakes whom it concerns.
    fn turn(&self) -> io::Result<()> {
        let mut events = self.events.borrow_mut();
        events.clear();
        let now = if self.tasks.is_ready() || self.remote.is_rung() {
            self.look(&mut events, Some(Duration::ZERO))?
        } else {
            self.wait(&mut events)?
        };
        NOW.set(Some(now));
        let mut sources = self.sources.borrow_mut();
        for event in events.iter() {
            match event.data.u64() {
                REMOTE => self.remote.clear(),
                key => sources.notice(key, event.flags),
            }
        }
        drop(sources);
        self.remote.take(&self.tasks);
        self.timers.borrow_mut().wake_due(now);
        Ok(())
    }

    /// Sleeps until something happens; where that was a matter of a few microseconds lately, it is looked for first. To be
    /// woken costs more than that, and most of it those who wake us. Returns the time when it was over.
    fn wait(&self, events: &mut Vec<epoll::Event>) -> io::Result<Instant> {
        let (begin, mut lull) = (Instant::now(), self.lull.get());
        let wait = self.timers.borrow().next().map(|at| at.saturating_duration_since(begin));
        let mut now = begin;
        if lull.is_short() && wait.is_none_or(|wait| wait > SHORT) {
            while events.is_empty() && now.duration_since(begin) < SHORT {
                now = self.look(events, Some(Duration::ZERO))?;
            }
        }
        if events.is_empty() {
            now = self.look(events, wait)?;
        }
        lull.lasted(now.duration_since(begin));
        self.lull.set(lull);
        Ok(now)
    }

    /// Takes events, waiting for the first at most so long; none: without an end. Returns the time after it.
    fn look(&self, events: &mut Vec<epoll::Event>, wait: Option<Duration>) -> io::Result<Instant> {
        // Rounded up by the kernel to its own grain; a deadline is never early.
        let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
        match epoll::wait(&self.epoll, spare_capacity(events), wait.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(Instant::now()),
            Err(error) => Err(error.into()),
        }
    }
}
