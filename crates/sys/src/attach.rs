//! Running processes: which they are, moving them into a control group of ours, and watching for their end.
//!
//! A socket belongs to the control group in which its process was when it opened the socket (`sock_cgroup_data`). So what a process had
//! open before it was moved is not matched by rules for the new group.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read as _, Seek as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::cgroup::{self, Leaf};
use crate::exec::ForwardedSignals;
use crate::process;

/// Most rounds of [`gather`]: each moves the processes that were born during the one before.
const ROUNDS_MAX: usize = 1000;

/// Most descriptors that [`open_sockets`] looks at in one process.
const DESCRIPTORS_MAX: usize = 65_536;

/// Whether this is a thread of the kernel, which has no sockets of programs (`PF_KTHREAD` in proc_pid_stat(5)).
///
/// # Errors
/// `NotFound` if there is no such process.
pub fn is_kernel_thread(pid: u32) -> io::Result<bool> {
    const PF_KTHREAD: u64 = 0x0020_0000;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name may have spaces and brackets. `flags` is the seventh field after it.
    let flags =
        stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(6)?.parse::<u64>().ok());
    Ok(flags.unwrap_or(0) & PF_KTHREAD != 0)
}

/// The parent of this process, its parent, and so on.
pub fn ancestors(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut at = pid;
    while let Ok(info) = process::process_info(at) {
        if info.parent_pid == 0 || found.contains(&info.parent_pid) {
            break;
        }
        at = info.parent_pid;
        found.push(at);
    }
    found
}

/// What processes had open before their sockets were caught.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenSockets {
    /// Connections of TCP.
    pub connections: usize,
    /// Sockets of UDP.
    pub datagrams: usize,
}

/// Counts the sockets of these processes, which are all in one network. As far as /proc shows them.
pub fn open_sockets(pids: &[u32]) -> OpenSockets {
    let mut held = HashSet::new();
    for pid in pids {
        let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for entry in entries.flatten().take(DESCRIPTORS_MAX) {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            let inode = target.to_str().and_then(|text| text.strip_prefix("socket:[")?.strip_suffix(']'));
            held.extend(inode.and_then(|inode| inode.parse::<u64>().ok()));
        }
    }
    let Some(pid) = pids.first().filter(|_| !held.is_empty()) else { return OpenSockets::default() };
    // Bound, listening and closed sockets (07 and 0A of tcp_states.h) are not connections.
    let is_connection = |state: &str| !matches!(state, "07" | "0A");
    let count = |tables: [&str; 2], counts: &dyn Fn(&str) -> bool| {
        let rows =
            tables.iter().filter_map(|table| fs::read_to_string(format!("/proc/{pid}/net/{table}")).ok());
        rows.map(|rows| {
            let held = rows.lines().skip(1).filter(|row| {
                let mut fields = row.split_whitespace().skip(3);
                let is_counted = fields.next().is_some_and(counts);
                is_counted
                    && fields
                        .nth(5)
                        .and_then(|inode| inode.parse().ok())
                        .is_some_and(|inode| held.contains(&inode))
            });
            held.count()
        })
        .sum()
    };
    OpenSockets {
        connections: count(["tcp", "tcp6"], &is_connection),
        datagrams: count(["udp", "udp6"], &|_| true),
    }
}

/// Moves a process and its descendants into this control group, but for those that `stays` names. Returns those that were moved.
/// `before` is told of each process and its group, by the path below the mount, before it is moved.
///
/// The group is frozen meanwhile: what is in it starts no process, so the rounds end. A child of a moved process is born in
/// the group.
///
/// # Errors
/// The first process cannot be moved; or what `before` says.
pub fn gather(
    leaf: &Leaf,
    root: u32,
    stays: impl Fn(u32) -> bool,
    mut before: impl FnMut(u32, &Path) -> io::Result<()>,
) -> io::Result<Vec<u32>> {
    let frozen = Frozen::new(leaf);
    let (mut seen, mut moved) = (HashSet::new(), Vec::new());
    for _ in 0..ROUNDS_MAX {
        let tree = process::process_tree(root);
        let fresh: Vec<u32> = tree.into_iter().filter(|pid| seen.insert(*pid) && !stays(*pid)).collect();
        if fresh.is_empty() {
            break;
        }
        for pid in fresh {
            // It may have ended since.
            let Ok(from) = cgroup::path_of(pid) else { continue };
            if from == leaf.path() {
                moved.push(pid);
                continue;
            }
            before(pid, &from)?;
            match leaf.add(pid) {
                Ok(()) => moved.push(pid),
                Err(error) if pid == root => return Err(error),
                Err(_) => {}
            }
        }
    }
    drop(frozen);
    Ok(moved)
}

/// Keeps the processes of a group from running (`cgroup.freeze`, Linux 5.2; older kernels go without).
struct Frozen<'a>(&'a Leaf);

impl<'a> Frozen<'a> {
    fn new(leaf: &'a Leaf) -> Self {
        let frozen = Self(leaf);
        frozen.set("1");
        frozen
    }

    fn set(&self, value: &str) {
        let _ = fs::write(self.0.directory().join("cgroup.freeze"), value);
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.set("0");
    }
}

/// Why waiting ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// A signal asks us to end.
    Signal,
    /// The process has ended, or the last one of the control group.
    Process,
    /// The time is over.
    Time,
}

/// Waits for the end of a process or of a control group, or for a signal that ends us. From its start on, signals do not end this process.
#[derive(Debug)]
pub struct Watch {
    signals: ForwardedSignals,
    process: Option<OwnedFd>,
    /// `cgroup.events` of the group.
    group: Option<fs::File>,
}

impl Watch {
    /// Starts it, before any thread.
    ///
    /// # Errors
    /// The process does not exist, the group does not, or what signalfd(2) says.
    pub fn start(pid: Option<u32>, group: Option<&Leaf>) -> io::Result<Self> {
        let process = pid.map(process::watch).transpose()?;
        let events = |leaf: &Leaf| fs::File::open(leaf.directory().join("cgroup.events"));
        // The root of the hierarchy has no such file, and does not end.
        let group = group.map(events).transpose()?;
        Ok(Self { signals: ForwardedSignals::block()?, process, group })
    }

    /// Waits, for this time at most.
    ///
    /// # Errors
    /// What poll(2) or read(2) says.
    pub fn wait(&self, limit: Option<Duration>) -> io::Result<End> {
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            if let Some(end) = self.ended()? {
                return Ok(end);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(End::Time);
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
            fds.extend(self.process.iter().map(|process| PollFd::new(process, PollFlags::IN)));
            fds.extend(self.group.iter().map(|group| PollFd::new(group, PollFlags::PRI)));
            match poll(&mut fds, left.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn ended(&self) -> io::Result<Option<End>> {
        while let Some(received) = self.signals.next()? {
            // Ctrl-Z does nothing: what is attached to would hang.
            if matches!(received.signal, libc::SIGTERM | libc::SIGINT | libc::SIGQUIT | libc::SIGHUP) {
                return Ok(Some(End::Signal));
            }
        }
        if let Some(process) = &self.process {
            let mut fds = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
            if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0 {
                return Ok(Some(End::Process));
            }
        }
        let Some(mut group) = self.group.as_ref() else { return Ok(None) };
        let mut text = String::new();
        // A removed group gives an error.
        let read = group.rewind().and_then(|()| group.read_to_string(&mut text));
        let is_over = read.is_err() || text.lines().any(|line| line == "populated 0");
        Ok(is_over.then_some(End::Process))
    }
}

/// A running container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// The engine's command, such as `podman`.
    pub engine: String,
    /// The container's id.
    pub id: String,
    /// Its first process. `None`: it does not run.
    pub pid: Option<u32>,
}

/// Asks a container engine, by its command, about a container's name or id. `None` if there is no such engine or container.
pub fn find_container(engine: &str, name: &str) -> Option<Container> {
    let mut command = Command::new(engine);
    command.args(["container", "inspect", "--format", "{{.Id}} {{.State.Pid}}", "--", name]);
    let asked = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let text = asked.status.success().then(|| String::from_utf8(asked.stdout).ok()).flatten()?;
    let (id, pid) = text.trim().split_once(' ')?;
    let pid = pid.parse().ok().filter(|pid| *pid != 0);
    Some(Container { engine: engine.to_owned(), id: id.to_owned(), pid })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::Hierarchy;
    use std::io::Write as _;

    #[test]
    fn processes_are_told_apart() {
        assert!(!is_kernel_thread(std::process::id()).unwrap());
        assert_eq!(is_kernel_thread(u32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
        let parent = std::os::unix::process::parent_id();
        assert_eq!(ancestors(std::process::id()).first(), Some(&parent));
        assert_eq!(find_container("/nowhere/engine", "web"), None);
    }

    #[test]
    fn sockets_of_a_process_are_counted() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let held = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let before = open_sockets(&[std::process::id()]);
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let after = open_sockets(&[std::process::id()]);
        assert!(after.connections >= 1 && before.datagrams >= 1, "{before:?} {after:?}");
        drop((client, held));
    }

    #[test]
    fn a_tree_is_moved_and_its_end_is_seen() {
        if !crate::caps::is_network_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let hierarchy = Hierarchy::find().unwrap();
        let leaf = hierarchy.create_leaf(&format!("sidetrack-test-gather-{}", std::process::id())).unwrap();
        let script = "cat <&0 & wait; true";
        let mut child = Command::new("bash").args(["-c", script]).stdin(Stdio::piped()).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while process::process_tree(child.id()).len() < 2 && Instant::now() < until {
            std::thread::yield_now();
        }
        let mut told = Vec::new();
        let tell = |pid: u32, from: &Path| {
            told.push((pid, from.to_owned()));
            Ok(())
        };
        let mut moved = gather(&leaf, child.id(), |_| false, tell).unwrap();
        assert_eq!(moved.len(), 2, "{moved:?}");
        let mut inside = leaf.pids().unwrap();
        inside.sort_unstable();
        moved.sort_unstable();
        assert_eq!(inside, moved);
        assert!(told.iter().all(|(_, from)| *from == hierarchy.own), "{told:?}");
        child.stdin.take().unwrap().write_all(b"done\n").unwrap();
        child.wait().unwrap();
        leaf.clear().unwrap();
        leaf.remove().unwrap();
    }
}
