//! What a process holds: memory and descriptors.

use std::fs;

use anyhow::{Context, Result};

/// What a process holds.
#[derive(Debug, Clone, Copy, Default, serde::Serialize)]
pub(crate) struct Held {
    /// Resident memory, in bytes.
    pub resident_bytes: u64,
    /// Open descriptors.
    pub descriptors: usize,
}

impl Held {
    /// Returns what a process holds.
    ///
    /// # Errors
    /// It has ended.
    pub(crate) fn by(pid: u32) -> Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).context("the gateway's program")?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib =
            resident.and_then(|rest| rest.split_whitespace().next()).and_then(|kib| kib.parse::<u64>().ok());
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))?.count();
        Ok(Self { resident_bytes: kib.unwrap_or(0) * 1024, descriptors })
    }
}
