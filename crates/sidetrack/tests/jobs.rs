//! Every job of `sidetrack init`: from its answers to a node that runs.

use rustix::process::{Pid, Signal, kill_process};
use sidetrack_testkit::{Node, is_root};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

const JOBS: [&str; 8] = ["command", "gateway", "cache", "tls", "overlay", "shunt", "engine", "agreement"];

fn sidetrack() -> Command {
    Command::new(env!("CARGO_BIN_EXE_sidetrack"))
}

fn init(job: &str, folder: &Path) {
    let made = sidetrack().args(["init", job, "--yes", "--dir"]).arg(folder).output().expect("started");
    assert!(made.status.success(), "{job}: {}", String::from_utf8_lossy(&made.stderr));
}

#[test]
fn the_help_of_a_job_names_the_keys_of_init() {
    for job in JOBS {
        let help = sidetrack().args(["help", job]).output().expect("started");
        let help = String::from_utf8(help.stdout).expect("text");
        assert!(help.contains(&format!("sidetrack init {job}")), "{help}");
    }
    let unknown = sidetrack().args(["help", "gatway"]).output().expect("started");
    assert!(!unknown.status.success());
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("gateway"), "{unknown:?}");
}

/// The files of `init` with the default answers, on a host that has the interfaces and addresses which they name.
#[test]
fn a_node_runs_what_init_writes() {
    if !is_root() {
        return;
    }
    for job in JOBS {
        let folder = tempfile::tempdir().expect("a folder");
        init(job, folder.path());
        let config = folder.path().join("sidetrack.toml");
        // The usual socket may be that of a node on this host.
        let text = std::fs::read_to_string(&config).expect("written");
        std::fs::write(&config, text + "\n[admin]\nsocket = \"none\"\n").expect("written");
        let host = Node::new();
        host.ip("link add eth0 type veth peer name eth1");
        for line in [
            "addr add 192.0.2.80/24 dev eth0",
            "addr add 198.51.100.80/24 dev eth1",
            "link set eth0 up",
            "link set eth1 up",
        ] {
            host.ip(line);
        }
        let work = folder.path().to_owned();
        let mut up = host.run(move || {
            let mut up = sidetrack();
            up.args(["up", "--config"]).arg(config).current_dir(work);
            up.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().expect("started")
        });
        let mut log = Vec::new();
        for line in BufReader::new(up.stderr.take().expect("piped")).lines() {
            let line = line.expect("text");
            let is_ready = line.contains("node: ready");
            log.push(line);
            if is_ready {
                let pid = Pid::from_raw(i32::try_from(up.id()).expect("an id")).expect("an id");
                kill_process(pid, Signal::TERM).expect("running");
            }
        }
        assert!(up.wait().expect("ended").success(), "{job}: {}", log.join("\n"));
        assert!(log.iter().any(|line| line.contains("node: ready")), "{job}: {}", log.join("\n"));
    }
}
