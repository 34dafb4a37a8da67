//! What this kernel, this user and this machine allow, found out by looking and by harmless tries. For `doctor` and
//! `cleanup`.

use crate::exec::{IsolatedCommand, LaunchError, PrivateFiles, Program, spawn_isolated};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
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

/// The variable in which sshd names the addresses of a session.
const SSH_CONNECTION: &str = "SSH_CONNECTION";

/// Most processes whose environment is looked at for [`SSH_CONNECTION`].
const ANCESTORS_MAX: usize = 32;

/// The SSH session from which this program was started: the addresses of its client and of its server. Looks at the environment of
/// this process, and then at that of the processes that have started it, because sudo leaves the variable out.
pub fn ssh_session() -> Option<[SocketAddr; 2]> {
    if let Some(text) = crate::process::environment(SSH_CONNECTION) {
        return session(text.to_str()?);
    }
    let mut pid = u32::try_from(crate::process::parent()).ok()?;
    for _ in 0..ANCESTORS_MAX {
        // The first process is not of a session, and sshd itself may have been started in another one.
        let info = crate::process::process_info(pid).ok().filter(|info| info.name != "sshd")?;
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let texts = environment.split(|byte| *byte == 0).filter_map(|text| std::str::from_utf8(text).ok());
        let mut found = texts.filter_map(|text| text.strip_prefix(SSH_CONNECTION)?.strip_prefix('='));
        if let Some(text) = found.next() {
            return session(text);
        }
        pid = Some(info.parent_pid).filter(|parent| *parent > 1)?;
    }
    None
}

/// Reads `client-address client-port server-address server-port` (sshd(8)).
fn session(text: &str) -> Option<[SocketAddr; 2]> {
    let mut words = text.split(' ');
    let mut address = || {
        // A link-local address has a zone, which the packet filter does not know.
        let ip: IpAddr = words.next()?.split('%').next()?.parse().ok()?;
        Some(SocketAddr::new(ip.to_canonical(), words.next()?.parse().ok()?))
    };
    Some([address()?, address()?])
}

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

    #[test]
    fn a_session_has_two_addresses() {
        let read = |text: &str| session(text).map(|both| both.map(|address| address.to_string()));
        let both = |client: &str, server: &str| Some([client.to_owned(), server.to_owned()]);
        assert_eq!(read("192.0.2.1 4000 192.0.2.2 22"), both("192.0.2.1:4000", "192.0.2.2:22"));
        assert_eq!(read("::ffff:192.0.2.1 4000 fe80::2%eth0 22"), both("192.0.2.1:4000", "[fe80::2]:22"));
        for wrong in ["", "192.0.2.1 4000 192.0.2.2", "x 1 y 2", "192.0.2.1 4000 192.0.2.2 70000"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
