//! The unit files for systemd and the manifest for Kubernetes: their keys, their options, and the time that a stop takes.

use sidetrack::config::{Config, Limits};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The files with the kind of configuration that they name.
const UNITS: [(&str, &str); 3] = [
    ("sidetrack.service", "sidetrack.toml"),
    ("sidetrack-orchestrator.service", "orchestrator.toml"),
    ("sidetrack-domain.service", "domain.toml"),
];

/// Their socket units.
const SOCKETS: [&str; 3] = ["sidetrack.socket", "sidetrack-orchestrator.socket", "sidetrack-domain.socket"];

/// What containers may take to end when a node stops, seconds.
const CONTAINERS_END: u64 = 20;

fn text(unit: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(unit);
    std::fs::read_to_string(&path).expect("the unit file")
}

/// The keys of [Service].
fn service(unit: &str) -> BTreeMap<String, String> {
    let text = text(unit);
    let lines = text.lines().skip_while(|line| *line != "[Service]").skip(1);
    let lines = lines.take_while(|line| !line.starts_with('[')).filter(|line| !line.starts_with('#'));
    let mut keys = BTreeMap::new();
    for line in lines.filter(|line| !line.is_empty()) {
        let (key, value) = line.split_once('=').unwrap_or_else(|| panic!("{unit}: {line}"));
        assert!(keys.insert(key.to_owned(), value.to_owned()).is_none(), "{unit}: {key} stands twice");
    }
    keys
}

#[test]
fn each_is_unprivileged_and_confined() {
    for (unit, _) in UNITS {
        let keys = service(unit);
        for (key, value) in [
            ("User", "sidetrack"),
            ("NoNewPrivileges", "yes"),
            ("ProtectSystem", "strict"),
            ("ProtectHome", "yes"),
            ("LimitCORE", "0"),
            ("Restart", "on-failure"),
            ("KillMode", "mixed"),
        ] {
            assert_eq!(keys.get(key).map(String::as_str), Some(value), "{unit}: {key}");
        }
        assert_eq!(keys["AmbientCapabilities"], keys["CapabilityBoundingSet"], "{unit}");
    }
    // `sidetrack up` says when it is ready, when it reloads and that its workers run; a reload is SIGHUP.
    let node = service(UNITS[0].0);
    assert_eq!((&*node["Type"], &*node["ExecReload"]), ("notify", "/bin/kill -HUP $MAINPID"));
    assert!(node.contains_key("WatchdogSec") && node.contains_key("FileDescriptorStoreMax"));
}

#[test]
fn a_stop_leaves_time_to_drain() {
    let wait = &service(UNITS[0].0)["TimeoutStopSec"];
    let wait: u64 = wait.strip_suffix('s').and_then(|number| number.parse().ok()).expect("seconds");
    assert!(wait > Limits::DRAIN_MS / 1000 + CONTAINERS_END, "{wait} s");
}

/// The program understands the command line: all that it lacks is the file.
#[test]
fn the_commands_and_their_options_exist() {
    for (unit, file) in UNITS {
        let command = service(unit)["ExecStart"].clone();
        let mut words = command.split(' ');
        assert_eq!(words.next(), Some("/usr/bin/sidetrack"), "{unit}");
        let arguments = words.map(|word| match word.strip_prefix("/etc/sidetrack/") {
            Some(name) => {
                assert_eq!(name, file, "{unit}");
                format!("/nowhere/{name}")
            }
            None => word.to_owned(),
        });
        let output =
            Command::new(env!("CARGO_BIN_EXE_sidetrack")).args(arguments).output().expect("the program");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(&format!("/nowhere/{file}")) && !said.contains("Usage"), "{unit}: {said}");
    }
}

#[test]
fn systemd_takes_them() {
    let is_here =
        Command::new("systemd-analyze").arg("--version").output().is_ok_and(|said| said.status.success());
    if !is_here {
        return eprintln!("skipped: needs systemd-analyze");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let units = UNITS.iter().map(|(unit, _)| *unit).chain(SOCKETS);
    let files = units.map(|unit| {
        // It looks whether the program is there.
        let text = text(unit).replace("/usr/bin/sidetrack", env!("CARGO_BIN_EXE_sidetrack"));
        let path = folder.path().join(unit);
        std::fs::write(&path, text).expect("written");
        path
    });
    let files: Vec<_> = files.collect();
    let verified = verify(&files);
    assert!(verified.is_empty(), "{verified}");
    // It would say what is wrong.
    let wrong = folder.path().join("wrong.service");
    std::fs::write(&wrong, text(UNITS[0].0).replace("NoNewPrivileges=yes", "NoNewPrivilegs=yes"))
        .expect("written");
    assert!(verify(&[wrong]).contains("NoNewPrivilegs"));
}

/// What systemd says about these files; nothing if it has no objection.
fn verify(files: &[PathBuf]) -> String {
    let output = Command::new("systemd-analyze").arg("verify").arg("--man=no").args(files).output();
    let output = output.expect("systemd-analyze");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // Of other units, which these want, it may know nothing.
    let ours = |line: &&str| {
        !line.contains("network-online.target")
            && files.iter().any(|file| {
                let name = file.file_name().expect("a name").to_string_lossy();
                line.contains(&*name)
            })
    };
    said.lines().filter(ours).collect::<Vec<_>>().join("\n")
}

/// The manifest for Kubernetes.
const MANIFEST: &str = "kubernetes/sidetrack.yaml";

#[test]
fn the_manifest_has_a_configuration_that_is_right_and_leaves_time_to_drain() {
    let manifest = text(MANIFEST);
    let block = manifest.lines().skip_while(|line| line.trim() != "sidetrack.toml: |").skip(1);
    let block = block.take_while(|line| line.is_empty() || line.starts_with("    "));
    let configuration: String = block.map(|line| format!("{}\n", line.trim_start_matches("    "))).collect();
    let config = Config::from_text("sidetrack.toml", &configuration);
    let config = config.unwrap_or_else(|error| panic!("{}", error.render(false)));
    // One warning: root, which has only the two capabilities of the manifest.
    assert_eq!((config.warnings.len(), config.listeners.len()), (1, 1), "{configuration}");

    let value = |key: &str| {
        let line = manifest.lines().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix(": "));
        line.unwrap_or_else(|| panic!("no {key}")).to_owned()
    };
    let wait: u64 = value("terminationGracePeriodSeconds").parse().expect("seconds");
    assert!(wait > Limits::DRAIN_MS / 1000 + CONTAINERS_END, "{wait} s");
    assert_eq!(value("image"), format!("localhost/sidetrack:{}", env!("CARGO_PKG_VERSION")));
    assert_eq!((value("drop"), value("add")), ("[ALL]".to_owned(), "[NET_ADMIN, NET_RAW]".to_owned()));
}

#[test]
fn the_manifest_fits_the_schema_of_kubernetes() {
    let validate = |path: &Path| Command::new("kubernetes-validate").arg("--strict").arg(path).output();
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(MANIFEST);
    let Ok(output) = validate(&manifest) else {
        return eprintln!("skipped: needs kubernetes-validate (pip install kubernetes-validate)");
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // It would say what is wrong.
    let folder = tempfile::tempdir().expect("a folder");
    let wrong = folder.path().join("wrong.yaml");
    std::fs::write(&wrong, text(MANIFEST).replace("hostNetwork: true", "hostNetwork: 7")).expect("written");
    assert!(!validate(&wrong).expect("it is here").status.success());
}

/// The metrics that a text names.
fn metrics_in(text: &str) -> std::collections::BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words
        .filter(|word| word.starts_with("sidetrack_") || word.starts_with("process_"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_dashboard_and_the_alerts_name_metrics_that_exist() {
    // `the_manual_names_every_metric` holds this list and the program together.
    let manual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/admin.md");
    let manual = std::fs::read_to_string(manual).expect("the manual");
    let known: std::collections::BTreeSet<_> = manual
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split(['{', '`']).next())
        .map(str::to_owned)
        .collect();
    let dashboard = text("grafana/sidetrack.json");
    let rules = text("prometheus/sidetrack.rules.yml");
    let parsed: serde_json::Value = serde_json::from_str(&dashboard).expect("JSON");
    assert!(parsed["panels"].as_array().is_some_and(|panels| panels.len() > 10));
    for (file, text) in [("dashboard", &dashboard), ("rules", &rules)] {
        let named = metrics_in(text);
        assert!(named.len() > 5, "{file}: {named:?}");
        for name in named {
            let series = name.strip_suffix("_bucket").unwrap_or(&name);
            assert!(known.contains(series), "{file}: there is no metric {name}");
        }
    }
}

#[test]
fn prometheus_takes_the_alerts() {
    if Command::new("promtool").arg("--version").output().is_err() {
        return eprintln!("skipped: needs promtool");
    }
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/prometheus/sidetrack.rules.yml");
    let checked = Command::new("promtool").args(["check", "rules"]).arg(rules).output().expect("promtool");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}

/// Builds a program with a source that its build makes, by the script or by cargo itself. Returns its bytes.
fn built_in(folder: &Path, by_script: bool) -> Vec<u8> {
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(path, text).expect("written");
    };
    write("packaging/cargo.sh", &text("cargo.sh"));
    write("Cargo.toml", "[package]\nname = \"small\"\nedition = \"2024\"\n[workspace]\n");
    write(
        "build.rs",
        r#"fn main() { std::fs::write(std::env::var("OUT_DIR").unwrap() + "/made.rs", "fn made() { panic!() }").unwrap(); }"#,
    );
    write("src/main.rs", "include!(concat!(env!(\"OUT_DIR\"), \"/made.rs\"));\nfn main() { made() }\n");
    let cargo = env!("CARGO");
    let mut build = Command::new(if by_script { "bash" } else { cargo });
    build.args(by_script.then_some("packaging/cargo.sh")).args([
        "build",
        "--release",
        "--offline",
        "--quiet",
    ]);
    build.current_dir(folder).env("CARGO", cargo).env("CARGO_TARGET_DIR", folder.join("made"));
    for name in ["RUSTC_WORKSPACE_WRAPPER", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
        build.env_remove(name);
    }
    assert!(build.status().expect("started").success());
    std::fs::read(folder.join("made/release/small")).expect("the program")
}

/// Two builds are equal only if the folders that they were made in are not in them.
#[test]
fn programs_to_install_are_the_same_wherever_they_are_built() {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let has_path = |program: &[u8], folder: &Path| {
        let path = folder.to_str().expect("text").as_bytes();
        program.windows(path.len()).any(|window| window == path)
    };
    let plain = built_in(folders[0].path(), false);
    assert!(has_path(&plain, folders[0].path()), "cargo itself names the folder");
    let [first, second] = folders.each_ref().map(|folder| built_in(folder.path(), true));
    assert!(!has_path(&first, folders[0].path()));
    assert!(first == second, "two builds differ");
}
