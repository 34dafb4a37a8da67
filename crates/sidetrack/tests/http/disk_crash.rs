//! The cache's disk under a process that is killed, and on file systems that are full or read-only.

use crate::client::Client;
use crate::disk::{content, origin};
use crate::origin::Origin;
use sidetrack_testkit::{LIMIT, awaited};
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread::JoinHandle;

const NOBODY: u32 = 65_534;

/// `sidetrack up` of its own, without rights. Killed when it goes.
pub(crate) struct Up {
    child: Child,
    /// Where its listener listens.
    pub entry: SocketAddr,
    log: JoinHandle<String>,
}

pub(crate) fn config(folder: &Path, cache: &str) -> std::path::PathBuf {
    let path = folder.join("sidetrack.toml");
    let admin = folder.join("admin.sock");
    let text = format!(
        "version = 1\nworkers = 2\n[[listen]]\nname = 'in'\nkind = 'http'\naddress = '127.0.0.1:0'\n\
         cache = {{ {cache} }}\n[admin]\nsocket = '{}'\n",
        admin.display()
    );
    std::fs::write(&path, text).unwrap();
    path
}

/// A folder in which the program may write.
pub(crate) fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    if rustix::process::geteuid().is_root() {
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    folder
}

impl Up {
    /// Starts it with this configuration.
    pub(crate) fn start(config: &Path) -> Self {
        let program = std::fs::File::open(env!("CARGO_BIN_EXE_sidetrack")).unwrap();
        let by_descriptor = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&program));
        let mut command = Command::new(by_descriptor);
        command.arg0("sidetrack").args(["up", "-c"]).arg(config);
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        Self::spawn(command)
    }

    fn spawn(mut command: Command) -> Self {
        command.env("SIDETRACK_LOG", "sidetrack=info").current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let (mut entry, mut seen) = (None, String::new());
        loop {
            let mut line = String::new();
            assert!(lines.read_line(&mut line).unwrap() > 0, "it ended:\n{seen}");
            seen.push_str(&line);
            let address = line.trim().rsplit_once("address=").filter(|_| line.contains("listener=in "));
            entry = entry.or(address.and_then(|(_, address)| address.parse().ok()));
            if line.trim_end().ends_with(": ready") {
                break;
            }
        }
        let log = std::thread::spawn(move || {
            let mut rest = String::new();
            let _ = lines.read_to_string(&mut rest);
            seen + &rest
        });
        Self { child, entry: entry.unwrap(), log }
    }

    fn kill(mut self) -> String {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        std::mem::replace(&mut self.log, std::thread::spawn(String::new)).join().unwrap()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The same numbers in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % end
    }
}

fn path(dice: &mut Dice) -> String {
    let number = dice.below(60);
    let size = [10, 3000, 60_000, 200_000, 600_000, 1_300_000][number % 6];
    let kind = if number.is_multiple_of(5) { "/chunked" } else { "/plain" };
    format!("{kind}/{number}/{size}")
}

/// Asks for one path after the other until the proxy is gone; each whole answer has to be right.
fn ask_on(entry: SocketAddr, base: String, mut dice: Dice, answers: Arc<AtomicUsize>, stop: Arc<AtomicBool>) {
    while !stop.load(SeqCst) {
        let Ok(stream) = std::net::TcpStream::connect(entry) else { return };
        let mut client = Client::over(stream);
        for _ in 0..50 {
            let path = path(&mut dice);
            let Some(response) = client.try_ask(&format!("{base}{path}")) else { break };
            assert_eq!(response.status, 200, "{}", response.head);
            assert!(response.text() == content(&path), "{path}: {}", response.head);
            answers.fetch_add(1, SeqCst);
        }
    }
}

fn load(up: &Up, origin: &Origin, seed: u64, answers: usize) -> (Vec<JoinHandle<()>>, Arc<AtomicBool>) {
    let (count, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let clients = (0..4).map(|number| {
        let (entry, base) = (up.entry, origin.url(""));
        let (count, stop) = (count.clone(), stop.clone());
        std::thread::spawn(move || ask_on(entry, base, Dice(seed * 100 + number), count, stop))
    });
    let clients = clients.collect();
    awaited("answers come", || (count.load(SeqCst) >= answers).then_some(()));
    (clients, stop)
}

#[test]
fn whatever_moment_it_is_killed_at_only_what_is_right_is_served_after() {
    let folder = folder();
    let origin = origin();
    let disk = folder.path().join("disk");
    let cache = format!(
        "memory_bytes = 1048576, object_bytes = 4000000, disk = '{}', disk_bytes = 16777216",
        disk.display()
    );
    let config = config(folder.path(), &cache);
    let mut dice = Dice(7);
    let mut hits = 0;
    for round in 0..6 {
        let up = Up::start(&config);
        // What is there from the rounds before, seen by a memory that is empty.
        let mut client = Client::new(up.entry);
        for _ in 0..20 {
            let path = path(&mut dice);
            let before = origin.asked().len();
            let response = client.fetch(&origin.url(&path));
            assert!(response.text() == content(&path), "{path}");
            hits += usize::from(round > 0 && origin.asked().len() == before);
        }
        let (clients, stop) = load(&up, &origin, round, 30 + dice.below(200));
        // No client connects again, perhaps to another process on the same port.
        stop.store(true, SeqCst);
        let log = up.kill();
        for client in clients {
            client.join().unwrap();
        }
        assert!(!log.contains("panicked") && !log.contains("removed from the cache"), "{log}");
    }
    assert!(hits > 0, "nothing was ever found on the disk");
}

/// Starts in a mount namespace of its own, where `disk` is a small file system with these options.
fn up_on(folder: &Path, config: &Path, options: &str) -> Up {
    for name in ["disk", "program"] {
        std::fs::create_dir_all(folder.join(name)).unwrap();
    }
    std::fs::write(folder.join("program/sidetrack"), "").unwrap();
    let script = format!(
        "mount -t tmpfs -o {options},mode=777 none \"$1/disk\" && mount --bind \"$2\" \"$1/program/sidetrack\" && \
         exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups \"$1/program/sidetrack\" up -c \"$3\""
    );
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", &script, "sh"])
        .arg(folder)
        .arg(env!("CARGO_BIN_EXE_sidetrack"))
        .arg(config);
    Up::spawn(command)
}

fn stat(folder: &Path) -> serde_json::Value {
    let output = Command::new(env!("CARGO_BIN_EXE_sidetrack"))
        .args(["cache", "stat", "--json", "--admin"])
        .arg(folder.join("admin.sock"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_full_or_read_only_disk_costs_no_request() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let origin = origin();
    for (options, words) in [("size=2m", "No space left"), ("size=2m,ro", "Read-only")] {
        let folder = folder();
        let cache = format!(
            "memory_bytes = 1048576, object_bytes = 4000000, disk = '{}'",
            folder.path().join("disk").display()
        );
        let config = config(folder.path(), &cache);
        let up = up_on(folder.path(), &config, options);
        let mut client = Client::new(up.entry);
        let mut seen = String::new();
        let until = std::time::Instant::now() + LIMIT;
        let mut number = 0;
        while !seen.contains(words) {
            assert!(std::time::Instant::now() < until, "{options}: {seen}");
            number += 1;
            let path = format!("/{number}/{}", if number % 3 == 0 { 1_000_000 } else { 90_000 });
            for _ in 0..2 {
                assert!(client.fetch(&origin.url(&path)).text() == content(&path), "{path}");
            }
            seen = stat(folder.path())["caches"][0]["disk"]["trouble"].to_string();
        }
        assert!(client.fetch(&origin.url("/last/100")).text() == content("/last/100"));
        assert!(client.fetch(&origin.url("/last/100")).is_hit(), "from memory");
        let log = up.kill();
        assert!(log.contains(words), "{log}");
    }
}

fn cache(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_sidetrack"))
        .args(["cache", "--admin"])
        .arg(folder.join("admin.sock"))
        .args(arguments)
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

#[test]
fn the_command_shows_and_removes_what_is_stored() {
    let folder = folder();
    let origin = origin();
    let disk = folder.path().join("disk");
    let config = config(folder.path(), &format!("disk = '{}'", disk.display()));
    let up = Up::start(&config);
    let said = |arguments: &[&str]| cache(folder.path(), arguments);
    let mut client = Client::new(up.entry);
    for path in ["/a/10", "/a/20", "/b/30", "/c/40"] {
        client.fetch(&origin.url(path));
    }
    awaited("four files", || said(&["stat"]).1.contains("4 files in").then_some(()));
    assert!(client.fetch(&origin.url("/a/10")).is_hit());
    assert_eq!(
        stat(folder.path())["caches"][0]["requests"],
        serde_json::json!({"hits": 1, "misses": 4, "passed": 0})
    );
    let asked =
        |path| sidetrack_common::exchange::ask(&folder.path().join("admin.sock"), "GET", path, "").unwrap();
    let (status, largest) = asked("/v1/cache/resources?order=bytes&limit=2");
    let places = ["/c/40", "/b/30"].map(|path| largest.find(path));
    assert!(status == 200 && places[0].is_some() && places[0] < places[1], "{largest}");
    assert!(!largest.contains("/a/20"), "{largest}");
    assert_eq!(asked("/v1/cache/resources?order=size").0, 400);
    let (code, listed) = said(&["ls", &origin.url("/a/")]);
    assert!(code == Some(0) && listed.lines().count() == 3 && listed.contains("/a/20"), "{listed}");
    assert_eq!(said(&["ls", "--limit", "2", "--json"]).1.lines().count(), 2);
    for (arguments, words) in [
        (vec!["purge", &*origin.url("/b/30")], "1 resource removed"),
        (vec!["purge", "--prefix", &*origin.url("/a/")], "2 resources removed"),
        (vec!["purge", &*origin.url("/b/30")], "0 resources removed"),
        (vec!["purge", "--all"], "1 resource removed"),
    ] {
        assert_eq!(said(&arguments), (Some(0), format!("{words}\n")));
    }
    for arguments in [&["purge", "nonsense"][..], &["purge", "--all", "--listener", "other"]] {
        let (code, text) = said(arguments);
        assert!(code == Some(1) && text.contains("help:"), "{text}");
    }
    let (code, _) = said(&["purge"]);
    assert_eq!(code, Some(2), "what to remove is always said");
    assert!(said(&["stat"]).1.contains("0 files in"));
    for path in ["/a/10", "/c/40"] {
        assert!(!client.fetch(&origin.url(path)).is_hit(), "{path}");
    }
}
