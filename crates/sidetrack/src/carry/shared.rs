//! Connections to hops that carry many flows, as those of HTTP/2 and HTTP/3 do: the pool of a worker, and the translation of a
//! request of HTTP/1.1.
//!
//! ```text
//!   a connection is open and has room -------------> a stream of it
//!     | no
//!     v
//!   there are as many as may be -------------------> refuse the flow
//!     | no
//!     v
//!   another flow opens one: wait ------------------> begin anew, or fail as it has failed
//!     | no
//!     v
//!   open one: the hop shares it -------------------> a stream of it
//!     | it is for one flow: remember that, so that the next flows do not wait
//!     v
//!   the connection itself
//! ```

use super::{Failure, Memory, Order, Stream};
use sidetrack_core::carrier::Hop;
use sidetrack_core::flow::EndReason;
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::message::{Request, Response, Scan, Sender};
use sidetrack_core::http::udp;
use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::thread::LocalKey;
use tokio::io::{AsyncReadExt, ReadHalf};
use tokio::sync::watch;

/// Bytes buffered in each direction of a connection in memory.
pub(super) const PIPE_BYTES: usize = 64 * 1024;
/// Most connections that are kept. One that ends leaves at the next look.
const KEPT_MAX: usize = 256;
/// Most connections of a worker to one hop. With 100 streams each, they carry 6,400 flows.
const PER_WAY_MAX: usize = 64;

/// The way to a hop: it is the last one. Metadata is what hops of SOCKS6 are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Way {
    hops: Vec<Hop>,
    metadata: Vec<(u16, String)>,
}

impl Way {
    /// Returns the way to the last of these hops.
    pub(super) fn new(order: &Order<'_>, hops: &[Hop]) -> Self {
        Self { hops: hops.to_vec(), metadata: order.carry.metadata.clone() }
    }
}

/// A connection for many flows.
pub(super) trait Shared {
    /// Whether it takes another flow. One that is not open leaves the pool.
    fn is_open(&self) -> bool;

    /// Whether it has room for another flow now.
    fn has_room(&self) -> bool;
}

/// What was opened for a flow.
#[derive(Debug)]
pub(super) enum Opened<P> {
    /// A connection for many flows.
    Shared(Rc<P>),
    /// A connection for this flow alone.
    Own(Stream),
}

/// The news of an attempt: why it has failed.
type News = Option<Failure>;

/// The connections of a worker, by their ways.
#[derive(Debug)]
pub(super) struct Pool<P> {
    kept: RefCell<Vec<(Way, Rc<P>)>>,
    /// What is being opened.
    attempts: RefCell<Vec<(Way, watch::Receiver<News>)>>,
    /// Ways whose hops have last made a connection for one flow.
    alone: RefCell<Vec<Way>>,
}

/// Who opens a connection.
enum Turn {
    /// Another flow.
    Waits(watch::Receiver<News>),
    /// This flow; others wait for its news.
    Opens(watch::Sender<News>),
    /// This flow, beside others.
    Alone,
}

impl<P: Shared + 'static> Pool<P> {
    /// Returns an empty pool.
    pub(super) const fn new() -> Self {
        Self {
            kept: RefCell::new(Vec::new()),
            attempts: RefCell::new(Vec::new()),
            alone: RefCell::new(Vec::new()),
        }
    }

    /// Returns an open connection with room, or opens one by `open`. There is one attempt at a time, unless the hop is known to
    /// make a connection for each flow.
    ///
    /// # Errors
    /// As `open`; with `limit` if all connections that may be are in use.
    pub(super) async fn obtain<F: Future<Output = Result<Opened<P>, Failure>>>(
        pool: &'static LocalKey<Self>,
        way: &Way,
        open: impl FnOnce() -> F,
    ) -> Result<Opened<P>, Failure> {
        let sender = loop {
            if let Some(peer) = pool.with(|pool| pool.find(way)) {
                return Ok(Opened::Shared(peer));
            }
            if pool.with(|pool| pool.is_full(way)) {
                let why = format!(
                    "the hop takes no further flow: all streams of {PER_WAY_MAX} connections to it are in use, \
                     the most for one worker"
                );
                return Err(Failure::new(EndReason::Limit, why));
            }
            match pool.with(|pool| pool.turn(way)) {
                Turn::Waits(mut news) => {
                    // An error means that the attempt has ended without news.
                    let _ = news.changed().await;
                    if let Some(failure) = news.borrow().clone() {
                        return Err(failure);
                    }
                }
                Turn::Opens(sender) => break Some(sender),
                Turn::Alone => break None,
            }
        };
        let opened = open().await;
        match &opened {
            Ok(Opened::Shared(peer)) => pool.with(|pool| pool.keep(way, peer)),
            Ok(Opened::Own(_)) => pool.with(|pool| pool.is_alone(way)),
            Err(failure) => {
                if let Some(sender) = sender {
                    sender.send_replace(Some(failure.clone()));
                }
            }
        }
        opened
    }

    /// Forgets connections that are not open.
    pub(super) fn tend(&self) {
        self.kept.borrow_mut().retain(|(_, peer)| peer.is_open());
    }

    /// Returns an open connection with room.
    fn find(&self, way: &Way) -> Option<Rc<P>> {
        self.tend();
        let kept = self.kept.borrow();
        kept.iter().find(|(other, peer)| other == way && peer.has_room()).map(|(_, peer)| peer.clone())
    }

    /// Whether there are as many connections as may be.
    fn is_full(&self, way: &Way) -> bool {
        self.kept.borrow().iter().filter(|(other, _)| other == way).count() >= PER_WAY_MAX
    }

    fn turn(&self, way: &Way) -> Turn {
        if self.alone.borrow().contains(way) {
            return Turn::Alone;
        }
        let mut attempts = self.attempts.borrow_mut();
        // An error means that the sender is gone.
        attempts.retain(|(_, news)| news.has_changed().is_ok());
        if let Some((_, news)) = attempts.iter().find(|(other, _)| other == way) {
            return Turn::Waits(news.clone());
        }
        let (sender, news) = watch::channel(None);
        attempts.push((way.clone(), news));
        Turn::Opens(sender)
    }

    fn keep(&self, way: &Way, peer: &Rc<P>) {
        self.alone.borrow_mut().retain(|other| other != way);
        let mut kept = self.kept.borrow_mut();
        kept.truncate(KEPT_MAX - 1);
        kept.push((way.clone(), peer.clone()));
    }

    fn is_alone(&self, way: &Way) {
        let mut alone = self.alone.borrow_mut();
        if !alone.contains(way) {
            alone.truncate(KEPT_MAX - 1);
            alone.push(way.clone());
        }
    }
}

/// Reads the request from a connection in memory, and what came behind it. `None`: there is none.
///
/// # Errors
/// The connection is cut, or brings what is not a request.
pub(super) async fn request(reader: &mut ReadHalf<Memory>) -> io::Result<Option<(Request, Vec<u8>)>> {
    let (mut held, mut scan) = (Vec::new(), Scan::default());
    loop {
        if let Some(length) = scan.advance(&held, Sender::Client).map_err(io::Error::other)? {
            let request = Request::parse(held.get(..length).unwrap_or_default());
            return Ok(Some((request.map_err(io::Error::other)?, held.split_off(length))));
        }
        if reader.read_buf(&mut held).await? == 0 {
            return Ok(None);
        }
    }
}

/// Returns the head of an answer in HTTP/1.1, and whether the tunnel is open. `is_bytes`: it is one for bytes.
pub(super) fn answer<'a>(
    status: u16,
    fields: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    is_bytes: bool,
) -> (Vec<u8>, bool) {
    let is_open = (200..300).contains(&status);
    let response = if is_open && !is_bytes {
        Response::new(101, udp::switching())
    } else {
        let mut all = Fields::new();
        for (name, value) in fields.filter(|(name, _)| *name != b"content-length") {
            all.push(name, value);
        }
        if !is_open {
            all.push("Connection", "close");
        }
        Response::new(status, all)
    };
    let mut head = Vec::with_capacity(512);
    response.write_to(&mut head);
    (head, is_open)
}
