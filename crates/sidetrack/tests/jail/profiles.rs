//! `flows --suggest` writes the profile that `--learn` writes, and `explain --profile` says which line decides.

use super::{command, text};
use std::process::Command;

const BINARY: &str = env!("CARGO_BIN_EXE_sidetrack");

/// Connects three times, and prints the profile of its own flows when all have ended.
const SUGGEST: &str = "import os, socket, subprocess, time\n\
    host, port = os.environ['SERVER'].split(':')\n\
    for _ in range(3):\n\
    \x20 with socket.create_connection((host, int(port))) as it: it.recv(9)\n\
    asks = [os.environ['BINARY'], 'flows', '--suggest', '--pid', str(os.getppid()), 'port', '==', port]\n\
    until = time.monotonic() + 60\n\
    while time.monotonic() < until:\n\
    \x20 said = subprocess.run(asks, capture_output=True, text=True)\n\
    \x20 if '3 times' in said.stdout: break\n\
    print(said.stdout + said.stderr, end='')";

#[test]
fn a_profile_is_suggested_from_flows() {
    let server = super::lists::greeting().to_string();
    let folder = tempfile::tempdir().unwrap();
    let learnt = folder.path().join("learnt");
    let mut command = command(&["--learn", learnt.to_str().unwrap()], &["python3", "-c", SUGGEST]);
    let ended = command.env("SERVER", &server).env("BINARY", BINARY).output().unwrap();
    let printed = text(&ended.stdout);
    assert_eq!(printed.lines().count(), 2, "{printed}{}", text(&ended.stderr));
    assert_eq!(printed, std::fs::read_to_string(&learnt).unwrap());
}

#[test]
fn the_line_that_decides_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile");
    let lines = "# a build\nregistry.example:443  # pip\n*.files.example\ndeny bad.files.example\nallow 10.0.0.0/8:5432\nudp:192.0.2.1:123\n\
                 localhost:8080\n";
    std::fs::write(&profile, lines).unwrap();
    let shown = profile.to_str().unwrap();
    let explain = |asked: &str| {
        let ended = Command::new(BINARY).args(["explain", "--profile", shown, asked]).output().unwrap();
        (ended.status.code(), text(&ended.stdout) + &text(&ended.stderr))
    };
    for (asked, code, said) in [
        (
            "registry.example",
            0,
            format!("registry.example:443 is allowed: line 2 of {shown}: registry.example:443  # pip"),
        ),
        (
            "a.files.example:8443",
            0,
            format!("a.files.example:8443 is allowed: line 3 of {shown}: *.files.example"),
        ),
        (
            "bad.files.example:443",
            1,
            format!("bad.files.example:443 is refused: line 4 of {shown}: deny bad.files.example"),
        ),
        ("10.1.2.3:5432", 0, format!("10.1.2.3:5432 is allowed: line 5 of {shown}: allow 10.0.0.0/8:5432")),
        (
            "udp:192.0.2.1:123",
            0,
            format!("udp:192.0.2.1:123 is allowed: line 6 of {shown}: udp:192.0.2.1:123"),
        ),
        (
            "192.0.2.1:123",
            1,
            format!(
                "192.0.2.1:123 is refused: no line of {shown} allows it\nto allow it, add this line: 192.0.2.1:123"
            ),
        ),
        ("registry.example:80", 1, format!("registry.example:80 is refused: no line of {shown} allows it")),
        ("localhost:8080", 0, format!("127.0.0.1:8080 is allowed: line 7 of {shown}: localhost:8080")),
        ("127.0.0.1:22", 1, "127.0.0.1:22 is refused: closed: this host".to_owned()),
        ("a b", 1, "is not a destination".to_owned()),
    ] {
        let (got, printed) = explain(asked);
        assert!(printed.contains(&said) && got == Some(code), "{asked}: {got:?} {printed}");
    }
}
