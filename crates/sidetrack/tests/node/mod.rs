//! A running `sidetrack up` in the network namespace of the calling thread, and the small peers around it.
#![allow(dead_code, reason = "each test target uses its own part")]

pub(crate) mod admin;
pub(crate) mod agreement;
pub(crate) mod peers;
pub(crate) mod traces;
pub(crate) mod upgrading;

use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sidetrack_testkit::LIMIT;

/// Configuration that every test has: nothing outside its own folder and namespace. `@` stands for that folder.
const PREAMBLE: &str = "version = 1\nworkers = 1\n";
const TABLES: &str = "\n[admin]\nsocket = \"@/admin.sock\"\n[record]\nto = \"stdout\"\nrecent = 256\n";

/// A process that was started, and what it says.
pub(crate) struct Up {
    child: Child,
    folder: tempfile::TempDir,
    log: Lines,
    records: Lines,
}

/// Lines of a pipe, read by a thread.
struct Lines {
    queue: Receiver<String>,
    seen: Vec<String>,
}

impl Lines {
    fn of(pipe: impl Read + Send + 'static) -> Self {
        let (sender, queue) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { queue, seen: Vec::new() }
    }

    /// The next line within the limit; none at the end.
    fn next(&mut self, limit: Duration) -> Result<Option<String>, RecvTimeoutError> {
        match self.queue.recv_timeout(limit) {
            Ok(line) => {
                self.seen.push(line.clone());
                Ok(Some(line))
            }
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The next line that fits.
    fn until(&mut self, what: &str, fits: impl Fn(&str) -> bool) -> Option<String> {
        let end = Instant::now() + LIMIT;
        loop {
            match self.next(end.saturating_duration_since(Instant::now())) {
                Ok(Some(line)) if fits(&line) => return Some(line),
                Ok(Some(_)) => {}
                Ok(None) => return None,
                Err(_) => panic!("no {what} in time; there was:\n{}", self.seen.join("\n")),
            }
        }
    }

    /// Everything to the end of the pipe: until no process holds its other end any more.
    fn drain(&mut self) -> &[String] {
        self.until("end", |_| false);
        &self.seen
    }
}

impl Up {
    /// Starts with this configuration and waits until it is ready. `{top}` keys stand before the tables.
    pub(crate) fn start(top: &str, tables: &str) -> Self {
        Self::start_with(top, tables, |_| {})
    }

    /// As [`Up::start`], with more files in its folder.
    pub(crate) fn start_with(top: &str, tables: &str, files: impl FnOnce(&std::path::Path)) -> Self {
        Self::spawn_with(top, tables, files).ready()
    }

    /// As [`Up::start`], for tests that compare resident memory: the allocator gives freed pages back at once and takes
    /// no huge pages, so that resident memory follows what the program holds. By default it moves by 20 MiB and more.
    pub(crate) fn start_measured(top: &str, tables: &str) -> Self {
        let at_once = [("MIMALLOC_PURGE_DELAY", "0"), ("MIMALLOC_ALLOW_THP", "0")];
        Self::spawn_in(&at_once, top, tables, |_| {}).ready()
    }

    /// Waits until it says that it is ready.
    pub(crate) fn ready(mut self) -> Self {
        assert!(
            self.log.until("readiness", |line| line.ends_with(": ready")).is_some(),
            "it ended:\n{}",
            self.log.seen.join("\n")
        );
        self
    }

    /// As [`Up::start`], with this variable in its environment: a path in its folder.
    pub(crate) fn start_with_path(variable: &str, name: &str, top: &str, tables: &str) -> Self {
        Self::spawn_at(&[], Some((variable, name)), top, tables, |_| {}).ready()
    }

    /// As [`Up::spawn`], with more words on the command line.
    pub(crate) fn spawn_with_words(words: &[&str], top: &str, tables: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        write_config(&folder, top, tables);
        let mut command = Command::new(upgrading::program());
        command.args(["up", "-c"]).arg(folder.path().join("sidetrack.toml")).args(words);
        Self::run(command, folder)
    }

    /// Starts it and waits for nothing.
    pub(crate) fn spawn(top: &str, tables: &str) -> Self {
        Self::spawn_with(top, tables, |_| {})
    }

    /// As [`Up::spawn`], with more files in its folder.
    pub(crate) fn spawn_with(top: &str, tables: &str, files: impl FnOnce(&std::path::Path)) -> Self {
        Self::spawn_in(&[], top, tables, files)
    }

    /// As [`Up::spawn_with`], with more variables in its environment.
    fn spawn_in(
        environment: &[(&str, &str)],
        top: &str,
        tables: &str,
        files: impl FnOnce(&std::path::Path),
    ) -> Self {
        Self::spawn_at(environment, None, top, tables, files)
    }

    /// As [`Up::spawn_in`], with one more variable whose value is the path of this name in its folder.
    fn spawn_at(
        environment: &[(&str, &str)],
        in_folder: Option<(&str, &str)>,
        top: &str,
        tables: &str,
        files: impl FnOnce(&std::path::Path),
    ) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        files(folder.path());
        write_config(&folder, top, tables);
        let mut command = Command::new(upgrading::program());
        command
            .args(["up", "-c"])
            .arg(folder.path().join("sidetrack.toml"))
            .envs(environment.iter().copied());
        command.envs(in_folder.map(|(variable, name)| (variable, folder.path().join(name))));
        Self::run(command, folder)
    }

    fn run(mut command: Command, folder: tempfile::TempDir) -> Self {
        let mut child = command
            .env("SIDETRACK_LOG", "sidetrack=debug")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary");
        let log = Lines::of(child.stderr.take().expect("a pipe"));
        let records = Lines::of(child.stdout.take().expect("a pipe"));
        Self { child, folder, log, records }
    }

    /// Replaces the file with another configuration; the node is not told.
    pub(crate) fn rewrite(&self, top: &str, tables: &str) {
        write_config(&self.folder, top, tables);
    }

    /// Another configuration; it is in force when this returns.
    pub(crate) fn reload(&self, top: &str, tables: &str) {
        self.rewrite(top, tables);
        let (status, body) = admin::ask(self, "POST", "/v1/reload");
        assert_eq!(status, 200, "{body}");
    }

    /// Where the configuration file, and what it names relatively, lies.
    pub(crate) fn folder(&self) -> PathBuf {
        self.folder.path().to_owned()
    }

    /// The process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The keeper's process id.
    pub(crate) fn keeper(&self) -> u32 {
        let children = sidetrack_sys::process::children(self.pid());
        *children.first().expect("a keeper")
    }

    /// The guard's process id.
    pub(crate) fn guard(&self) -> u32 {
        let children = sidetrack_sys::process::children(self.keeper());
        *children.first().expect("a guard")
    }

    /// The addresses a listener said it listens on.
    pub(crate) fn addresses(&self, listener: &str) -> Vec<SocketAddr> {
        let name = format!("listener={listener} ");
        let lines = self.log.seen.iter().filter(|line| line.contains(": listening ") && line.contains(&name));
        lines.filter_map(|line| line.rsplit_once("address=")?.1.parse().ok()).collect()
    }

    /// The next line of the log that fits.
    pub(crate) fn log_line(&mut self, what: &str, fits: impl Fn(&str) -> bool) -> String {
        let found = self.log.until(what, fits);
        found.unwrap_or_else(|| panic!("it ended without {what}:\n{}", self.log.seen.join("\n")))
    }

    /// Everything that has been logged by now, including lines that were not asked for yet.
    pub(crate) fn log_so_far(&mut self) -> String {
        while self.log.next(Duration::ZERO).is_ok_and(|line| line.is_some()) {}
        self.logged()
    }

    /// Everything it has logged so far, as far as it was read.
    pub(crate) fn logged(&self) -> String {
        self.log.seen.join("\n")
    }

    /// The next record.
    pub(crate) fn record(&mut self) -> Record {
        match self.records.next(LIMIT) {
            Ok(Some(line)) => Record(serde_json::from_str(&line).expect("JSON")),
            other => {
                while self.log.next(Duration::ZERO).is_ok_and(|line| line.is_some()) {}
                panic!("no record: {other:?}; the log:\n{}", self.log.seen.join("\n"))
            }
        }
    }

    /// The next `count` records by the client's address.
    pub(crate) fn records(&mut self, count: usize) -> BTreeMap<SocketAddr, Record> {
        let by_client: BTreeMap<_, _> = (0..count)
            .map(|_| {
                let record = self.record();
                (record.address("client"), record)
            })
            .collect();
        assert_eq!(by_client.len(), count, "one record for each flow");
        by_client
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        send(self.pid(), signal);
    }

    /// SIGTERM, and the end of all its processes; gives the exit status of the first.
    pub(crate) fn stop(mut self) -> (ExitStatus, Vec<Record>) {
        self.signal(Signal::TERM);
        self.gone()
    }

    /// Waits until no process holds the log any more: not the process, nor its keeper, nor the guard.
    pub(crate) fn gone(&mut self) -> (ExitStatus, Vec<Record>) {
        let status = self.child.wait().expect("a child");
        self.log.drain();
        let known = self.records.seen.len();
        let rest = &self.records.drain()[known..];
        let rest = rest.iter().map(|line| Record(serde_json::from_str(line).expect("JSON"))).collect();
        (status, rest)
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // Ended already if the test went well.
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::KILL);
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            while self.log.next(Duration::ZERO).is_ok_and(|line| line.is_some()) {}
            eprintln!("its log:\n{}", self.log.seen.join("\n"));
        }
    }
}

/// Whether a process, with all its threads, has a filter for its calls and leaves no core file.
pub(crate) fn is_confined(pid: u32) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let filtered = tasks.flatten().all(|task| {
        // A thread that has ended meanwhile has made its last call.
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { return true };
        status.lines().any(|line| line.split_whitespace().eq(["Seccomp:", "2"]))
    });
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap_or_default();
    let no_core = limits
        .lines()
        .any(|line| line.split_whitespace().take(6).eq(["Max", "core", "file", "size", "0", "0"]));
    filtered && no_core
}

/// Sends a signal to a process that may have ended.
pub(crate) fn send(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("not 0");
    // It may have ended.
    let _ = kill_process(pid, signal);
}

/// The signal that ended it.
pub(crate) fn ended_by(status: ExitStatus) -> Option<Signal> {
    status.signal().and_then(Signal::from_named_raw)
}

fn write_config(folder: &tempfile::TempDir, top: &str, tables: &str) {
    let path = folder.path().display().to_string();
    // A test of several workers says so itself.
    let preamble = if top.starts_with("workers") { "version = 1\n" } else { PREAMBLE };
    // The table [admin] is the harness's own: a comment `#admin KEY = VALUE` adds a key to it.
    let admin: String = top.lines().filter_map(|line| line.strip_prefix("#admin ")).collect();
    let own = TABLES.replacen("[admin]\n", &format!("[admin]\n{admin}\n"), 1);
    // So is [record]: a comment `#record-to PATH` has records go to a file.
    let file = top.lines().find_map(|line| line.strip_prefix("#record-to ")).unwrap_or("stdout");
    let own = own.replacen("to = \"stdout\"", &format!("to = \"{file}\""), 1);
    let text = format!("{preamble}{top}{own}{tables}").replace('@', &path);
    // At once: a process that watches the file must not see half of it.
    let fresh = folder.path().join("fresh");
    std::fs::write(&fresh, text).expect("written");
    std::fs::rename(fresh, folder.path().join("sidetrack.toml")).expect("renamed");
}

/// One record.
#[derive(Clone, Debug)]
pub(crate) struct Record(pub Value);

impl Record {
    /// A text field; empty for null.
    pub(crate) fn text(&self, field: &str) -> &str {
        self.0[field].as_str().unwrap_or_default()
    }

    /// An address field.
    pub(crate) fn address(&self, field: &str) -> SocketAddr {
        self.text(field).parse().unwrap_or_else(|_| panic!("{field} of {self:?}"))
    }

    /// A field that says yes or no.
    pub(crate) fn flag(&self, field: &str) -> bool {
        self.0[field].as_bool().unwrap_or_else(|| panic!("{field} of {self:?}"))
    }

    /// A number.
    pub(crate) fn number(&self, field: &str) -> u64 {
        self.0[field].as_u64().unwrap_or_else(|| panic!("{field} of {self:?}"))
    }

    /// The fields that tell how the flow ended.
    pub(crate) fn fate(&self) -> (&str, &str, &str) {
        (self.text("rule"), self.text("carrier"), self.text("reason"))
    }
}

/// `IP:PORT`, with brackets where needed.
pub(crate) fn at(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse::<IpAddr>().expect(ip), port)
}

/// The same numbers in every run (SplitMix64).
pub(crate) struct Dice(pub u64);

impl Dice {
    /// The next 64 bits.
    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.roll() % end as u64).expect("below a usize")
    }

    /// Bytes.
    pub(crate) fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.roll().to_le_bytes()[0]).collect()
    }
}
