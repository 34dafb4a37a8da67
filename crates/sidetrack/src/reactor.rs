//! The event loop of a worker: one thread's epoll instance, its tasks and its timers.
//!
//! A loop of our own, because a relay that dials for each connection pays for each system call. A socket is
//! registered once, edge-triggered, for all events, and is removed by its close. A task is polled on its own
//! thread and woken without an atomic queue. Work that not every flow needs (name resolution, other protocols'
//! libraries) stays with tokio: a worker enters the context of a tokio runtime that runs beside the workers and
//! wakes it across threads (`docs/adr/0005-own-event-loop.md` has the measurement).

mod lull;
mod net;
pub mod profile;
mod task;
mod timer;

pub use net::{Arrival, QuicRuntime, TcpListener, TcpStream, UdpSocket, arrival, proven};
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

/// Most events taken from the kernel in one call.
const EVENTS_MAX: usize = 256;

/// The key of the eventfd, by which other threads wake the loop. Sockets have other keys.
const REMOTE: u64 = u64::MAX;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Loop>>> = const { RefCell::new(None) };
    static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// The present time. Inside a loop: when the current events were taken from the kernel, which costs no clock
/// call. Elsewhere: the clock's time.
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

    /// Returns the loop of this thread.
    ///
    /// # Panics
    /// Outside of [`block_on`].
    fn current() -> Rc<Self> {
        CURRENT.with_borrow(Clone::clone).expect("sockets, tasks and timers of a worker live inside its loop")
    }

    /// Takes the kernel's events and wakes the tasks they concern. Waits for events if there is no other work.
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

    /// Waits until something happens. If recent waits took only a few microseconds, polls for that time first: a
    /// wake-up costs more, most of it in the thread that wakes us. Returns the time at its end.
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

    /// Takes events, waiting at most `wait` for the first; `None`: without limit. Returns the time at its end.
    fn look(&self, events: &mut Vec<epoll::Event>, wait: Option<Duration>) -> io::Result<Instant> {
        // The kernel rounds up to its own resolution, so a deadline is never early.
        let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
        match epoll::wait(&self.epoll, spare_capacity(events), wait.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(Instant::now()),
            Err(error) => Err(error.into()),
        }
    }
}
