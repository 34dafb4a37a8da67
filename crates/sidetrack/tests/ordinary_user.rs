//! `up` and `run` for a user without rights, and the commands that find them without being told where they are. As root the
//! programs run as `nobody`, otherwise as whoever runs the test.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use rustix::process::{Pid, Signal, kill_process};
use std::fs::{File, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

const NOBODY: u32 = 65_534;

/// A user with a runtime directory, as a session has one.
struct User {
    program: File,
    folder: tempfile::TempDir,
}

impl User {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let runtime = folder.path().join("runtime");
        std::fs::create_dir(&runtime).unwrap();
        if rustix::process::geteuid().is_root() {
            std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
            chown(&runtime, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        Self { program: File::open(env!("CARGO_BIN_EXE_sidetrack")).unwrap(), folder }
    }

    fn runtime(&self) -> PathBuf {
        self.folder.path().join("runtime")
    }

    /// The program, by a descriptor: `nobody` may not be allowed to look into the build directory.
    fn sidetrack(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(format!("/proc/self/fd/{}", self.program.as_raw_fd()));
        command.arg0("sidetrack").args(arguments).env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command.env("XDG_RUNTIME_DIR", self.runtime()).env("SIDETRACK_LOG", "info").current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        self.sidetrack(arguments).output().unwrap()
    }
}

/// A program at work; killed with us.
struct Running(Child, BufReader<ChildStderr>);

impl Running {
    fn new(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        Self(child, log)
    }

    /// The next line of the log with this in it.
    fn says(&mut self, what: &str) -> String {
        let mut seen = String::new();
        for line in self.1.by_ref().lines() {
            let line = line.unwrap();
            if line.contains(what) {
                return line;
            }
            seen.push_str(&line);
            seen.push('\n');
        }
        panic!("it ended without '{what}':\n{seen}");
    }

    /// Ends it in order.
    fn stop(mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).unwrap().next().is_none()
}

#[test]
fn up_without_rights_is_found_by_flows() {
    let user = User::new();
    let config = user.folder.path().join("sidetrack.toml");
    std::fs::write(&config, "version = 1\n[[listen]]\nkind = 'socks'\naddress = '127.0.0.1:0'\n").unwrap();
    let mut up = Running::new(user.sidetrack(&["up", "-c", config.to_str().unwrap()]));
    let line = up.says("address=");
    up.says("ready");
    let address: SocketAddr = line.rsplit_once("address=").unwrap().1.parse().unwrap();
    let client = TcpStream::connect(address).unwrap();
    let port = client.local_addr().unwrap().port().to_string();
    let found = loop {
        let flows = user.output(&["flows", "--json"]);
        assert!(flows.status.success(), "{}", text(&flows.stderr));
        // Accepting comes after connecting.
        if !flows.stdout.is_empty() {
            break text(&flows.stdout);
        }
    };
    assert!(found.contains(&format!("127.0.0.1:{port}")), "{found}");
    up.stop();
    assert!(is_empty(&user.runtime().join("sidetrack")), "the socket goes with its process");
    let gone = user.output(&["flows"]);
    assert!(text(&gone.stderr).contains("no sidetrack runs at"), "{}", text(&gone.stderr));
}
