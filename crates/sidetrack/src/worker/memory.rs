//! Whether memory is short: then no flow begins. `app` looks at the memory and sets this.

use super::Shared;
use sidetrack_core::limit::Lack;
use sidetrack_core::pressure;
use sidetrack_sys::sync::lock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// This number of flows may be there also while memory is short: fewer are not what uses it up, and a node must not refuse for ever.
pub(super) const FEW: u64 = 64;

/// The memory of the process, and how many flows were refused for it.
#[derive(Debug, Default)]
pub struct Memory {
    is_short: AtomicBool,
    used_bytes: AtomicU64,
    limit_bytes: AtomicU64,
    refused: AtomicU64,
}

/// What is known about the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemorySeen {
    /// Bytes in use, and the limit; 0 without a limit.
    pub memory: pressure::Memory,
    /// Whether new flows are refused.
    pub is_short: bool,
    /// Flows that were refused since the start.
    pub refused: u64,
}

impl Memory {
    /// Notes how the memory was at the latest look.
    pub fn set(&self, memory: pressure::Memory, is_short: bool) {
        self.used_bytes.store(memory.used_bytes, Relaxed);
        self.limit_bytes.store(memory.limit_bytes, Relaxed);
        self.is_short.store(is_short, Relaxed);
    }

    /// Counts that a flow was refused; returns why.
    fn refuse(&self) -> String {
        self.refused.fetch_add(1, Relaxed);
        let memory = self.seen().memory;
        format!(
            "memory is short: {} % of the {} MiB that its control group allows are used",
            memory.percent(),
            memory.limit_bytes >> 20
        )
    }

    /// Returns what is known.
    pub fn seen(&self) -> MemorySeen {
        let memory = pressure::Memory {
            used_bytes: self.used_bytes.load(Relaxed),
            limit_bytes: self.limit_bytes.load(Relaxed),
        };
        MemorySeen { memory, is_short: self.is_short.load(Relaxed), refused: self.refused.load(Relaxed) }
    }
}

impl Shared {
    /// Fails if memory is short and there are more than a few flows.
    pub(super) fn enough_memory(&self) -> Result<(), Lack> {
        if !self.memory.is_short.load(Relaxed) || lock(&self.budget).flows().live < FEW {
            return Ok(());
        }
        Err(Lack::Memory(self.memory.refuse()))
    }
}
