//! Who is behind a flow: processes as /proc shows them. Best effort by nature: processes come and go.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use crate::sockdiag::SocketOwner;
use crate::sync::lock;
use std::collections::{HashSet, VecDeque};
use std::fs;
use std::io::{self, BufRead as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Most processes one question looks at.
const MAX_PROCESSES: usize = 65_536;
/// Most descriptors looked at per process.
const MAX_FDS: usize = 65_536;

/// One process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessInfo {
    /// Process id.
    pub pid: u32,
    /// Parent's process id.
    pub parent_pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// Base name of the executable, or `comm` (at most 15 bytes) where the executable may not be read.
    pub name: String,
}

/// Reads what /proc says about `pid`.
///
/// # Errors
/// `NotFound` if there is no such process (any more).
pub fn process_info(pid: u32) -> io::Result<ProcessInfo> {
    let directory = format!("/proc/{pid}");
    let status = fs::read_to_string(format!("{directory}/status"))?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let number = |text: Option<&str>| text.and_then(|text| text.parse().ok());
    let comm = || field("Name:").unwrap_or_default().to_owned();
    Ok(ProcessInfo {
        pid,
        parent_pid: number(field("PPid:")).unwrap_or(0),
        // Real, effective, saved and file system user.
        uid: number(field("Uid:").and_then(|ids| ids.split_whitespace().nth(1)))
            .ok_or(io::ErrorKind::InvalidData)?,
        name: executable_name(&directory).unwrap_or_else(comm),
    })
}

/// Base name of /proc/PID/exe, without the mark of a replaced file.
fn executable_name(directory: &str) -> Option<String> {
    let target = fs::read_link(format!("{directory}/exe")).ok()?;
    let name = target.file_name()?.to_string_lossy();
    Some(name.strip_suffix(" (deleted)").unwrap_or(&name).to_owned())
}

/// `pid` itself, its children, their children and so on, parents before children.
pub fn process_tree(pid: u32) -> Vec<u32> {
    let mut tree = Vec::new();
    let mut waiting = VecDeque::from([pid]);
    while let Some(next) = waiting.pop_front() {
        if tree.len() >= MAX_PROCESSES {
            break;
        }
        tree.push(next);
        waiting.extend(children(next));
    }
    tree
}

/// Processes started by `pid` that still run; empty if it is gone.
pub fn children(pid: u32) -> Vec<u32> {
    let tasks = numbered(Path::new(&format!("/proc/{pid}/task")));
    let lists: Result<Vec<String>, io::Error> =
        tasks.iter().map(|task| fs::read_to_string(format!("/proc/{pid}/task/{task}/children"))).collect();
    match lists {
        Ok(lists) => lists.iter().flat_map(|list| list.split_whitespace()).flat_map(str::parse).collect(),
        // A kernel without CONFIG_PROC_CHILDREN, or a thread that just ended.
        Err(_) => all_pids()
            .into_iter()
            .filter(|other| process_info(*other).is_ok_and(|info| info.parent_pid == pid))
            .collect(),
    }
}

/// The process that holds the socket with this inode; only `within` and its descendants are asked if given.
///
/// Needs the right to read the process's descriptors: its own user, or CAP_SYS_PTRACE.
pub fn pid_of_socket(inode: u64, within: Option<u32>) -> Option<u32> {
    let pids = within.map_or_else(all_pids, process_tree);
    let link = format!("socket:[{inode}]");
    pids.into_iter().find(|pid| {
        let directory = format!("/proc/{pid}/fd");
        // A new socket has one of the last numbers.
        numbered(Path::new(&directory)).into_iter().take(MAX_FDS).rev().any(|fd| {
            fs::read_link(format!("{directory}/{fd}")).is_ok_and(|target| target.as_os_str() == link.as_str())
        })
    })
}

/// Whether this process itself holds the socket with this inode.
pub fn is_own_socket(inode: u64) -> bool {
    let link = format!("socket:[{inode}]");
    let directory = "/proc/self/fd";
    numbered(Path::new(directory)).into_iter().take(MAX_FDS).any(|fd| {
        fs::read_link(format!("{directory}/{fd}")).is_ok_and(|target| target.as_os_str() == link.as_str())
    })
}

/// The owner of the TCP socket with this local and remote address in the network namespace that process `pid`
/// lives in. IPv4 addresses are found on IPv6 sockets too.
pub fn tcp_socket(pid: u32, local: SocketAddr, remote: SocketAddr) -> Option<SocketOwner> {
    ["tcp", "tcp6"].iter().find_map(|table| {
        // Line by line: a host with a million connections has a table of 150 MB.
        let lines = io::BufReader::new(fs::File::open(format!("/proc/{pid}/net/{table}")).ok()?).lines();
        lines.skip(1).map_while(Result::ok).find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (at, to) = (proc_address(fields.get(1)?)?, proc_address(fields.get(2)?)?);
            (at == local && to == remote).then(|| owner(&fields)).flatten()
        })
    })
}

/// The owner in a line of these tables.
fn owner(fields: &[&str]) -> Option<SocketOwner> {
    Some(SocketOwner { uid: fields.get(7)?.parse().ok()?, inode: fields.get(9)?.parse().ok()? })
}

/// The owner of the UDP socket that sends from `local` to `remote`, in the network namespace that process `pid` lives in: the
/// one that is connected to `remote`, otherwise one that is not connected, and rather one bound to the address than one bound
/// to all. IPv4 addresses are found on IPv6 sockets too.
pub fn udp_socket(pid: u32, local: SocketAddr, remote: SocketAddr) -> Option<SocketOwner> {
    let mut best: Option<(u8, SocketOwner)> = None;
    for table in ["udp", "udp6"] {
        let Ok(file) = fs::File::open(format!("/proc/{pid}/net/{table}")) else { continue };
        for line in io::BufReader::new(file).lines().skip(1).map_while(Result::ok) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let address = |field: usize| proc_address(fields.get(field)?);
            let (Some(at), Some(to)) = (address(1), address(2)) else { continue };
            let Some(owner) = owner(&fields) else { continue };
            let fits = match (to == remote, to.port() == 0, at == local, at.ip().is_unspecified()) {
                (true, _, true, _) => 4,
                (true, _, _, true) => 3,
                (_, true, true, _) => 2,
                // One that is bound to all addresses of IPv6 may serve IPv4 too.
                (_, true, _, true) if at.is_ipv4() == local.is_ipv4() || at.is_ipv6() => 1,
                _ => continue,
            };
            if at.port() == local.port() && owner.inode != 0 && best.is_none_or(|(before, _)| before < fits) {
                best = Some((fits, owner));
            }
        }
    }
    best.map(|(_, owner)| owner)
}

/// `0100007F:0050` or its IPv6 kind: words of 32 bits in host order, then the port.
pub(crate) fn proc_address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        let word = u32::from_str_radix(address.get(at..at + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    let ip = match address.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let mut bytes = [0; 16];
            for (index, chunk) in bytes.chunks_exact_mut(4).enumerate() {
                chunk.copy_from_slice(&word(index * 8)?);
            }
            IpAddr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

/// How long a thread that was joined may still be counted by the kernel, which takes it apart afterwards.
const TAKEN_APART_WITHIN: Duration = Duration::from_secs(5);

/// True if the calling process has exactly one thread: only then may it fork and go on in the child. A thread that was joined may be
/// counted a moment longer, which is waited for: at most five seconds, if there really is another one.
pub fn is_single_threaded() -> bool {
    has_threads(1)
}

/// Whether the process has this number of threads, now or within [`TAKEN_APART_WITHIN`].
fn has_threads(count: usize) -> bool {
    let until = Instant::now() + TAKEN_APART_WITHIN;
    while numbered(Path::new("/proc/self/task")).len() != count {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Inode of the namespace of `kind` (`net`, `user`, `mnt`) that process `pid` lives in: equal inodes are the
/// same namespace.
///
/// # Errors
/// `NotFound` if the process is gone, `PermissionDenied` if it belongs to another user.
pub fn namespace_inode(pid: u32, kind: &str) -> io::Result<u64> {
    Ok(fs::metadata(format!("/proc/{pid}/ns/{kind}"))?.ino())
}

/// One process of each network namespace that a process of this host lives in, as far as they may be looked at
/// (CAP_SYS_PTRACE for those of other users).
pub fn in_each_network() -> Vec<u32> {
    let mut seen = HashSet::new();
    let is_new = |pid: &u32| namespace_inode(*pid, "net").is_ok_and(|inode| seen.insert(inode));
    all_pids().into_iter().filter(is_new).collect()
}

fn all_pids() -> Vec<u32> {
    numbered(Path::new("/proc"))
}

/// Entries of a directory whose names are numbers.
fn numbered(directory: &Path) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .take(MAX_PROCESSES)
        .collect()
}

/// Variables of the environment for what [`respawn`] starts.
static PASSED_ON: Mutex<Vec<(&str, String)>> = Mutex::new(Vec::new());

/// Processes that [`respawn`] starts from now on find this variable in their environment.
pub fn pass_on(variable: &'static str, value: &str) {
    let mut passed = lock(&PASSED_ON);
    passed.retain(|(other, _)| *other != variable);
    passed.push((variable, value.to_owned()));
}

/// Starts this program anew, with `argument` and one end of a connection as standard input: a process with nothing of our
/// memory that knows only what it is told. It is in a process group of its own, so that a terminal's signals reach it only
/// through us; the end of the connection is its end.
///
/// # Errors
/// What fork(2) or execve(2) say.
pub fn respawn(argument: &str, end: std::os::fd::OwnedFd) -> io::Result<std::process::Child> {
    use std::os::unix::process::CommandExt as _;
    use std::process::{Command, Stdio};
    Command::new("/proc/self/exe")
        .arg0("sidetrack")
        .arg(argument)
        .stdin(Stdio::from(end))
        .stdout(Stdio::null())
        .process_group(0)
        .envs(lock(&PASSED_ON).iter().map(|(name, value)| (*name, value)))
        .spawn()
}

/// As [`respawn`], but the process shares our standard output, for what it starts in turn.
///
/// # Errors
/// As [`respawn`].
pub fn respawn_with_output(argument: &str, end: std::os::fd::OwnedFd) -> io::Result<std::process::Child> {
    use std::os::unix::process::CommandExt as _;
    use std::process::{Command, Stdio};
    let mut command = Command::new("/proc/self/exe");
    command.arg0("sidetrack").arg(argument).stdin(Stdio::from(end)).process_group(0).spawn()
}

/// The process that has started this one; 1 if that has ended.
pub fn parent() -> i32 {
    rustix::process::getppid().map_or(1, |parent| parent.as_raw_nonzero().get())
}

/// Starts another program that is open, with our environment, both our outputs, and one end of a connection as standard input.
/// The path of the program need not be visible here. `left_out`: variables of the environment that it does not get.
///
/// # Errors
/// What fork(2) or execve(2) say: `PermissionDenied` if it is not a program, or its file system has `noexec`.
pub fn start_open(
    program: &std::os::fd::OwnedFd,
    arguments: &[std::ffi::OsString],
    end: std::os::fd::OwnedFd,
    left_out: &[&str],
) -> io::Result<std::process::Child> {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::process::CommandExt as _;
    use std::process::{Command, Stdio};
    // The kernel follows the link before it closes the descriptor.
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
    command.arg0("sidetrack").args(arguments).stdin(Stdio::from(end)).process_group(0);
    for variable in left_out {
        command.env_remove(variable);
    }
    command.spawn()
}

/// Starts this program anew with these arguments, without a terminal: its input is empty, both outputs go to `output`, and it is
/// in a session of its own. SIGTERM ends it when the thread that started it ends.
///
/// # Errors
/// What fork(2) or execve(2) say.
pub fn spawn_apart(arguments: &[std::ffi::OsString], output: &fs::File) -> io::Result<std::process::Child> {
    use std::os::unix::process::CommandExt as _;
    use std::process::{Command, Stdio};
    let parent = rustix::process::getpid();
    let mut command = Command::new("/proc/self/exe");
    command.arg0("sidetrack").args(arguments).stdin(Stdio::null());
    command.stdout(output.try_clone()?).stderr(output.try_clone()?);
    let apart = move || {
        rustix::process::setsid()?;
        match crate::caps::signal_on_parent_death(rustix::process::Signal::TERM, parent)? {
            true => Ok(()),
            false => Err(io::ErrorKind::BrokenPipe.into()),
        }
    };
    // SAFETY: between fork and exec it makes three system calls, and allocates nothing.
    unsafe { command.pre_exec(apart) };
    command.spawn()
}

/// Memory of this process: resident and virtual, bytes. `None` if /proc is not mounted.
pub fn memory_bytes() -> Option<(u64, u64)> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let bytes = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name))?;
        value.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
    };
    Some((bytes("VmRSS:")?, bytes("VmSize:")?))
}

/// Returns the CPU time that a process has used so far, microseconds. `None` if it is gone.
pub fn cpu_us(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program may have spaces and brackets. `utime` and `stime` are the 12th and 13th field after it.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let used = ticks()?.checked_add(ticks()?)?;
    // The kernel shows these times to user space in hundredths of a second (USER_HZ), on all processors that we are built for.
    used.checked_mul(10_000)
}

/// A descriptor that becomes readable when the process ends (pidfd_open(2), Linux 5.3).
///
/// # Errors
/// ESRCH if there is no such process.
pub fn watch(pid: u32) -> io::Result<std::os::fd::OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?)
}

/// Ends this process by a signal, as a command that we ran has ended. Returns if the signal does not end it: the first process of a
/// container survives most of them.
pub fn end_by(signal: i32) {
    // SAFETY: resets one signal and lets it through in this thread; the set lives across the calls. Nothing runs afterwards but what
    // the caller does if the process is still there.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        libc::signal(signal, libc::SIG_DFL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::kill(libc::getpid(), signal);
    }
}

/// A variable of the environment, but not where this program has more rights than its caller (set-user-id, file
/// capabilities: AT_SECURE of getauxval(3)): then the environment is the caller's to choose, and is not ours to follow.
pub fn environment(name: &str) -> Option<std::ffi::OsString> {
    if is_secure() { None } else { std::env::var_os(name) }
}

fn is_secure() -> bool {
    // SAFETY: reads the auxiliary vector of this process; no argument is a pointer.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Names this thread for `ps` and `top`; at most 15 bytes are shown. The first thread's name is that of the process.
///
/// # Errors
/// What prctl(2) says.
pub fn set_name(name: &std::ffi::CStr) -> io::Result<()> {
    Ok(rustix::thread::set_name(name)?)
}

/// Makes this process deaf to what ends programs from a terminal or a service manager (SIGINT, SIGTERM, SIGHUP), for one that
/// ends with another process.
pub fn ignore_stop_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: SIG_IGN runs no code of ours; the numbers are valid.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::process::{Child, Command, Stdio};

    /// A shell whose child is `cat`, waiting for its input to end.
    fn shell_with_child() -> Child {
        Command::new("sh")
            .args(["-c", "cat; exit 0"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    #[test]
    fn we_are_our_own_executable() {
        let info = process_info(std::process::id()).unwrap();
        assert!(info.name.starts_with("sidetrack_sys-"), "{}", info.name);
        assert_eq!(info.uid, rustix::process::geteuid().as_raw());
        assert_eq!(Some(info.parent_pid), std::os::unix::process::parent_id().into());
        assert_eq!(process_info(u32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_thread_that_was_joined_is_not_counted() {
        // A process of its own: the tests beside this one have threads. The kernel counts a thread a moment longer than a join waits.
        const ALONE: &str = "SIDETRACK_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let mut again = Command::new("/proc/self/exe");
            again.env(ALONE, "1").args(["--exact", "--nocapture", "--test-threads=1"]);
            let told = again.arg("process::tests::a_thread_that_was_joined_is_not_counted").output().unwrap();
            assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stdout));
            return;
        }
        // The thread that runs this test is one of two.
        let before = numbered(Path::new("/proc/self/task")).len();
        for _ in 0..1_000 {
            std::thread::spawn(|| ()).join().unwrap();
            assert!(has_threads(before), "a joined thread is counted");
        }
        assert_eq!(numbered(Path::new("/proc/self/task")).len(), before);
    }

    #[test]
    fn grandchildren_are_in_the_tree() {
        let mut shell = shell_with_child();
        let id = shell.id();
        let is_cat =
            |pid: &u32| process_info(*pid).is_ok_and(|info| info.parent_pid == id && info.name == "cat");
        let until = Instant::now() + Duration::from_secs(60);
        let grandchild = loop {
            if let Some(cat) = process_tree(std::process::id()).into_iter().find(is_cat) {
                break cat;
            }
            assert!(Instant::now() < until, "cat is not in the tree");
        };
        assert!(process_tree(shell.id()).contains(&grandchild));
        assert_eq!(children(grandchild), []);
        drop(shell.stdin.take());
        shell.wait().unwrap();
    }

    #[test]
    fn a_socket_leads_to_its_process() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (local, remote) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
            let SocketOwner { uid, inode } = tcp_socket(std::process::id(), local, remote).unwrap();
            assert_eq!(uid, rustix::process::geteuid().as_raw());
            assert_eq!(inode, rustix::fs::fstat(client.as_fd()).unwrap().st_ino);
            assert_eq!(pid_of_socket(inode, Some(std::process::id())), Some(std::process::id()));
            // Or a child that another test is starting: it holds a copy until it execs.
            let (anywhere, ours) = (pid_of_socket(inode, None).unwrap(), std::process::id());
            assert!(anywhere == ours || process_info(anywhere).is_ok_and(|info| info.parent_pid == ours));
            let mut other = shell_with_child();
            assert_eq!(pid_of_socket(inode, Some(other.id())), None);
            drop(other.stdin.take());
            other.wait().unwrap();
        }
    }

    #[test]
    fn each_network_has_one_process() {
        let networks = in_each_network();
        let inodes: Vec<_> = networks.iter().map(|pid| namespace_inode(*pid, "net").ok()).collect();
        let ours = namespace_inode(std::process::id(), "net").ok();
        assert_eq!(inodes.iter().filter(|inode| **inode == ours).count(), 1, "{inodes:?}");
    }

    #[test]
    fn proc_addresses_are_read_in_host_order() {
        if cfg!(target_endian = "little") {
            let four = proc_address("0100007F:0050").unwrap();
            assert_eq!(four.to_string(), "127.0.0.1:80");
            let six = proc_address("B80D0120000000000000000001000000:01BB").unwrap();
            assert_eq!(six.to_string(), "[2001:db8::1]:443");
            let mapped = proc_address("0000000000000000FFFF00000100007F:0016").unwrap();
            assert_eq!(mapped.to_string(), "127.0.0.1:22");
        }
        for bad in ["", "0100007F", "0100007F:", "00:0050", "xx00007F:0050", "é0007F:0050"] {
            assert_eq!(proc_address(bad), None, "{bad}");
        }
    }
}
