//! Network namespaces (network_namespaces(7)): naming them, entering them, and a network in which everything
//! is local.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::mount::UnmountFlags;
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

use crate::netlink::{Protocol, Socket};
use crate::nft::HoldQueue;
use crate::{netlink, nft, route, sysctl};

/// Where `ip netns` keeps names.
pub const NAMED: &str = "/run/netns";

/// An open network namespace: it lives at least as long as this.
#[derive(Debug)]
pub struct NetNs(OwnedFd);

impl NetNs {
    /// The calling thread's.
    ///
    /// # Errors
    /// What open(2) says.
    pub fn current() -> io::Result<Self> {
        Self::open(Path::new("/proc/thread-self/ns/net"))
    }

    /// That of a process.
    ///
    /// # Errors
    /// `NotFound` if the process is gone, `PermissionDenied` if it belongs to another user.
    pub fn of_process(pid: u32) -> io::Result<Self> {
        Self::open(Path::new(&format!("/proc/{pid}/ns/net")))
    }

    /// One that `ip netns add` or [`Self::create_named`] made.
    ///
    /// # Errors
    /// `InvalidInput` if the name is none; `NotFound` if there is no such namespace.
    pub fn named(name: &str) -> io::Result<Self> {
        Self::open(&path_of(name)?)
    }

    /// The one that a socket belongs to (SIOCGSKNS, Linux 4.10).
    ///
    /// # Errors
    /// `PermissionDenied` without CAP_NET_ADMIN there; ENOTTY if it is not a socket.
    pub fn of_socket(fd: impl AsFd) -> io::Result<Self> {
        /// include/uapi/linux/sockios.h
        const SIOCGSKNS: libc::Ioctl = 0x894C;
        let fd = fd.as_fd();
        // SAFETY: the request takes no argument and touches no memory of ours.
        let opened = unsafe { libc::ioctl(fd.as_raw_fd(), SIOCGSKNS) };
        if opened < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened this descriptor for us, and no other code has it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(opened) }))
    }

    /// Whether both are the same namespace.
    ///
    /// # Errors
    /// What fstat(2) says.
    pub fn is(&self, other: &Self) -> io::Result<bool> {
        let (ours, theirs) = (rustix::fs::fstat(&self.0)?, rustix::fs::fstat(&other.0)?);
        Ok((ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino))
    }

    /// The one at this path: a name that `ip netns` keeps, or `/proc/PID/ns/net`.
    ///
    /// # Errors
    /// What open(2) says.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(File::open(path)?.into()))
    }

    /// Makes a new, empty namespace that `ip netns` lists as `name`. Needs CAP_SYS_ADMIN.
    ///
    /// # Errors
    /// `AlreadyExists`; `InvalidInput` if the name is none; `PermissionDenied`.
    pub fn create_named(name: &str) -> io::Result<Self> {
        let path = path_of(name)?;
        fs::create_dir_all(NAMED)?;
        File::create_new(&path)?;
        let made = in_own_thread({
            let path = path.clone();
            move || {
                unshare_net()?;
                rustix::mount::mount_bind("/proc/thread-self/ns/net", &path)?;
                Self::current()
            }
        });
        if made.is_err() {
            // The empty file would look like a namespace; that it stays is the smaller trouble.
            let _ = fs::remove_file(&path);
        }
        made
    }

    /// Takes a name away; the namespace goes with its last process, socket and descriptor.
    ///
    /// # Errors
    /// `NotFound` if there is no such name; `PermissionDenied`.
    pub fn delete_named(name: &str) -> io::Result<()> {
        let path = path_of(name)?;
        rustix::mount::unmount(&path, UnmountFlags::DETACH)?;
        fs::remove_file(path)
    }

    /// Moves the calling thread, and no other, into this namespace. Sockets stay where they were opened.
    ///
    /// # Errors
    /// `PermissionDenied` without CAP_SYS_ADMIN over it.
    pub fn enter(&self) -> io::Result<()> {
        Ok(rustix::thread::move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    /// Runs `work` in this namespace, in a thread of its own: to open a socket there, say.
    ///
    /// # Errors
    /// As [`Self::enter`], or what `work` says.
    ///
    /// # Panics
    /// If `work` does.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        in_own_thread(|| {
            self.enter()?;
            work()
        })
    }
}

impl AsFd for NetNs {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Makes a network namespace of its own for the calling thread.
pub(crate) fn unshare_net() -> io::Result<()> {
    // SAFETY: CLONE_NEWNET changes which network later sockets belong to, and no memory or descriptor.
    Ok(unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?)
}

/// What [`catch_all`] was doing when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CatchStep {
    /// `lo` up.
    Loopback,
    /// Local default routes.
    Route,
    /// The nft redirect.
    Redirect,
}

/// An MTU of `lo` with which no datagram is fragmented: the largest packet of IPv6 with its header (RFC 8200 Sec. 3). With more,
/// TCP would make segments that are longer than the length field of IPv6 can say, and lose them.
pub const WHOLE_DATAGRAMS: u32 = 40 + 65_535;
/// Seconds for which connection tracking remembers a connection after both ends have closed it; 120 by default.
const TIME_WAIT: &str = "net/netfilter/nf_conntrack_tcp_timeout_time_wait";

/// Makes every address of the calling thread's network local and sends every TCP connection, and datagrams but for DNS, to
/// `port`, but for those to a loopback address at which something listens in it. The sockets at `port` need IP_TRANSPARENT.
/// For a fresh namespace only. Needs CAP_NET_ADMIN there. With `hold`, the opening segment of each connection waits in that
/// queue first. With `leaves_ours`, connections of sockets with [`nft::ANSWERS_MARK`] are not caught.
///
/// # Errors
/// The step, and what the kernel said.
pub fn catch_all(
    port: u16,
    hold: Option<HoldQueue>,
    leaves_ours: bool,
) -> Result<(), (CatchStep, netlink::Error)> {
    // Fragments on `lo` pass prerouting one by one: connection tracking does not reassemble what it has seen at output.
    // Without the larger MTU, IPv6 datagrams of more than 65,488 bytes are lost.
    let _ = route::set_mtu("lo", WHOLE_DATAGRAMS);
    // A kernel without `tproxy` redirects: the port of an ended connection changes on its way to us as long as that one is remembered. No
    // segment comes late on `lo`.
    let _ = sysctl::write(TIME_WAIT, "1");
    route::link_up("lo").map_err(|error| (CatchStep::Loopback, error))?;
    route::add_local_default("lo").map_err(|error| (CatchStep::Route, error))?;
    Socket::open(Protocol::Netfilter)
        .and_then(|mut socket| {
            // A kernel without `fib` refuses datagrams. One without `socket` or `tproxy` also sends connections to servers of
            // the namespace out.
            let marked = |table| if leaves_ours { nft::leaving_ours(table) } else { table };
            let with_datagrams =
                marked(nft::run_namespace_with_datagrams_held(port, hold)).apply(&mut socket);
            with_datagrams
                .or_else(|_| marked(nft::run_namespace_with_servers_held(port, hold)).apply(&mut socket))
                .or_else(|_| marked(nft::run_namespace_held(port, hold)).apply(&mut socket))
        })
        .map_err(|error| (CatchStep::Redirect, error))
}

/// Namespaces belong to threads, so what changes them gets one that ends afterwards.
fn in_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| match scope.spawn(work).join() {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

fn path_of(name: &str) -> io::Result<PathBuf> {
    if name.is_empty() || name.len() > 255 || name.contains(['/', '\0']) || name.starts_with('.') {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the name of a namespace is 1 to 255 bytes without '/', not starting with '.'",
        ));
    }
    Ok(Path::new(NAMED).join(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn names_cannot_leave_the_directory() {
        for bad in ["", ".", "..", "a/b", "../x", "nul\0"] {
            assert_eq!(path_of(bad).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{bad:?}");
        }
        assert_eq!(path_of("st-a").unwrap(), Path::new("/run/netns/st-a"));
    }

    #[test]
    fn a_named_namespace_is_made_entered_and_deleted() {
        if !crate::caps::is_network_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let name = format!("sidetrack-test-{}", std::process::id());
        let space = NetNs::create_named(&name).unwrap();
        assert_eq!(NetNs::create_named(&name).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let inode = |space: &NetNs| rustix::fs::fstat(space).unwrap().st_ino;
        assert_eq!(inode(&NetNs::named(&name).unwrap()), inode(&space));
        let ours = NetNs::current().unwrap();
        assert_ne!(inode(&space), inode(&ours));
        // `lo` is down in a new namespace: only there does a listener's own address not answer.
        let listener = space.run(|| TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        assert!(space.run(move || std::net::TcpStream::connect(address)).is_err());
        assert_eq!(inode(&NetNs::current().unwrap()), inode(&ours));
        NetNs::delete_named(&name).unwrap();
        assert_eq!(NetNs::named(&name).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(NetNs::delete_named(&name).is_err());
    }

    #[test]
    fn everything_is_caught_in_a_network_of_its_own() {
        if !crate::caps::is_network_root() {
            eprintln!("skipped: needs root");
            return;
        }
        in_own_thread(|| {
            unshare_net().unwrap();
            catch_all(9, None, false).unwrap();
            let options = crate::sockopt::ListenOptions {
                dual_stack: true,
                transparent: true,
                ..crate::sockopt::ListenOptions::default()
            };
            let listener = crate::sockopt::listen("[::]:9".parse().unwrap(), &options).unwrap();
            listener.set_nonblocking(false).unwrap();
            for target in ["192.0.2.1:80", "[2001:db8::1]:443", "127.0.0.1:22", "198.18.0.1:53"] {
                let client = std::net::TcpStream::connect(target).unwrap();
                let (accepted, _peer) = listener.accept().unwrap();
                assert_eq!(crate::sockopt::original_dst(&accepted).unwrap().to_string(), target);
                drop(client);
            }
        });
    }
}
