//! A host of a test bed: a folder on it with our programs, and commands that run there.
//!
//! ```text
//!   open ──▶ folder made ──▶ programs copied ──▶ commands run ──▶ dropped: commands end, then the folder is removed
//!                 │                 │                 │
//!                 └─────────────────┴─────────────────┴── the end of this process, or of the connection: the same
//! ```
//! Each ssh session runs a small script that waits for the end of its standard input. The kernel closes the other end
//! when this process ends in any way, and sshd does when the connection breaks.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::file::{HostSpec, Role};
use crate::peers::Absent;

/// Makes the folder, prints its name, and removes it at the end of the input. The scripts have no single quote.
const KEEP_FOLDER: &str = r#"umask 077
folder=$(mktemp -d "${TMPDIR:-/tmp}/sidetrack-bed-XXXXXX") || exit 9
trap "" HUP INT TERM
echo "$folder"
cat >/dev/null
rm -rf -- "$folder""#;

/// Writes its input to a program file in the folder.
const STORE: &str = r#"cat >"$1/$2" && chmod 700 "$1/$2""#;

/// Runs a command in the folder. At the end of the input it gets SIGTERM, and SIGKILL after five seconds.
const RUN: &str = r#"cd "$1" || exit 9
shift
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"; export PATH
exec 3<&0
"$@" 3<&- </dev/null & child=$!
trap "" HUP INT TERM
( cat <&3; kill -TERM $child; n=0
  while kill -0 $child && [ $n -lt 50 ]; do sleep 0.1; n=$((n+1)); done
  kill -KILL $child ) >/dev/null 2>&1 & watch=$!
exec 3<&-
wait $child; code=$?
kill -KILL $watch 2>/dev/null
exit $code"#;

/// Time that a session has to end after the end of its input.
const ENDS_WITHIN: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A host with a folder of ours; dropping it removes the folder.
#[derive(Debug)]
pub struct Host {
    spec: HostSpec,
    folder: String,
    logs: PathBuf,
    _keeper: Remote,
}

/// A running command on a host; dropping it ends the command.
#[derive(Debug)]
pub struct Remote {
    name: String,
    session: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Host {
    /// Logs in and makes the folder. Standard errors of its commands go to files in `logs`.
    ///
    /// # Errors
    /// ssh is not installed, cannot reach the host or log in, or the host has no `mktemp`; the message has the words of ssh.
    pub fn open(spec: &HostSpec, logs: &Path) -> Result<Self> {
        let mut keeper = Remote::start("folder", session(spec, KEEP_FOLDER, &[]), &spec.role, logs)?;
        let folder = keeper.line()?.unwrap_or_default().trim().to_owned();
        if folder.is_empty() {
            let (host, log) = (name(spec), keeper.ended_log());
            bail!("cannot use host \"{}\" ({host}) by ssh: {log}", spec.role);
        }
        Ok(Self { spec: spec.clone(), folder, logs: logs.to_owned(), _keeper: keeper })
    }

    /// Returns its role.
    #[must_use]
    pub fn role(&self) -> Role {
        self.spec.role
    }

    /// Returns how ssh reaches it: `user@host:port`.
    #[must_use]
    pub fn name(&self) -> String {
        name(&self.spec)
    }

    /// Returns the path of the folder on the host.
    #[must_use]
    pub fn folder(&self) -> &str {
        &self.folder
    }

    /// Copies a program into the folder and checks that it runs there.
    ///
    /// # Errors
    /// The file cannot be read or written, or does not run on that host.
    pub fn install(&self, program: &Path, name: &str) -> Result<()> {
        let file = File::open(program).with_context(|| format!("cannot read {}", program.display()))?;
        let mut command = session(&self.spec, STORE, &[&self.folder, name]);
        let output = command.stdin(file).output().context("cannot start ssh")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "cannot copy {name} to host \"{}\": {}",
            self.spec.role,
            said.trim()
        );
        self.run(&[&format!("./{name}"), "--version"]).map(drop).with_context(|| {
            format!(
                "host \"{}\" cannot run {name} of this machine; it needs the same kind of processor and as new a C library",
                self.spec.role
            )
        })
    }

    /// Writes a file into the folder.
    ///
    /// # Errors
    /// The host refuses.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        let mut command = session(&self.spec, STORE, &[&self.folder, name]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start ssh")?;
        // Dropping the input ends it, and with it the remote `cat`.
        child.stdin.take().context("the input is a pipe")?.write_all(text.as_bytes())?;
        let output = child.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "cannot write {name} on host \"{}\": {}",
            self.spec.role,
            said.trim()
        );
        Ok(())
    }

    /// Starts a command in the folder.
    ///
    /// # Errors
    /// ssh cannot be started.
    pub fn start(&self, name: &str, command: &[&str]) -> Result<Remote> {
        let arguments = [&[self.folder.as_str()], command].concat();
        Remote::start(name, session(&self.spec, RUN, &arguments), &self.spec.role, &self.logs)
    }

    /// Runs a command in the folder to its end and returns its standard output.
    ///
    /// # Errors
    /// It cannot be started or fails; the message has the end of its standard error.
    pub fn run(&self, command: &[&str]) -> Result<String> {
        let what = command.first().copied().unwrap_or_default();
        let mut remote = self.start("command", command)?;
        let mut text = String::new();
        while let Some(line) = remote.line()? {
            text += &line;
        }
        let status = remote.session.wait()?;
        ensure!(
            status.success(),
            "{what} on host \"{}\" failed ({status}): {}",
            self.spec.role,
            remote.log().trim()
        );
        Ok(text)
    }

    /// Fails with [`Absent`] if a program is not installed on the host.
    ///
    /// # Errors
    /// It is absent.
    pub fn require(&self, program: &str) -> Result<()> {
        let found = self.run(&["sh", "-c", "command -v \"$1\"", "sh", program]);
        found
            .map(drop)
            .map_err(|_| Absent(format!("{program} is not installed on host \"{}\"", self.spec.role)).into())
    }
}

impl Remote {
    fn start(name: &str, mut command: Command, role: &Role, logs: &Path) -> Result<Self> {
        let log = tempfile::Builder::new().prefix(&format!("{role}-{name}-")).tempfile_in(logs)?;
        let (errors, log) = log.keep()?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let mut session = command.spawn().context("cannot start ssh (Debian package openssh-client)")?;
        let output = session.stdout.take().context("the output is a pipe")?;
        let input = session.stdin.take();
        Ok(Self { name: name.to_owned(), session, input, output: BufReader::new(output), log })
    }

    /// Returns the next line of its standard output; none at the end.
    ///
    /// # Errors
    /// The pipe cannot be read.
    pub fn line(&mut self) -> Result<Option<String>> {
        let mut line = String::new();
        Ok((self.output.read_line(&mut line)? > 0).then_some(line))
    }

    /// Waits until it has written this line.
    ///
    /// # Errors
    /// It ended before; the message has its standard error.
    pub fn wait_line(&mut self, wanted: &str) -> Result<()> {
        while let Some(line) = self.line()? {
            if line.trim() == wanted {
                return Ok(());
            }
        }
        let said = self.ended_log();
        bail!("{} ended: {said}", self.name)
    }

    /// Returns true if it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.session.try_wait(), Ok(None))
    }

    /// Returns what it has written to standard error so far.
    #[must_use]
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Ends it and returns its standard error.
    fn ended_log(&mut self) -> String {
        self.end();
        let log = self.log();
        if log.trim().is_empty() { "it said nothing".to_owned() } else { log.trim().to_owned() }
    }

    fn end(&mut self) {
        self.input = None;
        let since = Instant::now();
        while self.is_running() && since.elapsed() < ENDS_WITHIN {
            std::thread::sleep(LOOK_AGAIN);
        }
        let _ = self.session.kill();
        let _ = self.session.wait();
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.end();
    }
}

fn name(spec: &HostSpec) -> String {
    let user = spec.user.as_ref().map_or_else(String::new, |user| format!("{user}@"));
    let port = spec.port.map_or_else(String::new, |port| format!(" port {port}"));
    format!("{user}{}{port}", spec.ssh)
}

/// Returns the ssh command that runs a script with arguments on a host.
fn session(spec: &HostSpec, script: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("ssh");
    command.arg("-T");
    // A host that is gone is noticed within half a minute.
    for option in [
        "BatchMode=yes",
        "ConnectTimeout=15",
        "ServerAliveInterval=10",
        "ServerAliveCountMax=3",
        "LogLevel=ERROR",
    ] {
        command.args(["-o", option]);
    }
    if let Some(port) = spec.port {
        command.args(["-p", &port.to_string()]);
    }
    if let Some(user) = &spec.user {
        command.args(["-l", user]);
    }
    if let Some(key) = &spec.key {
        command.args(["-o", "IdentitiesOnly=yes", "-i"]).arg(key);
    }
    if let Some(file) = &spec.known_hosts {
        command.args(["-o", "StrictHostKeyChecking=yes", "-o"]);
        command.arg(format!("UserKnownHostsFile={}", file.display()));
    }
    let quoted: Vec<String> =
        ["exec", "sh", "-c"].into_iter().map(str::to_owned).chain(words(script, arguments)).collect();
    command.arg("--").arg(&spec.ssh).arg(quoted.join(" "));
    command
}

/// Returns a script, the name `sh` and its arguments as words that every shell reads alike.
fn words(script: &str, arguments: &[&str]) -> impl Iterator<Item = String> {
    let all: Vec<String> = [script, "sh"].iter().chain(arguments).map(|word| quoted(word)).collect();
    all.into_iter()
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_the_far_shell_as_they_are() {
        let odd = ["a b", "it's", "$HOME `x` \"y\"", "", "{\"json\": [1]}"];
        let line = words(r#"printf "%s\n" "$@""#, &odd).collect::<Vec<_>>().join(" ");
        let output = Command::new("sh").arg("-c").arg(format!("exec sh -c {line}")).output().expect("sh");
        assert_eq!(String::from_utf8_lossy(&output.stdout), odd.join("\n") + "\n");
        for script in [KEEP_FOLDER, STORE, RUN] {
            assert!(!script.contains('\''), "{script}");
        }
    }

    #[test]
    fn a_command_ends_with_the_input_and_its_code_is_passed_on() {
        let run = |arguments: &[&str]| {
            let mut command = Command::new("sh");
            command.args(["-c", RUN, "sh", "/"]).args(arguments);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh")
        };
        let mut stays = run(&["sleep", "600"]);
        assert!(stays.try_wait().expect("ours").is_none());
        drop(stays.stdin.take());
        assert_eq!(stays.wait().expect("ours").code(), Some(128 + 15));
        let mut ends = run(&["sh", "-c", "exit 7"]);
        let _input = ends.stdin.take();
        assert_eq!(ends.wait().expect("ours").code(), Some(7));
    }
}
