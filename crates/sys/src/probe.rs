//! What this kernel, this user and this machine allow, found out by looking and by harmless tries. For `doctor` and
//! `cleanup`.

use crate::exec::{IsolatedCommand, LaunchError, PrivateFiles, Program, spawn_isolated};
use std::io::ErrorKind;
use std::net::{Ipv6Addr, TcpListener};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The effective user id.
pub fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The kernel's release, as `uname -r` prints it.
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Starts a command that does nothing in a network of its own, as `run` does, and says how long that took until it had
/// ended.
///
/// # Errors
/// The step that failed, and what to do about it. That the command itself is missing is not a failure of this.
///
/// # Panics
/// If the process has more than one thread.
pub fn try_isolation() -> Result<Duration, LaunchError> {
    let begun = Instant::now();
    let program = Program { argv: vec!["true".into()], ..Program::default() };
    let command = IsolatedCommand {
        program,
        files: PrivateFiles::default(),
        redirect_port: TRIED_PORT,
        hold: None,
        publishes: false,
        captures: false,
    };
    match spawn_isolated(&command) {
        Ok(isolated) => {
            isolated.child.wait().map_err(LaunchError::Wait)?;
            Ok(begun.elapsed())
        }
        Err(LaunchError::NotFound(_) | LaunchError::NotExecutable(..)) => Ok(begun.elapsed()),
        Err(error) => Err(error),
    }
}

/// Any port: the namespace is new and no other socket listens there.
const TRIED_PORT: u16 = 9;

/// Whether sockets of IPv6 can be made and bound here: not switched off, by the boot line or by a setting.
pub fn has_ipv6() -> bool {
    TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok()
}

/// Whether sockets of Multipath TCP can be made (RFC 8684).
pub fn has_mptcp() -> bool {
    crate::sockopt::mptcp_socket(&([127, 0, 0, 1], 0).into()).is_ok_and(|(_, multipath)| multipath)
}

/// Whether `path` is a unix socket without a listening process: left by a process that was killed.
pub fn socket_is_stale(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    is_socket && UnixStream::connect(path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_is_stale_when_nobody_listens() {
        let path = std::env::temp_dir().join(format!("sidetrack-probe-{}.sock", std::process::id()));
        let listener = UnixListener::bind(&path).expect("a socket");
        assert!(!socket_is_stale(&path));
        // Before the drop: a child that another test is starting holds a copy until it execs, and would still listen.
        rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).expect("a listener");
        drop(listener);
        assert!(socket_is_stale(&path));
        std::fs::remove_file(&path).expect("ours");
        assert!(!socket_is_stale(&path), "nothing is there");
        assert!(!socket_is_stale(Path::new("/proc/self/status")), "no socket");
    }

    #[test]
    fn the_kernel_says_its_release() {
        assert!(kernel_release().starts_with(|c: char| c.is_ascii_digit()));
    }
}
