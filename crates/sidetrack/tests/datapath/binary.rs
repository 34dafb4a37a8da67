//! The binary as a process of its own, for what concerns a whole process: descriptors, memory, processor time.

use rustix::process::{Pid, Resource, Rlimit, Signal};
use serde_json::Value;
use sidetrack_testkit::awaited;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The unit of processor times in /proc (`USER_HZ`): the same on every Linux that Rust has.
const TICKS_PER_SECOND: u64 = 100;

/// The program, started with a configuration.
pub(crate) struct Binary {
    child: Child,
    /// Where its listener `in` listens.
    pub entry: SocketAddr,
    hard_limit: u64,
    lines: Arc<Mutex<Vec<String>>>,
    log: Arc<Mutex<Vec<String>>>,
    readers: Vec<JoinHandle<()>>,
}

/// Collects the lines of a stream until its end.
fn collect(stream: impl Read + Send + 'static, lines: &Arc<Mutex<Vec<String>>>) -> JoinHandle<()> {
    let lines = lines.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            lines.lock().expect("no test panics inside").push(line);
        }
    })
}

impl Binary {
    /// Starts `sidetrack up` with a SOCKS listener `in`, these further lines of configuration, and this hard limit of
    /// open files.
    pub(crate) fn start(config: &str, open_files: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("sidetrack.toml");
        let text = format!(
            "version = 1\nworkers = 2\nadmin = {{ socket = 'none' }}\n{config}\n\
             [[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n"
        );
        std::fs::write(&file, text).expect("a file");
        let mut child = Command::new("sh")
            .args(["-c", "ulimit -n \"$1\" && exec \"$2\" up -c \"$3\"", "sh"])
            .arg(open_files.to_string())
            .arg(env!("CARGO_BIN_EXE_sidetrack"))
            .arg(&file)
            .envs([("SIDETRACK_LOG", "info"), ("NO_COLOR", "1")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let (lines, log) = <(Arc<Mutex<Vec<String>>>, Arc<Mutex<Vec<String>>>)>::default();
        let stdout = collect(child.stdout.take().expect("piped"), &lines);
        let stderr = collect(child.stderr.take().expect("piped"), &log);
        let entry = awaited("the listener is announced", || {
            let log = log.lock().expect("no test panics inside");
            let ended = child.try_wait().expect("our child");
            assert!(ended.is_none(), "{ended:?}\n{}", log.join("\n"));
            let line = log.iter().find(|line| line.contains("address="))?;
            line.split("address=").nth(1)?.split_whitespace().next()?.parse().ok()
        });
        Self { child, entry, hard_limit: open_files, lines, log, readers: vec![stdout, stderr] }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn proc(&self, file: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.child.id())).expect("a process that runs")
    }

    /// Resident memory in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = self.proc("status");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS");
        let kib = line.split_whitespace().nth(1).expect("a number");
        kib.parse::<u64>().expect("a number") * 1024
    }

    /// Descriptors in use.
    pub(crate) fn open_files(&self) -> u64 {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("a process that runs").count()
            as u64
    }

    /// Descriptors in use that are ends of pipes.
    pub(crate) fn pipe_ends(&self) -> usize {
        let descriptors =
            std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("a process that runs");
        // One may be closed before it is looked at.
        let targets = descriptors.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
        targets.filter(|target| target.to_string_lossy().starts_with("pipe:")).count()
    }

    /// Sets the soft limit of open files of the running process.
    pub(crate) fn limit_open_files(&self, soft: u64) {
        let limit = Rlimit { current: Some(soft), maximum: Some(self.hard_limit) };
        rustix::process::prlimit(Some(self.pid()), Resource::Nofile, limit).expect("our child");
    }

    /// Processor time used so far, user and system.
    fn cpu(&self) -> Duration {
        let stat = self.proc("stat");
        // The name in brackets may hold blanks; utime and stime are the 12th and 13th behind it.
        let fields: Vec<_> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
        let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().expect("a number")).sum();
        Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND)
    }

    /// Watches the process until there is a second in which it was not busy, nothing being asked of it; fails if there
    /// is none.
    pub(crate) fn expect_calm(&self) {
        let mut seen = Vec::new();
        // What was asked before may take a slow machine a while; a busy loop never ends.
        for _ in 0..20 {
            let (began, before) = (Instant::now(), self.cpu());
            std::thread::sleep(Duration::from_secs(1));
            let (used, passed) = (self.cpu() - before, began.elapsed());
            // The sweep over thousands of flows costs something in a build for tests; a loop costs all there is.
            if used * 2 < passed {
                return;
            }
            seen.push((used, passed));
        }
        panic!("a busy loop: so much processor time in so much time of nothing to do: {seen:?}");
    }

    /// The log so far.
    pub(crate) fn log(&self) -> Vec<String> {
        self.log.lock().expect("no test panics inside").clone()
    }

    /// Waits until this number of records has been written.
    pub(crate) fn await_records(&self, count: usize) {
        awaited(&format!("{count} records"), || {
            (self.lines.lock().expect("no test panics inside").len() >= count).then_some(())
        });
    }

    /// Stops it with SIGTERM; gives the records it wrote.
    pub(crate) fn stop(mut self) -> Vec<Value> {
        rustix::process::kill_process(self.pid(), Signal::TERM).expect("our child");
        let status = awaited("it stops", || self.child.try_wait().expect("our child"));
        assert!(status.success(), "{status}\n{}", self.log().join("\n"));
        for reader in self.readers.drain(..) {
            reader.join().expect("it only collects");
        }
        let lines = std::mem::take(&mut *self.lines.lock().expect("no test panics inside"));
        lines.iter().map(|line| serde_json::from_str(line).expect("a record is JSON")).collect()
    }
}

impl Drop for Binary {
    fn drop(&mut self) {
        // Fails if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How many records there are of each reason, sorted.
pub(crate) fn reasons(records: &[Value]) -> Vec<(String, usize)> {
    let mut counts = std::collections::BTreeMap::new();
    for record in records {
        *counts.entry(record["reason"].as_str().expect("a reason").to_owned()).or_default() += 1;
    }
    let numbers: std::collections::BTreeSet<_> =
        records.iter().map(|record| record["flow"].as_u64()).collect();
    assert_eq!(numbers.len(), records.len(), "a flow was recorded twice");
    counts.into_iter().collect()
}

/// Another process of this test binary that runs only the (ignored) test `role`, with these words in its environment
/// as `SIDETRACK_ROLE`.
pub(crate) fn role(role: &str, words: &str) -> Child {
    Command::new(std::env::current_exe().expect("a test binary"))
        .args(["--exact", role, "--ignored", "--nocapture", "--test-threads=1"])
        .env("SIDETRACK_ROLE", words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the test binary starts")
}
