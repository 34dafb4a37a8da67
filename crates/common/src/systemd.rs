//! What a service manager is told: systemd's notification protocol (sd_notify(3), systemd.service(5) `Type=notify-reload`).
//!
//! ```text
//! start ──READY──> serving ──RELOADING──> reloading ──READY──> serving ──STOPPING──> draining
//!                    └─ WATCHDOG, while the work goes on
//! ```
//!
//! Listening sockets come from it ([`passed`]), and it keeps those of a process that crashes: `FDSTORE=1`, for units with
//! `FileDescriptorStoreMax=`. Others ignore that.
//!
//! The socket is connected before the process gives up its rights, because its folder may be closed afterwards.
//! Without `NOTIFY_SOCKET` in the environment nothing is sent.

pub mod passed;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidetrack_sys::scm;
use sidetrack_sys::sync::lock;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Mutex;
use std::time::Duration;

/// How often `WATCHDOG=1` is sent within the time that the unit file gives.
const BEATS_PER_LIMIT: u32 = 3;

/// How long the service manager may take to close what it kept.
const CLOSED_WITHIN: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// The socket of the service manager that started this process.
#[derive(Debug)]
pub struct Systemd {
    socket: UnixDatagram,
    /// `WatchdogSec=` of the unit file.
    watchdog: Option<Duration>,
    /// Names of what it keeps for us.
    kept: Mutex<BTreeSet<String>>,
}

impl Systemd {
    /// Connects to the socket that the environment names; `None` if there is none.
    pub fn from_environment() -> Option<Self> {
        Self::of(|name| std::env::var_os(name))
    }

    fn of(variable: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        let path = variable("NOTIFY_SOCKET")?;
        let connected = (|| {
            let socket = UnixDatagram::unbound()?;
            // A manager that reads too slowly must not stop the process.
            socket.set_nonblocking(true)?;
            match path.as_bytes() {
                [b'@', name @ ..] => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
                _ => socket.connect(&path)?,
            }
            Ok::<_, std::io::Error>(socket)
        })();
        match connected {
            Ok(socket) => Some(Self { socket, watchdog: watchdog(variable), kept: Mutex::default() }),
            Err(error) => {
                tracing::warn!(
                    "cannot connect to NOTIFY_SOCKET {}: {error}; the service manager is told nothing",
                    path.display()
                );
                None
            }
        }
    }

    /// The process serves, a node with the present configuration.
    pub fn ready(&self) {
        self.send("READY=1\nSTATUS=serving");
    }

    /// A reload has begun. [`Systemd::ready`] ends it, also if the file was rejected.
    pub fn reloading(&self) {
        let now = sidetrack_sys::bpf::monotonic_ns() / 1_000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={now}\nSTATUS=reading the configuration"));
    }

    /// Another process of the unit is the main one from now on (`MAINPID=`). Only the main process may say so. It gives what it
    /// wants to be kept.
    pub fn replaced_by(&self, pid: u32) {
        self.forget(|_| true);
        self.send(&format!("MAINPID={pid}\nSTATUS=upgraded"));
    }

    /// The process takes no more work. `status` is one line that `systemctl status` shows. Nothing is kept any more.
    pub fn stopping(&self, status: &str) {
        self.forget(|_| true);
        self.send(&format!("STOPPING=1\nSTATUS={status}"));
    }

    /// How often [`Systemd::alive`] is to be said: three times within the unit's `WatchdogSec=`. `None`: the unit has no watchdog.
    pub fn beat(&self) -> Option<Duration> {
        self.watchdog.map(|limit| limit / BEATS_PER_LIMIT)
    }

    /// The process does its work (`WATCHDOG=1`). Without it for `WatchdogSec=`, the service manager ends the process.
    pub fn alive(&self) {
        self.send("WATCHDOG=1");
    }

    /// Another process of the unit has given these names, before this one.
    pub fn keeps_already(&self, names: impl IntoIterator<Item = String>) {
        lock(&self.kept).extend(names);
    }

    /// Lets the service manager keep copies of these sockets, and pass them to the process after this one if this one crashes. Nothing
    /// happens if it keeps some under this name already.
    pub fn keep(&self, name: &str, sockets: &[BorrowedFd<'_>]) {
        if !lock(&self.kept).insert(name.to_owned()) {
            return;
        }
        let text = format!("FDSTORE=1\nFDNAME={name}");
        for sockets in sockets.chunks(scm::MAX_FDS) {
            if let Err(error) = scm::send(&self.socket, text.as_bytes(), sockets) {
                tracing::warn!("the service manager cannot be given the sockets of {name}: {error}");
            }
        }
    }

    /// Lets the service manager close what it keeps under these names, and waits until it has done so, for two seconds at most: a socket
    /// that it still has would get connections that no process accepts.
    pub fn forget(&self, is_gone: impl Fn(&str) -> bool) {
        let gone: Vec<_> = lock(&self.kept).extract_if(.., |name| is_gone(name)).collect();
        if gone.is_empty() {
            return;
        }
        gone.iter().for_each(|name| self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}")));
        let waited = std::io::pipe().and_then(|(ours, theirs)| {
            scm::send(&self.socket, b"BARRIER=1", &[theirs.as_fd()])?;
            drop(theirs);
            Ok(poll(&mut [PollFd::new(&ours, PollFlags::empty())], Some(&CLOSED_WITHIN))?)
        });
        match waited {
            Ok(0) => tracing::warn!("the service manager does not say that it has closed {gone:?}"),
            Ok(_) => {}
            Err(error) => tracing::warn!("the service manager cannot be told to close {gone:?}: {error}"),
        }
    }

    fn send(&self, text: &str) {
        if let Err(error) = self.socket.send(text.as_bytes()) {
            tracing::warn!("the service manager cannot be told {text:?}: {error}");
        }
    }
}

/// The watchdog's limit, if it is meant for this process.
fn watchdog(variable: impl Fn(&str) -> Option<OsString>) -> Option<Duration> {
    let number = |name: &str| variable(name)?.to_str()?.parse::<u64>().ok();
    if variable("WATCHDOG_PID").is_some() && number("WATCHDOG_PID") != Some(std::process::id().into()) {
        return None;
    }
    number("WATCHDOG_USEC").filter(|limit| *limit > 0).map(Duration::from_micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment<'a>(entries: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + Copy + 'a {
        move |name| entries.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
    }

    #[test]
    fn nothing_is_sent_without_a_socket() {
        assert!(Systemd::of(environment(&[])).is_none());
        assert!(Systemd::of(environment(&[("NOTIFY_SOCKET", "/nowhere/socket")])).is_none());
    }

    #[test]
    fn the_watchdog_is_of_this_process_only() {
        let own = std::process::id().to_string();
        let of = |entries: &[(&str, &str)]| watchdog(environment(entries));
        assert_eq!(of(&[("WATCHDOG_USEC", "3000000")]), Some(Duration::from_secs(3)));
        assert_eq!(of(&[("WATCHDOG_USEC", "3000000"), ("WATCHDOG_PID", &own)]), Some(Duration::from_secs(3)));
        for wrong in ["0", "-1", "many"] {
            assert_eq!(of(&[("WATCHDOG_USEC", wrong)]), None, "{wrong}");
            assert_eq!(of(&[("WATCHDOG_USEC", "3000000"), ("WATCHDOG_PID", wrong)]), None, "{wrong}");
        }
    }
}
