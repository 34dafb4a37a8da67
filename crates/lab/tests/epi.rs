//! The complete EPI experiment: its files, and that nothing else is left behind, also when it is killed.

#[allow(dead_code, reason = "each test file uses its part")]
mod support;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use sidetrack_lab::launch::{find_program, launcher};
use sidetrack_lab::topology::Node;
use support::{Done, Tally};

/// Runs `body` as root with the programs of the experiment; otherwise the test is skipped.
fn as_root(case: &str, body: impl FnOnce()) {
    let mut tally = Tally::default();
    let missing = ["nginx", "httping"].into_iter().find(|name| find_program(name).is_none());
    let done = if !rustix::process::geteuid().is_root() {
        Done::Skipped("namespaces with links need root".into())
    } else if !Path::new("/dev/net/tun").exists() {
        Done::Skipped("this host has no /dev/net/tun".into())
    } else if let Some(name) = missing {
        Done::Skipped(format!("{name} is not installed"))
    } else {
        body();
        Done::Ran
    };
    tally.note(case, Ok(done));
    tally.finish();
}

/// A separate host for the experiment: everything that is left there comes from the experiment.
struct Host {
    node: Node,
    folder: tempfile::TempDir,
}

/// Everything that the experiment could leave in the host.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    rules: String,
    interfaces: String,
    routing: String,
    files: BTreeSet<PathBuf>,
}

impl Host {
    fn new() -> Self {
        let node = Node::new("host", &launcher().expect("built beside the tests")).expect("a node");
        Self { node, folder: tempfile::tempdir().expect("a folder") }
    }

    fn left(&self) -> Left {
        let run = |program: &str, arguments: &[&str]| self.node.run(program, arguments).expect("it runs");
        Left {
            rules: run("nft", &["list", "ruleset"]),
            interfaces: run("ip", &["-brief", "link"]),
            routing: run("ip", &["rule"]) + &run("ip", &["route", "show", "table", "all"]),
            files: files(self.folder.path()),
        }
    }

    /// Runs the experiment, with every folder it could write to below the test's folder.
    fn start(&self, arguments: &[&str]) -> Child {
        let launcher = launcher().expect("built beside the tests");
        let mut command = self.node.command(&launcher.to_string_lossy());
        for name in ["TMPDIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME"] {
            command.env(name, self.folder.path());
        }
        command.args(["epi", "--quick", "--links", "builtin"]).args(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the lab runs")
    }
}

fn files(folder: &Path) -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(folder).expect("readable").filter_map(|entry| Some(entry.ok()?.path()));
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { BTreeSet::from([path]) }).collect()
}

/// Returns the processes that descend from `root`, itself included, each with its network namespace.
fn family(root: u32) -> BTreeSet<(u32, PathBuf)> {
    let parent = |pid: u32| -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.get(stat.rfind(')')? + 1..)?.split_whitespace().nth(1)?.parse().ok()
    };
    let pids = || {
        let names = fs::read_dir("/proc").expect("Linux");
        names.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
    };
    let mut members = BTreeSet::from([root]);
    loop {
        let more: Vec<u32> = pids()
            .filter(|pid| {
                !members.contains(pid) && parent(*pid).is_some_and(|parent| members.contains(&parent))
            })
            .collect();
        if more.is_empty() {
            break;
        }
        members.extend(more);
    }
    members.into_iter().filter_map(|pid| Some((pid, namespace(pid)?))).collect()
}

fn namespace(pid: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/net")).ok()
}

/// Waits until none of these processes runs and none of their namespaces is in use.
fn wait_until_gone(members: &BTreeSet<(u32, PathBuf)>, but: &Path) {
    let spaces: BTreeSet<&Path> =
        members.iter().map(|(_, space)| space.as_path()).filter(|space| *space != but).collect();
    let since = Instant::now();
    loop {
        let pids = fs::read_dir("/proc").expect("Linux");
        let held: Vec<u32> = pids
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|pid| {
                namespace(*pid)
                    .is_some_and(|space| spaces.contains(space.as_path()) || members.contains(&(*pid, space)))
            })
            .collect();
        let scratch = fs::read_dir("/dev/shm")
            .expect("a memory file system")
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let ours =
            |name: &String| members.iter().any(|(pid, _)| name.starts_with(&format!("sidetrack-lab-{pid}-")));
        let scratch: Vec<String> = scratch.filter(ours).collect();
        if held.is_empty() && scratch.is_empty() {
            return;
        }
        assert!(
            since.elapsed() < Duration::from_secs(60),
            "still there: processes {held:?}, folders {scratch:?}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_run_writes_its_results_and_leaves_nothing_else() {
    as_root("a run", || {
        let host = Host::new();
        let before = host.left();
        let out = tempfile::tempdir().expect("a folder");
        let folder = out.path().to_string_lossy().into_owned();
        let lab = host.start(&["--part", "times", "--only", "ours, reverse", "--out", &folder]);
        let output = lab.wait_with_output().expect("it ends");
        let (text, errors) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        // The bars depend on the machine and are not checked; nginx, which they need, is not among the rows.
        assert!(output.status.success(), "{text}{errors}");
        assert_eq!(text.matches("| ours, reverse | ").count(), 6, "{text}");
        assert_eq!(host.left(), before);
        let results: serde_json::Value =
            serde_json::from_slice(&fs::read(out.path().join("results.json")).expect("written"))
                .expect("JSON");
        let times = results["figures"]["times"]["ours, reverse"][0]["each_ms"].as_array().expect("a list");
        // DOCKER 1: two round trips to the proxy and two on to the server, 5 ms each. A shorter time means that the
        // link does not delay.
        assert!(
            times.len() >= 5 && times.iter().all(|time| time.as_f64().is_some_and(|ms| ms > 19.5)),
            "{times:?}"
        );
        let csv = fs::read_to_string(out.path().join("times.csv")).expect("written");
        assert!(csv.starts_with("row,topology,") && csv.lines().count() > 100, "{csv}");
        for figure in ["fig11a", "fig11b", "fig12a", "fig12b"] {
            let svg = fs::read_to_string(out.path().join(format!("{figure}.svg"))).expect("written");
            assert!(svg.starts_with("<svg") && svg.contains("ours, reverse"), "{figure}");
        }
    });
}

#[test]
fn nothing_is_left_when_it_is_killed() {
    as_root("a killed run", || {
        let host = Host::new();
        let before = host.left();
        let mut lab = host.start(&["--part", "times", "--only", "ours, SOCKS6"]);
        let mut said = String::new();
        BufReader::new(lab.stderr.take().expect("piped")).read_line(&mut said).expect("readable");
        assert!(said.starts_with("This will take"), "{said}");
        // Nodes, the origin, a redirector, a proxy and the client run: the experiment is in the middle of its work.
        let since = Instant::now();
        let members = loop {
            let members = family(lab.id());
            let running = |name: &str| {
                members.iter().any(|(pid, _)| {
                    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name)
                })
            };
            if running("sidetrack") && running("httping") {
                break members;
            }
            assert!(since.elapsed() < Duration::from_secs(120), "it does not begin: {members:?}");
            std::thread::sleep(Duration::from_millis(2));
        };
        let own = namespace(lab.id()).expect("it runs");
        lab.kill().expect("killable");
        lab.wait().expect("killed");
        wait_until_gone(&members, &own);
        assert_eq!(host.left(), before);
    });
}
