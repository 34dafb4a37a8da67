//! `sidetrack doctor --fix` and `sidetrack bugreport` as programs: what they change, say and leave out.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Runs a shell script in a network and mount namespace of its own, with a private /etc/sysctl.d; `$1` is the program.
fn apart(script: &str) -> Option<String> {
    if fs::metadata("/proc/self").expect("our own").uid() != 0 {
        eprintln!("skipped: needs root");
        return None;
    }
    let script = format!("set -e; mount -t tmpfs tmpfs /etc/sysctl.d; cd /tmp; {script}");
    let output = Command::new("unshare")
        .args(["--net", "--mount", "sh", "-c", &script, "sh", env!("CARGO_BIN_EXE_sidetrack")])
        .output()
        .expect("unshare");
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}");
    Some(text)
}

#[test]
fn a_low_bound_is_raised_and_kept_and_the_rest_is_left_to_the_user() {
    let somaxconn = "echo 128 >/proc/sys/net/core/somaxconn; printf 'vm.swappiness = 7\\n' >/etc/sysctl.d/90-sidetrack.conf; ";
    let look = "echo now $(cat /proc/sys/net/core/somaxconn); cat /etc/sysctl.d/90-sidetrack.conf";
    let Some(text) = apart(&format!("{somaxconn} \"$1\" doctor --fix --dry-run; {look}")) else { return };
    assert!(text.contains("would set net.core.somaxconn to 4096 (it was 128)"), "{text}");
    assert!(
        text.contains("now 128") && !text.contains("somaxconn = 4096"),
        "a dry run changes nothing: {text}"
    );

    let text =
        apart(&format!("{somaxconn} \"$1\" doctor --fix || true; {look}; ls /etc/sysctl.d")).expect("root");
    assert!(text.contains("done: set net.core.somaxconn to 4096 (it was 128)"), "{text}");
    assert!(text.contains("now 4096") && text.contains("net.core.somaxconn = 4096"), "{text}");
    assert!(text.contains("vm.swappiness = 7"), "other lines stay: {text}");
    assert!(!text.contains(".new"), "no other file is left: {text}");
    // Forwarding opens this host for other hosts: that is not for a program to decide.
    assert!(text.contains("left to you: forwarding:"), "{text}");

    let text =
        apart(&format!("{somaxconn} \"$1\" doctor --fix >/dev/null || true; \"$1\" doctor")).expect("root");
    assert!(text.contains("4096 connections may wait"), "a second look finds it mended: {text}");
}

fn bugreport(folder: &Path, arguments: &[&str], log: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_sidetrack"))
        .arg("bugreport")
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program");
    child.stdin.take().expect("a pipe").write_all(log.as_bytes()).expect("written");
    child.wait_with_output().expect("it ends")
}

/// A configuration with a secret in each place that may have one, and a log that repeats them.
#[test]
fn no_secret_is_in_a_report() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::write(at("alice.password"), "hunter2-in-a-file\n").expect("written");
    let socket = at("admin.sock");
    let file = format!(
        "version = 1 # hunter2-in-a-comment\ndefault = 'deny'\n[admin]\nsocket = '{}'\n[[listen]]\nkind = 'socks'\naddress = '127.0.0.1:1'\n\
         users = [{{ user = 'alice', password_file = 'alice.password' }}, {{ user = 'bob', password = 'hunter2-as-text' }}]\n\
         [function.words]\nkind = 'filter'\ndeny_words = ['hunter2-word']\n\
         [[rule]]\nname = 'out'\ncarrier = ['socks5://carol:hunter2-in-a-url@gw.example:1080']\n",
        socket.display()
    );
    fs::write(at("sidetrack.toml"), file).expect("written");
    let log = "dialled socks5://carol:hunter2-in-a-url@gw.example:1080\nbob said hunter2-as-text\ntoken=hunter2-announced\nflow 7 ended: ok\n";
    let output =
        bugreport(folder.path(), &["--config", "sidetrack.toml", "--log", "-", "--out", "report"], log);
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    let mut names = Vec::new();
    for entry in fs::read_dir(at("report")).expect("the folder") {
        let path = entry.expect("listed").path();
        let text = fs::read_to_string(&path).expect("text");
        assert!(!text.contains("hunter2"), "{}: {text}", path.display());
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        names.push(path.file_name().expect("a name").to_string_lossy().into_owned());
    }
    names.sort();
    assert_eq!(
        names,
        [
            "check.txt",
            "configuration.toml",
            "doctor.json",
            "functions.json",
            "log.txt",
            "overlay.json",
            "status.json",
            "versions.txt"
        ]
    );
    let text = |name: &str| fs::read_to_string(at("report").join(name)).expect("text");
    // What a maintainer needs is there.
    assert!(text("versions.txt").contains(env!("CARGO_PKG_VERSION")), "{}", text("versions.txt"));
    assert!(text("log.txt").contains("flow 7 ended: ok"), "{}", text("log.txt"));
    for kept in ["gw.example:1080", "alice.password", "'deny'", "kind = \"socks\""] {
        let configuration = text("configuration.toml").replace("\"deny\"", "'deny'");
        assert!(configuration.contains(kept), "{kept}: {configuration}");
    }
    // It warns of the password that is not in a file, without showing it.
    assert!(text("check.txt").contains("\"warning\" at line 8"), "{}", text("check.txt"));
    assert!(text("status.json").contains("no sidetrack runs"), "{}", text("status.json"));
    // An old report is never overwritten.
    let again = bugreport(folder.path(), &["--config", "sidetrack.toml", "--out", "report"], "");
    assert!(!again.status.success() && String::from_utf8_lossy(&again.stderr).contains("report"));
}

#[test]
fn a_wrong_configuration_is_not_shown_but_its_errors_are_counted() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("sidetrack.toml"), "version = 1\npassword = 'hunter2\n").expect("written");
    let output = bugreport(folder.path(), &["--config", "sidetrack.toml", "--out", "report"], "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = |name: &str| fs::read_to_string(folder.path().join("report").join(name)).expect("text");
    assert!(
        !text("configuration.toml").contains("hunter2") && text("configuration.toml").contains("not TOML")
    );
    assert!(
        text("check.txt").contains("error") && !text("check.txt").contains("hunter2"),
        "{}",
        text("check.txt")
    );
}
