//! The operator's own SSH session goes on when the node that is started in it captures all connections.

use crate::node::upgrading::SIDETRACK;
use sidetrack_testkit::{LIMIT, Line, eventually, is_root};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

/// A private /run, so that the host's is not changed: sshd needs /run/sshd.
const SERVE: &str =
    "mount -t tmpfs none /run && mkdir -m 0755 /run/sshd && exec /usr/sbin/sshd -D -e -f \"$1/sshd_config\"";

/// Captures everything that the client sends, to this host, too.
const CONFIG: &str = "version = 1\nworkers = 1\nuser = \"root\"\ndefault = \"deny\"\n[admin]\nsocket = \"@/admin.sock\"\n\
                      [[listen]]\nname = \"all\"\nkind = \"redirect\"\nlocal = true\nforwarded = true\n\
                      dst = [\"10.0.0.0/8\"]\n";

fn key(folder: &Path, name: &str) {
    let mut command = Command::new("ssh-keygen");
    command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.join(name));
    assert!(command.status().expect("ssh-keygen").success());
}

/// A server of SSH on the router, which goes with this.
struct Sshd(Child);

impl Sshd {
    fn start(line: &Line, folder: &Path) -> Self {
        key(folder, "host");
        key(folder, "user");
        let at = folder.display();
        let config = format!(
            "ListenAddress 10.0.1.254\nHostKey {at}/host\nAuthorizedKeysFile {at}/user.pub\nStrictModes no\nUsePAM no\n\
             PermitRootLogin yes\nPidFile none\n"
        );
        std::fs::write(folder.join("sshd_config"), config).expect("written");
        let folder = folder.to_owned();
        let serve = move || {
            let mut command = Command::new("unshare");
            command.args(["--mount", "sh", "-c", SERVE, "sh"]).arg(folder);
            command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("sshd")
        };
        let sshd = Self(line.router.run(serve));
        eventually("sshd listens", || {
            line.client.run(|| std::net::TcpStream::connect("10.0.1.254:22").is_ok())
        });
        sshd
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A shell in a session of SSH.
struct Session {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Session {
    fn start(line: &Line, folder: &Path) -> Self {
        let key = folder.join("user");
        let connect = move || {
            let mut command = Command::new("ssh");
            command.args(["-F", "/dev/null", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no"]);
            command
                .args(["-o", "UserKnownHostsFile=/dev/null", "-i"])
                .arg(key)
                .args(["root@10.0.1.254", "sh"]);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("ssh")
        };
        let mut child = line.client.run(connect);
        let (input, output) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, input, lines }
    }

    fn type_line(&mut self, line: &str) {
        // A session that was cut takes nothing.
        let _ = writeln!(self.input, "{line}").and_then(|()| self.input.flush());
    }

    /// Whether the shell answers. `false`: the session was cut.
    fn answers(&mut self, word: &str) -> bool {
        self.type_line(&format!("echo {word}"));
        match self.lines.recv_timeout(LIMIT) {
            Ok(line) => line == word,
            Err(RecvTimeoutError::Disconnected | RecvTimeoutError::Timeout) => false,
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a node in a session, and says whether the session goes on, and another one begins.
fn goes_on(top: &str, node: &str) -> bool {
    let line = Line::new();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    let _sshd = Sshd::start(&line, path);
    let config = CONFIG.replace('@', &path.display().to_string()).replacen(
        "version = 1\n",
        &format!("version = 1\n{top}"),
        1,
    );
    std::fs::write(path.join("sidetrack.toml"), config).expect("written");
    let mut session = Session::start(&line, path);
    assert!(session.answers("before"));
    session.type_line(&format!(
        "{node} up -c {0}/sidetrack.toml >{0}/log 2>&1 </dev/null & echo $!",
        path.display()
    ));
    let pid: u32 =
        session.lines.recv_timeout(LIMIT).ok().and_then(|pid| pid.parse().ok()).expect("a process id");
    let log = || std::fs::read_to_string(path.join("log")).unwrap_or_default();
    eventually("it is ready", || log().lines().any(|line| line.ends_with(": ready")));
    let goes_on = session.answers("after") && Session::start(&line, path).answers("again");
    crate::node::send(pid, rustix::process::Signal::TERM);
    eventually("it has ended", || !crate::runs(pid));
    assert!(!log().contains("panicked"), "{}", log());
    goes_on
}

#[test]
fn it_is_left_alone() {
    if is_root() {
        assert!(goes_on("", SIDETRACK));
    }
}

#[test]
fn it_is_found_where_sudo_leaves_the_variable_out() {
    if is_root() {
        assert!(goes_on("", &format!("env -u SSH_CONNECTION {SIDETRACK}")));
    }
}

#[test]
fn it_is_captured_where_the_configuration_says_so() {
    if is_root() {
        assert!(!goes_on("capture_ssh = true\n", SIDETRACK));
    }
}
