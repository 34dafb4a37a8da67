//! The thread that answers the kernel about caught packets, with the queue and the rules that lead to it. Both belong to sockets,
//! so another process of this node goes on with copies of them, and no packet passes the rules by
//! ([ADR 49](../../../../../docs/adr/0049-the-packet-queue-goes-along.md)).
//!
//! ```text
//! WAITING --a start of the overlay: the rules are those of its configuration--> ANSWERING
//! WAITING --nothing is to be caught--------------------------------------> over: the rules are deleted
//! WAITING --the node ends------------------------------------------------> over: the rules are deleted
//! WAITING --another process has the overlay, or this one never had it----> over: the rules stay
//! ANSWERING --the threads of the overlay end-----------------------------> WAITING (packets wait in the kernel)
//! ANSWERING --the queue fails--------------------------------------------> over: the rules are deleted
//! ```

use super::{Begin, NEEDED, groups};
use crate::config::{self, OnCrash};
use crate::steer::OWN_MARK;
use anyhow::Context as _;
use sidetrack_sys::caps;
use sidetrack_sys::nfqueue::{Queue, Verdict};
use sidetrack_sys::nft::{Lifetime, MarkBits, OwnedTable, Packets, Table};
use sidetrack_sys::sync::lock;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The mark of delivered packets: our rules do not catch them.
pub(super) const DELIVERED_MARK: MarkBits = MarkBits { value: 0x5f00_0000, mask: 0xff00_0000 };

/// The name of the table that catches packets.
pub(super) const TABLE: &str = "sidetrack-packets";

/// The queue numbers that we may use.
const QUEUES: std::ops::RangeInclusive<u16> = 24_000..=24_063;

/// Most packets that wait in the kernel. Further ones pass without the overlay, or are dropped (`on_crash`).
const QUEUE_PACKETS: u32 = 8192;

/// How often the thread checks whether it must end.
const LOOK: Duration = Duration::from_millis(200);

/// The sockets of a queue and of the table whose rules lead to it, for another process.
pub struct QueueSockets {
    /// The queue's number.
    pub number: u16,
    /// The socket that reads the queue.
    pub queue: OwnedFd,
    /// The socket that owns the table.
    pub table: OwnedFd,
}

/// The queue and the rules.
pub(super) struct Caught {
    queue: Queue,
    /// `None`: another process has the overlay now, and catches no packets.
    table: Option<OwnedTable>,
    rules: Packets,
    lifetime: Lifetime,
    /// The rules are those of this configuration.
    is_set: bool,
    /// Another process uses them: they stay when this one ends.
    is_others: bool,
}

impl Caught {
    /// Opens a queue and installs the rules that put packets into it. `given`: those of another process, which uses them until
    /// the first start here. `waits`: another process has the overlay until then.
    pub(super) fn new(
        config: &config::Overlay,
        on_crash: OnCrash,
        given: Option<QueueSockets>,
        waits: bool,
    ) -> anyhow::Result<Self> {
        let bypass = on_crash == OnCrash::Open;
        let lifetime = if bypass { Lifetime::Socket } else { Lifetime::SocketThenOrphan };
        let rules = |queue: u16| Packets {
            catches: config
                .packets
                .iter()
                .flat_map(|packets| groups::catches(packets, &config.groups))
                .collect(),
            queue,
            bypass,
            own: [OWN_MARK, DELIVERED_MARK],
        };
        if let Some(QueueSockets { number, queue, table }) = given {
            let (queue, rules) = (Queue::given(queue, number), rules(number));
            let table = OwnedTable::given(table, &rules.table(TABLE))
                .context("[[overlay.packets]]: the rules of the process before this one")?;
            return Ok(Self { queue, table: Some(table), rules, lifetime, is_set: false, is_others: true });
        }
        let queue = Queue::open(QUEUES, QUEUE_PACKETS, bypass, LOOK)
            .context("[[overlay.packets]] needs a packet queue (root, and NFQUEUE in the kernel)")?;
        let rules = rules(queue.number());
        let mut caught = Self { queue, table: None, rules, lifetime, is_set: false, is_others: false };
        if !waits {
            caught.table = Some(caught.create()?);
            caught.is_set = true;
        }
        Ok(caught)
    }

    fn content(&self) -> Table {
        self.rules.table(TABLE)
    }

    fn create(&self) -> anyhow::Result<OwnedTable> {
        OwnedTable::create(&self.content(), self.lifetime).context("[[overlay.packets]] cannot catch packets")
    }

    /// Puts the rules of this configuration in force. Each packet meets them or the rules before.
    fn set(&mut self) -> anyhow::Result<()> {
        self.is_others = false;
        if self.rules.catches.is_empty() {
            return self
                .table
                .take()
                .map_or(Ok(()), OwnedTable::delete)
                .context("cannot take the rules back");
        }
        if std::mem::take(&mut self.is_set) {
            return Ok(());
        }
        self.queue.set(QUEUE_PACKETS, self.rules.bypass).context("[[overlay.packets]]: the packet queue")?;
        let content = self.content();
        // Another process may have deleted them, and have ended then.
        let renewed = self.table.as_mut().map(|table| table.replace_as(&content, self.lifetime));
        if !matches!(renewed, Some(Ok(()))) {
            self.table.take().into_iter().for_each(OwnedTable::release);
            self.table = Some(self.create()?);
        }
        Ok(())
    }

    /// Copies of the sockets.
    fn sockets(&self) -> io::Result<Option<QueueSockets>> {
        let Some(table) = &self.table else { return Ok(None) };
        let (queue, table) = (self.queue.as_fd(), table.as_fd());
        let (queue, table) = (queue.try_clone_to_owned()?, table.try_clone_to_owned()?);
        Ok(Some(QueueSockets { number: self.queue.number(), queue, table }))
    }
}

impl Drop for Caught {
    /// An orderly end removes the rules, also where a crash would leave them.
    fn drop(&mut self) {
        let Some(table) = self.table.take() else { return };
        if self.is_others {
            table.release();
        } else if let Err(error) = table.delete() {
            tracing::error!(%error, table = TABLE, "cannot take the rules back");
        }
    }
}

/// The thread. When the last owner drops this, the thread ends.
pub(super) struct Answering {
    begin: Option<Sender<Begin>>,
    thread: Option<JoinHandle<()>>,
    known: Arc<Known>,
}

/// What the thread and its owners know.
struct Known {
    /// Copies for another process. `None`: no packets are caught.
    sockets: Mutex<Option<QueueSockets>>,
    /// Another process has the overlay for good.
    is_left: AtomicBool,
}

impl Answering {
    /// Starts the thread, which waits for [`Answering::begin`]. It keeps the right to answer, and no other one.
    ///
    /// # Errors
    /// Fails if the system provides no thread.
    pub(super) fn start(caught: Caught) -> anyhow::Result<Arc<Self>> {
        let (begin, begun) = mpsc::channel();
        let sockets = caught.sockets().context("no copies of the packet queue's sockets")?;
        let known = Arc::new(Known { sockets: Mutex::new(sockets), is_left: AtomicBool::new(false) });
        let thread = std::thread::Builder::new().name("overlay-packets".to_owned());
        let of_thread = known.clone();
        let thread = thread.spawn(move || {
            if let Err(error) = caps::keep_only(NEEDED) {
                tracing::error!(%error, "cannot give up capabilities");
            }
            answer(caught, &begun, &of_thread);
        });
        let thread = Some(thread.context("cannot start a thread for packets")?);
        Ok(Arc::new(Self { begin: Some(begin), thread, known }))
    }

    /// Lets the thread answer until [`Begin::stopped`]. If the thread has ended, it has logged the reason.
    pub(super) fn begin(&self, begin: Begin) {
        let _ = self.begin.as_ref().map(|thread| thread.send(begin));
    }

    /// Returns copies of the sockets for another process. `None`: no packets are caught.
    ///
    /// # Errors
    /// Fails if the system provides no descriptor.
    pub(super) fn sockets(&self) -> io::Result<Option<QueueSockets>> {
        let sockets = lock(&self.known.sockets);
        let Some(QueueSockets { number, queue, table }) = &*sockets else { return Ok(None) };
        Ok(Some(QueueSockets { number: *number, queue: queue.try_clone()?, table: table.try_clone()? }))
    }

    /// Another process goes on with the rules: they stay.
    pub(super) fn leave(&self) {
        self.known.is_left.store(true, Relaxed);
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        drop(self.begin.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of packets ended by a panic");
        }
    }
}

/// The thread that reads the queue.
fn answer(mut caught: Caught, begun: &Receiver<Begin>, known: &Known) {
    while let Ok(begin) = begun.recv() {
        if let Err(error) = caught.set() {
            tracing::error!("{error:#}");
        }
        match caught.sockets() {
            Ok(sockets) => *lock(&known.sockets) = sockets,
            Err(error) => tracing::error!(%error, "[[overlay.packets]] cannot be handed over"),
        }
        if caught.table.is_none() {
            return;
        }
        let without_way = if caught.rules.bypass { Verdict::Accept } else { Verdict::Drop };
        while !begin.stopped.load(Relaxed) {
            if let Err(error) = caught.queue.read(|packet| begin.caught(packet, without_way)) {
                tracing::error!(%error, "the packet queue");
                return;
            }
        }
    }
    caught.is_others |= known.is_left.load(Relaxed);
}
