//! The kernel's threads that take the frames of interfaces (threaded NAPI): whose work it is to take a frame is on a CPU of its
//! own then, and is counted, where otherwise it falls to whoever sends. They stay with an interface as long as it lives.

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
    /// The same for an interface that has none: it gets GRO. It sends segments that are cut already: only those does the other end
    /// of a veth take by NAPI, where the kernel lets whoever sends take others in its place.
    ///
    /// # Errors
    /// As [`Taker::of`].
    pub fn of_plain(node: &'n Node, interface: &str, cpu: usize) -> Result<Self> {
        node.run("ethtool", &["-K", interface, "gro", "on", "tso", "off"])?;
        Self::of(node, interface, cpu)
    }

    /// Has a thread on this CPU take the frames of a node's interface, which has NAPI already: a program of XDP, or GRO.
    ///
    /// # Errors
    /// The kernel does not do that, or the interface had a thread before.
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

    /// Lets frames gather so long before they are taken.
    ///
    /// # Errors
    /// The kernel does not do that (it takes Linux 6.13).
    pub fn gather(&self, time: Duration) -> Result<()> {
        self.node.enter(|| {
            let gro_flush_timeout_ns = u64::try_from(time.as_nanos())?;
            for napi in napi::of(link::interface(&self.interface)?.index)? {
                napi::set(&Napi { defer_hard_irqs: 1, gro_flush_timeout_ns, ..napi })?;
            }
            Ok(())
        })
    }

    /// CPU time that it has taken, nanoseconds.
    #[must_use]
    pub fn cpu_ns(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", self.pid)).unwrap_or_default();
        text.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
    }
}

impl Drop for Taker<'_> {
    fn drop(&mut self) {
        // The interface may be gone by now.
        let _ = set(self.node, &self.interface, false);
    }
}
