//! A test bed of three hosts that run sshd: the experiment's results, and that nothing is left on the hosts, also when it
//! is interrupted.

#[allow(dead_code, reason = "each test file uses its part")]
mod support;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use sidetrack_lab::launch::{Placement, find_program, launcher};
use sidetrack_lab::scratch::Scratch;
use sidetrack_lab::service::Service;
use sidetrack_lab::topology::{self, Link, Node};
use support::{Done, Tally};

const LIMIT: Duration = Duration::from_secs(60);
/// sshd needs /run/sshd; a private /run avoids changing the host's.
const PRIVATE_RUN: &str = "mount -t tmpfs lab /run && mkdir -m 0755 /run/sshd && exec \"$2\" -D -e -f \"$1\"";

fn as_root(case: &str, body: impl FnOnce()) {
    let mut tally = Tally::default();
    let missing = ["ssh", "ssh-keygen", "sshd"].into_iter().find(|name| find_program(name).is_none());
    let done = if !rustix::process::geteuid().is_root() {
        Done::Skipped("namespaces with links need root".into())
    } else if let Some(name) = missing {
        Done::Skipped(format!("{name} is not installed"))
    } else {
        body();
        Done::Ran
    };
    tally.note(case, Ok(done));
    tally.finish();
}

/// Three hosts with sshd, joined by links of the data plane, and a desk with a link to each of them.
///
/// ```text
///   desk ──11── client ──1── proxy ──2── server        numbers are those of the links
///     ├───12────────────────── proxy        │
///     └───13──────────────────────────── server; client ──3── server
/// ```
struct Bed {
    _sshd: Vec<Service>,
    desk: Node,
    hosts: [Node; 3],
    file: PathBuf,
    folder: Scratch,
}

impl Bed {
    fn new() -> Self {
        let launcher = launcher().expect("built beside the tests");
        let folder = Scratch::on_disk().expect("a folder");
        for name in ["key", "other-key", "host-key"] {
            let mut command = Command::new("ssh-keygen");
            command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.path().join(name));
            assert!(command.status().expect("it runs").success());
        }
        let node = |name: &str| Node::new(name, &launcher).expect("a node");
        let desk = node("desk");
        let hosts = ["client", "proxy", "server"].map(node);
        let join = |a: &Node, b: &Node, subnet: u8| topology::link(a, b, subnet).expect("a link");
        let [client, proxy, server] = &hosts;
        let desks = [(client, 11), (proxy, 12), (server, 13)].map(|(host, subnet)| join(&desk, host, subnet));
        let data = [join(client, proxy, 1), join(proxy, server, 2), join(client, server, 3)];
        let sshd = hosts.iter().zip(&desks).map(|(host, link)| sshd(folder.path(), host, link)).collect();
        let bed = Self { _sshd: sshd, file: folder.path().join("bed.toml"), desk, hosts, folder };
        bed.write(&desks, &data);
        bed
    }

    fn write(&self, desks: &[Link; 3], data: &[Link; 3]) {
        let key = fs::read_to_string(self.folder.path().join("host-key.pub")).expect("written");
        let known: String = desks.iter().map(|link| format!("{} {key}", link.b.v4)).collect();
        fs::write(self.folder.path().join("known_hosts"), known).expect("writable");
        let reached = [
            String::new(),
            format!("reached_at = {{ client = \"{}\" }}\n", data[0].b.v4),
            format!("reached_at = {{ client = \"{}\", proxy = \"{}\" }}\n", data[2].b.v4, data[1].b.v4),
        ];
        let hosts = self.hosts.iter().zip(desks).zip(reached).map(|((host, link), reached)| {
            format!(
                "[[host]]\nrole = \"{}\"\nssh = \"{}\"\nuser = \"root\"\nport = 22\nkey = \"key\"\nknown_hosts = \
                 \"known_hosts\"\n{reached}",
                host.name(),
                link.b.v4
            )
        });
        fs::write(&self.file, hosts.collect::<String>()).expect("writable");
    }

    /// Starts the experiment at the desk.
    fn start(&self, arguments: &[&str]) -> Child {
        let launcher = launcher().expect("built beside the tests");
        let mut command = self.desk.command(&launcher.to_string_lossy());
        // sessions of ssh would use the agent of the person who runs the test
        command.env_remove("SSH_AUTH_SOCK").args(["epi", "--quick", "--testbed"]).arg(&self.file);
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the lab runs")
    }

    /// The folders of the hosts for temporary files; the lab makes its own in them.
    fn folders(&self) -> impl Iterator<Item = PathBuf> {
        self.hosts.iter().map(|host| self.folder.path().join(host.name()))
    }

    fn left(&self) -> Vec<PathBuf> {
        let entries = self.folders().flat_map(|folder| fs::read_dir(folder).expect("readable"));
        entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
    }

    /// Returns the programs that run from copies on the hosts.
    fn running(&self) -> Vec<PathBuf> {
        let pids = fs::read_dir("/proc").expect("Linux").filter_map(|entry| Some(entry.ok()?.path()));
        let programs = pids.filter_map(|pid| fs::read_link(pid.join("exe")).ok());
        programs.filter(|program| self.folders().any(|folder| program.starts_with(folder))).collect()
    }

    /// Waits until nothing runs and nothing is left on the hosts.
    fn wait_until_clean(&self) {
        let since = Instant::now();
        while !(self.left().is_empty() && self.running().is_empty()) {
            assert!(since.elapsed() < LIMIT, "still there: {:?}, {:?}", self.left(), self.running());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Starts sshd on a host, which gives its sessions a folder of this host for temporary files.
fn sshd(folder: &Path, host: &Node, desk: &Link) -> Service {
    let own = folder.join(host.name());
    fs::create_dir(&own).expect("new");
    let config = folder.join(format!("{}.conf", host.name()));
    let text = format!(
        "HostKey {0}/host-key\nAuthorizedKeysFile {0}/key.pub\nPidFile none\nPermitRootLogin prohibit-password\n\
         StrictModes no\nUsePAM no\nPasswordAuthentication no\nLogLevel ERROR\nMaxStartups 100\n\
         ListenAddress {1}:22\nSetEnv TMPDIR={2}\n",
        folder.display(),
        desk.b.v4,
        own.display()
    );
    fs::write(&config, text).expect("writable");
    let mut command = host.command_at("unshare", &Placement::default());
    command.args(["--mount", "--", "sh", "-c", PRIVATE_RUN, "-"]).arg(&config);
    command.arg(find_program("sshd").expect("looked for"));
    let mut service = Service::start(&format!("sshd-{}", host.name()), command, folder).expect("sshd starts");
    service.wait_listening(host, 22).expect("sshd listens");
    service
}

fn end(mut lab: Child) -> (Option<i32>, String, String) {
    let (mut text, mut errors) = (String::new(), String::new());
    lab.stdout.take().expect("piped").read_to_string(&mut text).expect("text");
    lab.stderr.take().expect("piped").read_to_string(&mut errors).expect("text");
    (lab.wait().expect("ours").code(), text, errors)
}

#[test]
fn three_hosts_reached_by_ssh_give_the_tables_and_are_clean_afterwards() {
    as_root("a test bed", || {
        let bed = Bed::new();
        let out = bed.folder.path().join("out");
        let (code, text, errors) =
            end(bed.start(&["--rounds", "1", "--window", "1", "--out", &out.to_string_lossy()]));
        assert_eq!(code, Some(0), "{text}{errors}");
        let results: serde_json::Value =
            serde_json::from_slice(&fs::read(out.join("results.json")).expect("written")).expect("JSON");
        let rows = [
            "no proxy",
            "ours, reverse",
            "ours, SOCKS5",
            "ours, SOCKS6",
            "ours, SOCKS6 with data",
            "ours, unmodified client",
        ];
        for row in rows {
            let figures = &results["figures"][row];
            assert!(figures["medians_ms"][0].as_f64().is_some_and(|ms| ms > 0.0), "{row}: {results}");
            assert!(figures["rates"][0][0].as_f64().is_some_and(|rate| rate > 0.0), "{row}: {results}");
            assert!(text.contains(&format!("| {row} | ")), "{text}");
        }
        assert_eq!(results["hosts"].as_array().map(Vec::len), Some(3));
        assert!(results["distances"]["proxy_server_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{results}");
        assert!(fs::read_to_string(out.join("times.csv")).expect("written").contains("no proxy,0,"));
        bed.wait_until_clean();
    });
}

#[test]
fn an_interrupted_run_leaves_nothing_on_the_hosts() {
    as_root("an interrupted test bed", || {
        let bed = Bed::new();
        let mut lab = bed.start(&["--only", "SOCKS6", "--window", "60", "--part", "rates"]);
        let since = Instant::now();
        // The origins run at two hosts, and our proxy: the experiment is in the middle of its work.
        while !bed.running().iter().any(|program| program.ends_with("sidetrack")) {
            assert!(lab.try_wait().expect("ours").is_none(), "it ended: {:?}", end(lab));
            assert!(since.elapsed() < LIMIT * 2, "it does not begin");
            std::thread::sleep(Duration::from_millis(5));
        }
        let pid = Pid::from_raw(lab.id().cast_signed()).expect("not zero");
        // Not SIGINT, which a shell ignores for what it starts in the background.
        rustix::process::kill_process(pid, Signal::TERM).expect("ours");
        assert_eq!(end(lab).0, None, "a signal ended it");
        bed.wait_until_clean();
    });
}

#[test]
fn a_host_that_refuses_is_named_and_the_others_are_clean() {
    as_root("a refusing host", || {
        let bed = Bed::new();
        let text = fs::read_to_string(&bed.file).expect("written");
        let (others, server) = text.split_once("role = \"server\"").expect("three hosts");
        let server = server.replace("key = \"key\"", "key = \"other-key\"");
        fs::write(&bed.file, format!("{others}role = \"server\"{server}")).expect("writable");
        let (code, _, errors) = end(bed.start(&[]));
        assert_eq!(code, Some(2), "{errors}");
        assert!(
            errors.contains("cannot use host \"server\"") && errors.contains("Permission denied"),
            "{errors}"
        );
        bed.wait_until_clean();
        fs::write(&bed.file, text.replace("role = \"server\"", "role = \"relay\"")).expect("writable");
        let (code, _, errors) = end(bed.start(&[]));
        assert!(code == Some(2) && errors.contains("unknown variant `relay`"), "{errors}");
    });
}
