//! `--allow`, `--deny`, `--jail`, `--profile`: what reaches its destination, what is refused, and what is printed.

use super::{command, run, text};
use std::net::{SocketAddr, TcpListener};

/// Prints the name of the error of a connection to `HOST PORT`, for each pair of arguments in `TRIED`, or what the server says.
const TRY: &str = "import errno, os, socket\n\
    for at in os.environ['TRIED'].split():\n\
    \x20 host, port = at.rsplit(':', 1)\n\
    \x20 try:\n\
    \x20\x20 with socket.create_connection((host, int(port)), timeout=60) as it: print(it.recv(9).decode())\n\
    \x20 except socket.gaierror as error: print('no name')\n\
    \x20 except OSError as error: print(errno.errorcode.get(error.errno, error))\n";

/// A server at this host's loopback that greets every client. Its thread ends with the test.
pub(crate) fn greeting() -> SocketAddr {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in server.incoming() {
            let _ = client.and_then(|mut client| std::io::Write::write_all(&mut client, b"hello"));
        }
    });
    address
}

/// What the program prints for each destination, and our lines.
pub(crate) fn tried(arguments: &[&str], destinations: &[&str]) -> (Vec<String>, Vec<String>) {
    let mut command = command(arguments, &["python3", "-c", TRY]);
    let ended = command.env("TRIED", destinations.join(" ")).output().unwrap();
    let lines = |bytes: &[u8]| text(bytes).lines().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    (lines(&ended.stdout), lines(&ended.stderr))
}

/// Whether an error means that the connection was refused by policy: `EACCES`; over IPv4 to loopback `EHOSTUNREACH`; without queues in
/// the kernel, a reset.
fn is_refused(printed: &str) -> bool {
    ["EHOSTUNREACH", "EACCES", "ECONNRESET"].contains(&printed)
}

#[test]
fn only_what_is_allowed_is_reached_and_the_rest_is_said() {
    let (one, other) = (greeting(), greeting());
    let allow = format!("{one},unknown.invalid");
    let destinations = [
        &one.to_string(),
        &other.to_string(),
        "192.0.2.1:443",
        "192.0.2.1:443",
        "2001:db8::1:443",
        "169.254.169.254:80",
        "secret.invalid:443",
    ];
    let (printed, lines) = tried(&["--allow", &allow], &destinations);
    assert_eq!(printed.len(), destinations.len(), "{printed:?} {lines:?}");
    assert_eq!(printed[0], "hello", "{printed:?} {lines:?}");
    assert!(printed[1..6].iter().all(|one| is_refused(one)), "{printed:?} {lines:?}");
    assert_eq!(printed[6], "no name");
    for (place, entry) in [
        (format!("{other}: denied"), other.to_string()),
        ("192.0.2.1:443: denied".to_owned(), "192.0.2.1:443".to_owned()),
        ("[2001:db8::1]:443: denied".to_owned(), "[2001:db8::1]:443".to_owned()),
        ("169.254.169.254:80: denied".to_owned(), "169.254.169.254:80".to_owned()),
    ] {
        let found: Vec<_> = lines.iter().filter(|line| line.contains(&place)).collect();
        // A count may follow the first line.
        let [line, ..] = &found[..] else { panic!("{place}: {lines:?}") };
        assert!(line.starts_with("sidetrack: python3"), "{line}");
        assert!(line.ends_with(&format!("; to allow it: --allow {entry}")), "{line}");
    }
    let of_name =
        "secret.invalid: denied by policy (the name is not allowed); to allow it: --allow secret.invalid";
    let found: Vec<_> = lines.iter().filter(|line| line.ends_with(of_name)).collect();
    assert!(found.len() == 1 && found[0].starts_with("sidetrack: python3"), "{lines:?}");
}

#[test]
fn a_profile_and_a_jail_without_a_list() {
    let server = greeting();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profile");
    std::fs::write(&file, format!("# what it needs\nlocalhost:{}  # python3, once\n", server.port()))
        .unwrap();
    let destination = [&*server.to_string()];
    let (printed, lines) = tried(&["--profile", file.to_str().unwrap()], &destination);
    assert_eq!((&*printed[0], lines.len()), ("hello", 0), "{printed:?} {lines:?}");
    let (printed, _) = tried(&["--jail"], &destination);
    assert!(is_refused(&printed[0]), "{printed:?}");
    // What is denied is denied although it is allowed; without a list of what is allowed, the rest is carried.
    let denied = format!("127.0.0.0/8:{}", server.port());
    let (printed, lines) = tried(&["--allow", &server.to_string(), "--deny", &denied], &destination);
    assert!(is_refused(&printed[0]) && lines[0].contains("take this entry from the deny list"), "{lines:?}");
    let (printed, _) = tried(&["--deny", "192.0.2.0/24"], &destination);
    assert_eq!(printed[0], "hello");
}

#[test]
fn an_audit_carries_what_it_names_and_a_refusal_can_be_an_exit_code() {
    let server = greeting().to_string();
    let (printed, lines) = tried(&["--allow", "a.example", "--audit"], &[&server]);
    assert_eq!(printed[0], "hello");
    let said = format!(
        "{server}: would be refused (closed: this host, link-local and metadata addresses); to allow it: --allow {server}"
    );
    assert!(lines[0].ends_with(&said), "{lines:?}");
    let code = |arguments: &[&str], program: &str| run(arguments, program).status.code();
    let connects = format!(
        "import socket\ntry: socket.create_connection(('127.0.0.1', {}))\nexcept OSError: pass",
        server.rsplit(':').next().unwrap()
    );
    assert_eq!(code(&["--jail", "--fail-on-deny"], &connects), Some(120));
    assert_eq!(code(&["--jail", "--fail-on-deny", "--quiet"], &connects), Some(120));
    assert_eq!(code(&["--audit", "--fail-on-deny"], &connects), Some(120));
    assert_eq!(code(&["--jail"], &connects), Some(0), "the command's own");
    assert_eq!(code(&["--allow", &server, "--fail-on-deny"], &connects), Some(0));
    assert_eq!(
        code(
            &["--jail", "--fail-on-deny"],
            "import socket\ntry: socket.getaddrinfo('a.invalid', 1)\nexcept OSError: pass"
        ),
        Some(120)
    );
    assert_eq!(
        code(
            &["--jail", "--unix", "deny"],
            "import socket\ntry: socket.socket(socket.AF_UNIX)\nexcept PermissionError: exit(7)"
        ),
        Some(7)
    );
}

#[test]
fn what_was_reached_is_reported_and_learnt_and_then_enforced() {
    let server = greeting().to_string();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (report, profile) = (format!("--report={}", at("report")), at("profile"));
    let (printed, _) = tried(&["--learn", &profile, &report, "--json"], &[&server, &server]);
    assert_eq!(printed, ["hello", "hello"]);
    let learnt = std::fs::read_to_string(&profile).unwrap();
    let line = learnt.lines().nth(1).unwrap();
    assert!(line.starts_with(&format!("{server}  # python3")) && line.ends_with(", 2 times"), "{learnt}");
    let summary: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(at("report")).unwrap()).unwrap();
    assert_eq!(
        (&summary["reached"][0]["flows"], &summary["reached"][0]["bytes_down"]),
        (&2.into(), &10.into()),
        "{summary}"
    );
    let arguments = ["--profile", &profile, "--report"];
    let (printed, lines) = tried(&arguments, &[&server, "192.0.2.1:80"]);
    assert!(printed[0] == "hello" && is_refused(&printed[1]), "{printed:?}");
    assert!(lines.contains(&"sidetrack: 1 destinations reached, 1 refused".to_owned()), "{lines:?}");
}

#[test]
fn wrong_lists_are_errors_that_say_where() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profile");
    std::fs::write(&file, "a.example\npermit b.example\n").unwrap();
    for (arguments, said) in [
        (&["--allow", "a.example:x"][..], "--allow a.example:x: 'x' is not a port"),
        (&["--profile", file.to_str().unwrap()], "line 2: 'permit' is not 'allow' or 'deny'"),
        (&["--profile", "/nowhere"], "cannot read --profile /nowhere"),
        (&["--jail", "--mode", "cgroup"], "leave --mode out"),
        (&["--unix", "deny"], "--unix is for a jail"),
        (&["--jail", "--unix", "abstract", "--nested"], "--unix abstract does not go with --nested"),
    ] {
        let ended = run(arguments, "");
        assert_eq!(ended.status.code(), Some(125), "{arguments:?}");
        assert!(text(&ended.stderr).contains(said), "{arguments:?}: {}", text(&ended.stderr));
    }
}
