//! Looks at the memory of our control group, and lets the node do with less before the kernel kills it: new flows are
//! refused, flows buffer little, and caches shrink. Flows in flight go on.

use super::node::Node;
use crate::config::Config;
use crate::session::room;
use crate::worker::MemorySeen;
use arc_swap::ArcSwap;
use sidetrack_core::pressure::{BACK, Change, Memory, Pressure};
use sidetrack_sys::memory::Groups;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Time between two looks while less than [`BUSY_PERCENT`] are used.
const SELDOM: Duration = Duration::from_secs(1);
/// Time between two looks otherwise: much can be used up in a second.
const OFTEN: Duration = Duration::from_millis(20);
/// From this share on the memory is looked at often.
const BUSY_PERCENT: u64 = 50;
const MIB: u64 = 1 << 20;

/// The control groups whose memory is looked at, opened while the process may open them.
#[derive(Debug, Default)]
pub(super) struct Watched(Option<Groups>);

impl Watched {
    /// Opens the control groups of this process.
    pub(super) fn open() -> Self {
        let groups = Groups::open();
        if let Err(error) = &groups {
            tracing::debug!("the memory is not looked at: {error}");
        }
        Self(groups.ok())
    }

    /// Returns the memory of the group that is nearest to its limit, and its folder. `None` without a limit.
    pub(super) fn look(&self) -> Option<(Memory, PathBuf)> {
        let (found, folder) = self.0.as_ref()?.look()?;
        let memory = Memory { used_bytes: found.used_bytes, limit_bytes: found.limit_bytes };
        Some((memory, folder.to_owned()))
    }

    /// Looks at the memory on a thread of its own, as long as there is the node.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn watch(self, node: &Arc<Node>, config: Arc<ArcSwap<Config>>) -> std::io::Result<()> {
        if self.0.is_none() {
            return Ok(());
        }
        let node = Arc::downgrade(node);
        let watch = move || self.run(&node, &config);
        std::thread::Builder::new().name("memory".to_owned()).spawn(watch).map(drop)
    }

    fn run(&self, node: &Weak<Node>, config: &ArcSwap<Config>) {
        let (mut pressure, mut refused) = (Pressure::new(), 0);
        while let Some(node) = node.upgrade() {
            let found = self.look();
            let mark = config.load().limits.memory_percent;
            let memory = found.as_ref().map(|(memory, _)| *memory);
            let change = pressure.handle(memory, mark, node.cached());
            node.use_memory(memory.unwrap_or_default(), &pressure);
            if let Some(change) = change {
                let seen = node.shared.memory().seen();
                say(change, &seen, found.map(|(_, folder)| folder), mark, seen.refused - refused);
                refused = seen.refused;
            }
            let is_busy = memory.is_some_and(|memory| memory.percent() >= BUSY_PERCENT);
            drop(node);
            std::thread::sleep(if is_busy { OFTEN } else { SELDOM });
        }
    }
}

/// Says that memory becomes short, and that there is enough again.
fn say(change: Change, seen: &MemorySeen, folder: Option<PathBuf>, mark: u8, refused: u64) {
    let (used, limit) = (seen.memory.used_bytes / MIB, seen.memory.limit_bytes / MIB);
    let group = folder.map(|folder| folder.display().to_string()).unwrap_or_default();
    match change {
        Change::Short => tracing::warn!(
            "memory is short: {used} of {limit} MiB of the control group {group} are used. New flows are refused until it is \
             less than {} %; allow more memory (MemoryMax= of systemd), or lower max_flows of [limits] or memory_bytes of the \
             caches",
            mark.saturating_sub(BACK)
        ),
        Change::Enough => tracing::info!(
            refused,
            "there is enough memory again: {used} of {limit} MiB of the control group are used"
        ),
    }
}

impl Node {
    /// Returns the bytes of all caches in memory.
    fn cached(&self) -> u64 {
        self.proxies().iter().filter_map(|(_, proxy)| Some(proxy.cache.as_ref()?.store.memory().1)).sum()
    }

    /// Lets flows and caches use what there is.
    fn use_memory(&self, memory: Memory, pressure: &Pressure) {
        self.shared.memory().set(memory, pressure.is_short());
        let buffers = if memory.limit_bytes == 0 { u64::MAX } else { memory.for_buffers() };
        room::set(usize::try_from(buffers).unwrap_or(usize::MAX), pressure.is_short());
        let proxies = self.proxies();
        let caches = || proxies.iter().filter_map(|(_, proxy)| proxy.cache.as_ref());
        let all = caches().count() as u64;
        let each = pressure.caches().map_or(u64::MAX, |bytes| bytes / all.max(1));
        caches().for_each(|cache| cache.store.allow(each));
    }
}
