//! Kernel threads that take the frames of interfaces (threaded NAPI). The work of taking a frame then has its own CPU
//! and is counted. Otherwise the sender's CPU does this work. A thread stays with its interface as long as the
//! interface exists.

use std::time::Duration;

use anyhow::{Context, Result};
use sidetrack_sys::link;
use sidetrack_sys::napi::{self, Napi};

use crate::topology::Node;

/// A thread that takes the frames of an interface, until this is dropped.
#[derive(Debug)]
pub struct Taker<'n> {
    node: &'n Node,
    interface: String,
    pid: u32,
}

fn set(node: &Node, interface: &str, threaded: bool) -> Result<()> {
    let word = u8::from(threaded);
    let script = format!("mount -t sysfs sysfs /sys && echo {word} > /sys/class/net/{interface}/threaded");
    node.run("unshare", &["-m", "sh", "-c", &script]).map(drop)
}

fn threads(interface: &str) -> Result<Vec<u32>> {
    let pids = std::fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let wanted = format!("napi/{interface}-");
    let is_one = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with(&wanted))
    };
    Ok(pids.filter(is_one).collect())
}

impl<'n> Taker<'n> {
    /// As [`Taker::of`], for an interface without NAPI: switches GRO on, which adds it. It also switches off
    /// segmentation offload of the interface: the other end of a veth takes only frames of wire size by NAPI; for
    /// larger ones the kernel lets the sender do the work.
    ///
    /// # Errors
    /// As [`Taker::of`].
    pub fn of_plain(node: &'n Node, interface: &str, cpu: usize) -> Result<Self> {
        node.run("ethtool", &["-K", interface, "gro", "on", "tso", "off"])?;
        Self::of(node, interface, cpu)
    }

    /// Lets a thread on this CPU take the frames of a node's interface, which already has NAPI through an XDP program
    /// or GRO.
    ///
    /// # Errors The kernel does not support it, or the interface had a thread before.
    pub fn of(node: &'n Node, interface: &str, cpu: usize) -> Result<Self> {
        let before = threads(interface)?;
        set(node, interface, true)?;
        let found = threads(interface)?.into_iter().find(|pid| !before.contains(pid));
        let pid = found.context("the kernel has no thread for this interface")?;
        let taker = Self { node, interface: interface.to_owned(), pid };
        let mut cpus = rustix::thread::CpuSet::new();
        cpus.set(cpu);
        let id = rustix::process::Pid::from_raw(pid.cast_signed());
        rustix::thread::sched_setaffinity(id, &cpus).context("cannot place the kernel's thread")?;
        Ok(taker)
    }

    /// Lets frames gather for this time before they are taken.
    ///
    /// # Errors The kernel does not support it (Linux 6.13 does).
    pub fn gather(&self, time: Duration) -> Result<()> {
        self.node.enter(|| {
            let gro_flush_timeout_ns = u64::try_from(time.as_nanos())?;
            for napi in napi::of(link::interface(&self.interface)?.index)? {
                napi::set(&Napi { defer_hard_irqs: 1, gro_flush_timeout_ns, ..napi })?;
            }
            Ok(())
        })
    }

    /// Returns the CPU time that it has used, in nanoseconds.
    #[must_use]
    pub fn cpu_ns(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", self.pid)).unwrap_or_default();
        text.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
    }
}

impl Drop for Taker<'_> {
    fn drop(&mut self) {
        // The interface may already be removed.
        let _ = set(self.node, &self.interface, false);
    }
}
