//! What a node leaves, or does not leave, in the network namespace of the calling thread.

use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::{nft, route, sysctl};
use std::os::unix::fs::MetadataExt;

/// Everything that `up` changes in a network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Traces {
    tables: Vec<String>,
    routing: String,
    settings: Vec<(&'static str, String)>,
    processes: Vec<String>,
}

/// The settings that `up` touches.
const SETTINGS: [&str; 3] = [
    "net/netfilter/nf_conntrack_acct",
    "net/netfilter/nf_conntrack_events",
    "net/netfilter/nf_conntrack_timestamp",
];

impl Traces {
    /// As things are now.
    pub(crate) fn now() -> Self {
        let mut socket = Socket::open(Protocol::Netfilter).expect("netlink");
        let tables = nft::list_tables(&mut socket).expect("tables");
        Self {
            tables: tables
                .iter()
                .map(|table| format!("{:?} {} {:?}", table.family, table.name, table.info))
                .collect(),
            routing: format!("{:?}", route::ours().expect("routes")),
            settings: SETTINGS.map(|name| (name, sysctl::read(name).expect(name))).to_vec(),
            processes: processes_here(),
        }
    }

    /// Waits until things are as they were here; the test fails if they are not within the limit.
    ///
    /// They may not be at once: a process that looks at the descriptors of one that ends (`/proc/PID/fd`), for example a
    /// test beside this one, holds them, and with a socket its table, a moment longer.
    pub(crate) fn expect_back(&self, what: &str) {
        let until = std::time::Instant::now() + sidetrack_testkit::LIMIT;
        let mut now = Self::now();
        while now != *self && std::time::Instant::now() < until {
            std::thread::park_timeout(std::time::Duration::from_millis(1));
            now = Self::now();
        }
        assert_eq!(now, *self, "{what}");
    }

    /// Waits until no process owns the tables that are there.
    pub(crate) fn await_orphans() {
        sidetrack_testkit::eventually("nobody owns the tables", || {
            Self::now().tables.iter().all(|table| table.contains("owner: None"))
        });
    }

    /// As things are when the processes of other nodes have their names: one that was just started has that of its node.
    pub(crate) fn beside(nodes: usize) -> Self {
        sidetrack_testkit::awaited("each process has its name", || {
            let now = Self::now();
            let named = |name: &str| now.processes.iter().filter(|found| found.trim() == name).count();
            // A program that was just begun is called by the link to it.
            (named("sidetrack") == nodes && named("exe") == 0).then_some(now)
        })
    }

    /// The nftables tables.
    pub(crate) fn tables(&self) -> &[String] {
        &self.tables
    }
}

/// Other processes in the network namespace of this thread.
fn processes_here() -> Vec<String> {
    let here = std::fs::metadata("/proc/thread-self/ns/net").expect("a namespace").ino();
    let entries = std::fs::read_dir("/proc").expect("proc").flatten();
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| std::fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|ns| ns.ino() == here))
        .map(|pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default())
        .collect();
    names.sort();
    names
}
