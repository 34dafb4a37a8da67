//! Containers of podman: by name, and by the hook that is shipped.

use crate::{Attached, attach, echo};
use sidetrack_testkit::{Line, Node, eventually, is_root};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Where things lie that podman needs to work in a container or virtual machine as well as on a host.
const SETTINGS: &str = "[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=1024:1024\"]\n\
                        [engine]\nruntime = \"runc\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\n";

/// podman over storage of its own, as the command `podman` of a folder; with an image that has bash, cat and sleep.
struct Engine {
    folder: PathBuf,
}

impl Engine {
    /// `None` where podman cannot be had; says why.
    fn start() -> Option<Self> {
        let has = |tool: &str| {
            let mut found = Command::new("sh");
            found.args(["-c", "command -v \"$0\" >/dev/null", tool]).env("PATH", path(None));
            found.status().is_ok_and(|status| status.success())
        };
        if let Some(tool) = ["podman", "runc", "ldd", "bash"].into_iter().find(|tool| !has(tool)) {
            eprintln!("skipped: {tool} is missing: make deps-test installs it");
            return None;
        }
        let folder = tempfile::Builder::new().prefix("attach-engine").tempdir().expect("a folder").keep();
        let engine = Self { folder };
        let (here, settings) = (engine.folder.display(), engine.folder.join("containers.conf"));
        let hooks = engine.folder.join("hooks");
        fs::create_dir_all(&hooks).expect("a folder");
        fs::write(&settings, format!("{SETTINGS}hooks_dir = [\"{}\"]\n", hooks.display())).expect("written");
        let wrapper = format!(
            "#!/bin/sh\nPATH={}\nCONTAINERS_CONF={} exec podman --root {here}/st --runroot {here}/run --storage-driver vfs \"$@\"\n",
            path(None).display(),
            settings.display()
        );
        engine.script("bin/podman", &wrapper);
        engine.image();
        Some(engine)
    }

    fn script(&self, name: &str, text: &str) {
        let path = self.folder.join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(&path, text).expect("written");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("our own file");
    }

    fn image(&self) {
        let root = self.folder.join("root");
        for folder in ["bin", "proc", "dev", "sys", "etc", "tmp"] {
            fs::create_dir_all(root.join(folder)).expect("a folder");
        }
        for program in ["/bin/bash", "/bin/cat", "/bin/sleep"] {
            let libraries = Command::new("ldd").arg(program).output().expect("ldd");
            let text = String::from_utf8_lossy(&libraries.stdout).into_owned();
            for file in text.split_whitespace().filter(|word| word.starts_with('/')).chain([program]) {
                let copy = root.join(file.trim_start_matches('/'));
                fs::create_dir_all(copy.parent().expect("below the root")).expect("a folder");
                fs::copy(file, copy).expect("copied");
            }
        }
        let archive = self.folder.join("image.tar");
        let packed = Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&archive).arg(".").status();
        assert!(packed.expect("tar").success());
        self.podman(&["import", "--quiet", &archive.display().to_string(), "localhost/small:1"]);
    }

    /// What it prints; it succeeds.
    fn podman(&self, arguments: &[&str]) -> String {
        let output = self.tried(arguments);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {told}");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    fn tried(&self, arguments: &[&str]) -> Output {
        Command::new(self.folder.join("bin/podman"))
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .expect("podman")
    }

    /// What a command of bash prints in a container.
    fn exec(&self, container: &str, script: &str) -> Output {
        self.tried(&["exec", container, "/bin/bash", "-c", script])
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.tried(&["rm", "--all", "--force", "--time", "0"]);
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// The places of programs; Debian has some where an ordinary PATH does not look.
fn path(first: Option<&Path>) -> OsString {
    let usual = std::env::var("PATH").unwrap_or_default();
    let first = first.map(|folder| format!("{}:", folder.display())).unwrap_or_default();
    format!("{first}{usual}:/usr/sbin:/sbin").into()
}

/// Sends a word and prints the answer; the server goes on, so bash reads as many bytes as the word has.
fn asks(ip: &str, port: u16) -> String {
    format!("exec 3<>/dev/tcp/{ip}/{port} && echo ping >&3 && read -r line <&3 && echo $line")
}

/// Puts the shipped hook where the engine looks for it. Its sidetrack runs in the network of `host`.
fn install_hook(engine: &Engine, host: &Node, log: &Path) {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/hooks");
    // The runtime starts hooks in this host's network: only this wrapper knows the client's.
    let own = format!(
        "#!/bin/sh\nexec nsenter --net={} {} \"$@\"\n",
        crate::network_of(host),
        env!("CARGO_BIN_EXE_sidetrack")
    );
    engine.script("bin/sidetrack", &own);
    let text = fs::read_to_string(shipped.join("sidetrack-attach.json")).expect("the hook");
    let mut hook: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    hook["hook"]["path"] = shipped.join("sidetrack-attach-hook").display().to_string().into();
    let path = path(None).into_string().expect("text");
    hook["hook"]["env"] = serde_json::json!([
        format!("SIDETRACK={}/bin/sidetrack", engine.folder.display()),
        format!("ATTACH_LOG={}", log.display()),
        format!("PATH={path}"),
    ]);
    fs::write(engine.folder.join("hooks/attach.json"), hook.to_string()).expect("written");
}

#[test]
fn a_container_without_a_network_gets_one_that_is_limited() {
    if !is_root() {
        return;
    }
    let Some(engine) = Engine::start() else { return };
    let line = Line::new();
    let (open, closed) = (echo(&line.server, "10.0.2.1"), echo(&line.server, "10.0.2.1"));
    // By its name, while it runs.
    engine.podman(&[
        "run",
        "--detach",
        "--name",
        "web",
        "--network",
        "none",
        "localhost/small:1",
        "/bin/sleep",
        "1000",
    ]);
    let list = format!("10.0.2.1:{open}");
    let mut command = attach(&["--allow", &list, "podman:web"]);
    command.env("PATH", path(Some(&engine.folder.join("bin"))));
    let attached = Attached::of(&line.client, command);
    let printed = engine.exec("web", &asks("10.0.2.1", open));
    assert_eq!(String::from_utf8_lossy(&printed.stdout), "ping\n");
    assert!(!engine.exec("web", &asks("10.0.2.1", closed)).status.success());
    // The end of the container is the end.
    engine.podman(&["kill", "web"]);
    let (code, told) = attached.end();
    assert_eq!(code, Some(0), "{told}");
    let mut command = attach(&["podman:web"]);
    command.env("PATH", path(Some(&engine.folder.join("bin"))));
    let refused = command.output().expect("it runs");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("does not run: start it first"));
    // By the hook, before its program runs.
    let (profile, log) = (engine.folder.join("profile"), engine.folder.join("log"));
    fs::write(&profile, format!("{list}\n")).expect("written");
    install_hook(&engine, &line.client, &log);
    let annotation = format!("sidetrack.profile={}", profile.display());
    let script = format!("{}; {} || echo refused", asks("10.0.2.1", open), asks("10.0.2.1", closed));
    let run = ["run", "--rm", "--network", "none", "--annotation", &annotation, "localhost/small:1"];
    let printed = engine.podman(&[&run[..], &["/bin/bash", "-c", &script]].concat());
    assert_eq!(printed, "ping\nrefused", "{}", fs::read_to_string(&log).unwrap_or_default());
    // A container without the annotation is left alone; one whose profile is wrong does not start.
    let plain = ["run", "--rm", "--network", "none", "localhost/small:1", "/bin/bash", "-c", "echo alone"];
    assert_eq!(engine.podman(&plain), "alone");
    fs::write(&profile, "not a host!\n").expect("written");
    assert!(!engine.tried(&[&run[..], &["/bin/bash", "-c", "echo started"]].concat()).status.success());
    eventually("no sidetrack of the hook is left", || {
        let pids = fs::read_dir("/proc").expect("proc").flatten();
        let here = engine.folder.display().to_string();
        let mut lines = pids.filter_map(|entry| fs::read_to_string(entry.path().join("cmdline")).ok());
        !lines.any(|line| line.contains("attach") && line.contains(&here))
    });
}
