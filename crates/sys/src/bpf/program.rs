//! BPF programs: loads them, runs them on test packets, attaches them to interfaces.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use super::object::INSTRUCTION;
use super::syscall::{Argument, Command};

/// Room for the verifier's log about a program that it rejects, bytes.
const LOG_BYTES: usize = 1 << 20;

/// How often the verifier may say EAGAIN: a signal came while it worked.
const INTERRUPTED_MAX: usize = 16;

/// Lines of the verifier's log that an error quotes, from its end.
const LOG_LINES: usize = 12;

/// Numbers of the tcx hooks (`enum bpf_attach_type`).
pub(super) const TCX_INGRESS: u32 = 46;
pub(super) const TCX_EGRESS: u32 = 47;

/// The kind of a program (`enum bpf_prog_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ProgramKind {
    /// Filters packets for a socket, or chooses one of several sockets.
    SocketFilter = 1,
    /// Runs on packets between the driver and the network stack, with the kernel's metadata (`__sk_buff`).
    Tc = 3,
    /// Runs on frames in the driver.
    Xdp = 6,
}

/// Where a program is attached to an interface. The kernel detaches it when its descriptor is closed, however
/// the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// tcx ingress (Linux 6.6).
    TcxIngress,
    /// tcx egress (Linux 6.6).
    TcxEgress,
    /// XDP in the driver.
    XdpNative,
    /// XDP behind the driver: works on every interface, but is slow.
    XdpGeneric,
}

/// Why a program could not be loaded.
#[derive(Debug, thiserror::Error)]
#[error("the kernel refuses the BPF program '{name}': {source}{log}")]
pub struct LoadError {
    name: String,
    source: io::Error,
    log: String,
}

impl LoadError {
    /// Returns the system's error: EPERM means that a capability is missing, EINVAL and EACCES come from the
    /// verifier.
    pub const fn io(&self) -> &io::Error {
        &self.source
    }
}

/// A loaded program. It lives as long as this process or an interface it is attached to holds it.
#[derive(Debug)]
pub struct Program {
    fd: OwnedFd,
    kind: ProgramKind,
}

/// A program attached to an interface, until this is dropped.
#[derive(Debug)]
pub struct Link {
    fd: OwnedFd,
}

impl Link {
    /// Lets it outlive this process, under this name in a file system of type `bpf`. It ends when the name is removed and no
    /// process has it.
    pub(super) fn pin(&self, path: &Path) -> io::Result<()> {
        super::pin::pin(self.fd.as_fd(), path)
    }

    /// Takes over the one with this name.
    pub(super) fn pinned(path: &Path) -> io::Result<Self> {
        super::pin::open(path).map(|fd| Self { fd })
    }

    /// Takes over the one of another process.
    pub(super) const fn given(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Returns a copy of its descriptor, for another process.
    pub(super) fn copy(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// Returns the index of the interface that it is attached to at a tcx hook; 0: the interface is gone.
    pub(super) fn interface(&self) -> io::Result<u32> {
        /// In `struct bpf_link_info`.
        const INTERFACE: usize = 4;
        super::pin::info::<6>(self.fd.as_fd()).map(|words| words[INTERFACE])
    }

    /// Replaces the program that is attached. No packet passes in between.
    pub(super) fn replace(&self, program: &Program) -> io::Result<()> {
        let mut argument = Argument::new().fd(0, self.fd.as_raw_fd()).fd(4, program.fd.as_raw_fd());
        // SAFETY: no addresses.
        unsafe { argument.perform(Command::LinkUpdate) }
    }
}

/// What a program did with a test packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Its return value: `TC_ACT_*` or `XDP_*`.
    pub verdict: u32,
    /// The packet afterwards.
    pub packet: Vec<u8>,
}

impl Program {
    /// Loads instructions, under a licence that the kernel knows.
    ///
    /// # Errors
    /// EPERM without CAP_BPF and CAP_NET_ADMIN; the verifier's reason to reject it.
    pub fn load(name: &str, kind: ProgramKind, code: &[u8], license: &str) -> Result<Self, LoadError> {
        let fail = |source, log| LoadError { name: name.to_owned(), source, log };
        let license = std::ffi::CString::new(license).map_err(|error| fail(error.into(), String::new()))?;
        let count = u32::try_from(code.len() / INSTRUCTION).unwrap_or(u32::MAX);
        let argument = || {
            Argument::new()
                .u32(0, kind as u32)
                .u32(4, count)
                .input(8, code)
                .input(16, license.as_bytes_with_nul())
                .name(48, &name.replace('/', "_"))
        };
        for _ in 0..INTERRUPTED_MAX {
            // SAFETY: the code has `count` instructions, the licence a final NUL; both are borrowed until here.
            match unsafe { argument().open(Command::ProgramLoad) } {
                Ok(fd) => return Ok(Self { fd, kind }),
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(_) => break,
            }
        }
        // Loading again with a log yields the reason.
        let mut log = vec![0; LOG_BYTES];
        let mut argument = argument().u32(24, 1).u32(28, 1 << 20).output(32, &mut log);
        // SAFETY: as above, and the log is as long as said.
        let again = unsafe { argument.open(Command::ProgramLoad) };
        again.map(|fd| Self { fd, kind }).map_err(|source| fail(source, last_words(&log)))
    }

    /// Runs it on one packet (a whole frame) as if it had come in by the interface with this index.
    ///
    /// # Errors
    /// What bpf(2) reports.
    pub fn try_on(&self, packet: &[u8], ingress: u32) -> io::Result<Trial> {
        self.try_marked(packet, ingress, 0)
    }

    /// The same for a packet with this mark. A program of XDP sees none.
    ///
    /// # Errors
    /// What bpf(2) reports.
    pub fn try_marked(&self, packet: &[u8], ingress: u32, mark: u32) -> io::Result<Trial> {
        // A program may lengthen the packet, up to a page.
        let mut after = vec![0; packet.len() + 4096];
        // struct __sk_buff has mark at 8, ifindex at 40; struct xdp_md has data_end at 4, ingress_ifindex at 12.
        let mut context = vec![0; if self.kind == ProgramKind::Xdp { 24 } else { 192 }];
        match self.kind {
            ProgramKind::SocketFilter => {}
            ProgramKind::Tc => {
                context[8..12].copy_from_slice(&mark.to_ne_bytes());
                context[40..44].copy_from_slice(&ingress.to_ne_bytes());
            }
            ProgramKind::Xdp => {
                let end = u32::try_from(packet.len()).unwrap_or(u32::MAX);
                context[4..8].copy_from_slice(&end.to_ne_bytes());
                context[12..16].copy_from_slice(&ingress.to_ne_bytes());
            }
        }
        let room = u32::try_from(after.len()).unwrap_or(u32::MAX);
        let mut argument = Argument::new()
            .fd(0, self.fd.as_raw_fd())
            .u32(8, u32::try_from(packet.len()).unwrap_or(u32::MAX))
            .u32(12, room)
            .input(16, packet)
            .output(24, &mut after)
            .u32(32, 1)
            .u32(40, u32::try_from(context.len()).unwrap_or(u32::MAX))
            .input(48, &context);
        // SAFETY: every buffer has the length that stands beside it and is borrowed until here.
        unsafe { argument.perform(Command::ProgramTestRun) }?;
        let (verdict, length) = (argument.read_u32(4), argument.read_u32(12) as usize);
        after.truncate(length);
        Ok(Trial { verdict, packet: after })
    }

    /// Attaches it to the interface with this index, in this thread's network namespace.
    ///
    /// # Errors
    /// EBUSY if another XDP program is there; EINVAL if the kernel has no such hook, EOPNOTSUPP if the driver has none.
    pub fn attach(&self, ingress: u32, hook: Hook) -> io::Result<Link> {
        const XDP: u32 = 37;
        let (kind, flags) = match hook {
            Hook::TcxIngress => (TCX_INGRESS, 0),
            Hook::TcxEgress => (TCX_EGRESS, 0),
            Hook::XdpGeneric => (XDP, 1 << 1),
            Hook::XdpNative => (XDP, 1 << 2),
        };
        let mut argument =
            Argument::new().fd(0, self.fd.as_raw_fd()).u32(4, ingress).u32(8, kind).u32(12, flags);
        // SAFETY: no addresses; the result is a descriptor.
        unsafe { argument.open(Command::LinkCreate) }.map(|fd| Link { fd })
    }
}

impl std::os::fd::AsFd for Program {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn last_words(log: &[u8]) -> String {
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
    let text = String::from_utf8_lossy(&log[..end]);
    let lines: Vec<_> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
    if last.is_empty() { String::new() } else { format!("\n{}", last.join("\n")) }
}
