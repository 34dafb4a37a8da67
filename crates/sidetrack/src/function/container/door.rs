//! Where flows come back from a container. Each worker has one listener in the container's network, on all of
//! 127.0.0.0/8. The destination address of a connection identifies its flow.

use super::instance::Instance;
use crate::carry::Wire;
use crate::reactor::{self, TcpListener, TcpStream};
use sidetrack_core::function::Ticket;
use sidetrack_sys::{random, sockopt};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, SocketAddrV4};
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Poll, Waker};
use std::time::Duration;

thread_local! {
    /// The doors of this thread, by the number of the container.
    static DOORS: RefCell<BTreeMap<u64, Rc<Door>>> = const { RefCell::new(BTreeMap::new()) };
    /// Random numbers that are not used yet.
    static NUMBERS: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// Random numbers drawn in one call; the kernel returns up to 256 bytes without interruption.
const DRAWN_AT_ONCE: usize = 64;

/// Most flows of one worker that may be on their way through one container at a time.
const WAITING_MAX: usize = 65_536;

/// How long a door waits when a connection cannot be accepted.
const REST: Duration = Duration::from_millis(10);

/// The listener of one worker for one container, and the flows that wait there.
#[derive(Debug)]
pub(super) struct Door {
    port: u16,
    waiting: RefCell<BTreeMap<Ticket, Awaited>>,
}

/// The connection that a flow waits for.
#[derive(Debug, Default)]
struct Awaited {
    came: Option<TcpStream>,
    waker: Option<Waker>,
}

/// The place of one flow at a door; dropping it removes the flow.
#[derive(Debug)]
pub(super) struct Place {
    door: Rc<Door>,
    ticket: Ticket,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.door.waiting.borrow_mut().remove(&self.ticket);
    }
}

impl Door {
    /// Returns this thread's door of the container.
    ///
    /// # Errors
    /// Fails if the container is gone.
    pub(super) async fn of(instance: &Instance) -> io::Result<Rc<Self>> {
        let known = || DOORS.with_borrow(|doors| doors.get(&instance.number).cloned());
        if let Some(door) = known() {
            return Ok(door);
        }
        let listener = instance.listener().await.ok_or(io::ErrorKind::BrokenPipe)?;
        // Another flow may have opened the door during the wait.
        if let Some(door) = known() {
            return Ok(door);
        }
        let port = listener.local_addr()?.port();
        let door = Rc::new(Self { port, waiting: RefCell::default() });
        let listener = TcpListener::new(listener)?;
        DOORS.with_borrow_mut(|doors| doors.insert(instance.number, door.clone()));
        reactor::spawn(serve(Rc::downgrade(&door), listener, instance));
        Ok(door)
    }

    /// Returns a place for one flow.
    ///
    /// # Errors
    /// Fails if too many flows wait.
    pub(super) fn place(self: &Rc<Self>) -> io::Result<Place> {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.len() >= WAITING_MAX {
            return Err(io::Error::other("too many flows are on their way through the container"));
        }
        loop {
            let ticket = Ticket::from_random(drawn());
            if let std::collections::btree_map::Entry::Vacant(free) = waiting.entry(ticket) {
                free.insert(Awaited::default());
                return Ok(Place { door: self.clone(), ticket });
            }
        }
    }

    /// Gives a connection to the flow that waits for it. Returns false if no flow waits.
    fn deliver(&self, ticket: Ticket, stream: TcpStream) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        let Some(awaited) = waiting.get_mut(&ticket).filter(|awaited| awaited.came.is_none()) else {
            stream.close(true);
            return false;
        };
        awaited.came = Some(stream);
        if let Some(waker) = awaited.waker.take() {
            waker.wake();
        }
        true
    }
}

impl Place {
    /// Returns the address to which the container must connect.
    pub(super) fn address(&self) -> SocketAddrV4 {
        self.ticket.address(self.door.port)
    }

    /// Waits until the flow comes back.
    pub(super) async fn back(&self) -> TcpStream {
        poll_fn(|cx| {
            let mut waiting = self.door.waiting.borrow_mut();
            // The entry is ours until this place is dropped.
            let awaited = waiting.entry(self.ticket).or_default();
            match awaited.came.take() {
                Some(stream) => Poll::Ready(stream),
                None => {
                    awaited.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// Returns a random number that others cannot predict. They are drawn in advance: one system call for many flows.
fn drawn() -> u32 {
    let draw = |numbers: &mut Vec<u32>| {
        if numbers.is_empty() {
            let bytes: [u8; 4 * DRAWN_AT_ONCE] = random::bytes();
            let number = |four: &[u8; 4]| u32::from_ne_bytes(*four);
            numbers.extend(bytes.as_chunks().0.iter().map(number));
        }
        numbers.pop().unwrap_or_else(|| u32::from_ne_bytes(random::bytes()))
    };
    NUMBERS.with_borrow_mut(draw)
}

/// An open door; when its task ends, the door is removed from the thread's list.
struct Open(u64);

impl Drop for Open {
    fn drop(&mut self) {
        // The thread may be ending, and its list gone.
        let _ = DOORS.try_with(|doors| doors.borrow_mut().remove(&self.0));
    }
}

/// Accepts connections that come back, until the container is gone.
fn serve(
    door: Weak<Door>,
    listener: TcpListener,
    instance: &Instance,
) -> impl Future<Output = ()> + 'static + use<> {
    let mut gone = instance.gone();
    let open = Open(instance.number);
    let strays = instance.strays.clone();
    async move {
        let _open = open;
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = gone.wait_for(|gone| *gone) => break,
            };
            let Some(door) = door.upgrade() else { break };
            let Ok((stream, _)) = accepted else {
                // Usually there is no descriptor left at the moment. Flows wait; without a pause this loop would spin.
                reactor::sleep(REST).await;
                continue;
            };
            let ticket = match sockopt::local_address(&stream) {
                Ok(SocketAddr::V4(local)) => Ticket::from_address(*local.ip()),
                _ => None,
            };
            let taken = match ticket {
                Some(ticket) => door.deliver(ticket, stream),
                None => false,
            };
            if !taken {
                strays.fetch_add(1, Relaxed);
            }
        }
    }
}
