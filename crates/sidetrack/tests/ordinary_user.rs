//! `up` and `run` for a user without rights, and the commands that find them without being told where they are. As root the
//! programs run as `nobody`, otherwise as the user who runs the test.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use rustix::process::{Pid, Signal, kill_process};
use sidetrack_testkit::LIMIT;
use std::fs::{File, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::Instant;

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
    std::fs::write(&config, "version = 1\nlimits = { handshake_timeout_ms = 600000 }\n[[listen]]\nkind = 'socks'\naddress = '127.0.0.1:0'\n").unwrap();
    let mut up = Running::new(user.sidetrack(&["up", "-c", config.to_str().unwrap()]));
    let line = up.says("address=");
    up.says("ready");
    let address: SocketAddr = line.rsplit_once("address=").unwrap().1.parse().unwrap();
    let client = TcpStream::connect(address).unwrap();
    let port = client.local_addr().unwrap().port().to_string();
    let until = Instant::now() + LIMIT;
    let found = loop {
        assert!(Instant::now() < until, "it is not listed");
        let flows = user.output(&["flows", "--json"]);
        assert!(flows.status.success(), "{}", text(&flows.stderr));
        // Accepting comes after connecting.
        if !flows.stdout.is_empty() {
            break text(&flows.stdout);
        }
    };
    assert!(found.contains(&format!("127.0.0.1:{port}")), "{found}");
    up.stop();
    assert!(is_empty(&user.runtime()), "the socket goes with its process");
    let gone = user.output(&["flows"]);
    assert!(text(&gone.stderr).contains("no sidetrack runs at"), "{}", text(&gone.stderr));
}

/// A command that connects to `server`, says a word, and stays until its standard input ends.
fn connecting(server: SocketAddr) -> [String; 3] {
    let script =
        format!("exec 3<>/dev/tcp/{}/{}; echo word >&3; read -r _ || true", server.ip(), server.port());
    ["bash".into(), "-c".into(), script]
}

#[test]
fn flows_sees_what_a_run_does() {
    let user = User::new();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let command = connecting(address);
    let records = user.runtime().join("records.jsonl");
    let arguments = ["run", "--records", records.to_str().unwrap(), "--"];
    let arguments: Vec<&str> = arguments.into_iter().chain(command.iter().map(String::as_str)).collect();
    let mut starting = user.sidetrack(&arguments);
    starting.stdin(Stdio::piped());
    let mut run = Running::new(starting);
    // The connection comes from us; when it is there, the flow is listed.
    let (mut accepted, _) = server.accept().unwrap();
    accepted.read_exact(&mut [0; 5]).unwrap();
    for arguments in [vec!["flows", "--json"], vec!["flows", "--json", "--pid", &run.0.id().to_string()]] {
        let flows = user.output(&arguments);
        assert!(flows.status.success(), "{}", text(&flows.stderr));
        let flow: serde_json::Value = serde_json::from_slice(&flows.stdout).unwrap();
        assert_eq!((&flow["process"], &flow["intercept"]), (&"bash".into(), &"run".into()), "{flow}");
        let client: SocketAddr = flow["client"].as_str().unwrap().parse().unwrap();
        assert!(client.ip().is_loopback(), "{flow}");
    }
    drop(run.0.stdin.take());
    assert!(run.0.wait().unwrap().success());
    let record: serde_json::Value = serde_json::from_slice(&std::fs::read(&records).unwrap()).unwrap();
    assert_eq!((&record["process"], &record["bytes_up"]), (&"bash".into(), &5.into()), "{record}");
    std::fs::remove_file(records).unwrap();
    assert!(is_empty(&user.runtime()), "nothing is left");
}

#[test]
fn a_run_that_was_killed_is_forgotten_by_the_next() {
    let user = User::new();
    let mut killed = user.sidetrack(&["run", "--", "sleep", "1000"]);
    killed.stdin(Stdio::piped());
    let mut killed = Running::new(killed);
    let socket = user.runtime().join(format!("sidetrack/run-{}.sock", killed.0.id()));
    let until = Instant::now() + LIMIT;
    while !socket.exists() {
        assert!(Instant::now() < until, "no {}", socket.display());
        std::thread::yield_now();
    }
    killed.0.kill().unwrap();
    killed.0.wait().unwrap();
    assert!(socket.exists());
    assert!(text(&user.output(&["flows"]).stderr).contains("no sidetrack runs at"), "it does not count");
    assert!(user.output(&["run", "--", "true"]).status.success());
    assert!(is_empty(&user.runtime()), "nothing is left");
}
