//! `fn probe`, `chain try` and `fn new`, as people use them.

use crate::engine::engine;
use crate::scene::own;
use sidetrack_testkit::{LIMIT, in_namespace};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn sidetrack(arguments: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.args(arguments).current_dir(folder).env("NO_COLOR", "1").output().expect("the binary")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A folder with a configuration of these functions, and a rule `all` with this chain.
fn folder(chain: &str, functions: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let text = format!(
        "version = 1\ndefault = 'deny'\n[containers]\nengine = '{}'\n[[listen]]\nkind = 'socks'\naddress = '127.0.0.1:1080'\n\
         [[rule]]\nname = 'all'\ncarrier = 'direct'\nchain = {chain}\non_function_down = 'deny'\n{functions}",
        engine().socket().display()
    );
    std::fs::write(folder.path().join("sidetrack.toml"), text).expect("a file");
    folder
}

const CONFIG: [&str; 2] = ["--config", "sidetrack.toml"];

fn left(name: &str) -> Vec<String> {
    engine().containers(&format!("sidetrack-{name}-"))
}

#[test]
fn a_probe_says_whether_flows_get_through_and_leaves_nothing() {
    in_namespace(|| {
        let functions = format!(
            "{}{}{}[function.count]\nkind = 'count'\n",
            own("probed-well", ""),
            own("probed-turned", "environment = { HOW = 'reorder' }\nprobe = 'connect'"),
            own("probed-dead", "environment = { HOW = 'exit' }")
        );
        let folder = folder("['count']", &functions);
        let probe = |name: &str| {
            let arguments = [&["fn", "probe", name, "--count", "5"], &CONFIG[..]].concat();
            let output = sidetrack(&arguments, folder.path());
            (output.status.code(), text(&output.stdout), text(&output.stderr))
        };
        let (code, out, _) = probe("probed-well");
        assert!(code == Some(0) && out.contains("bytes come out as they went in, both ways"), "{out}");
        for line in ["function    probed-well (localhost/function:1, speaks socks6)", "connect ", "of 5"] {
            assert!(out.contains(line), "{line} is not in\n{out}");
        }
        let (code, out, _) = probe("probed-turned");
        assert!(code == Some(0) && out.contains("(probe = \"connect\" allows that)"), "{out}");
        let (code, _, err) = probe("probed-dead");
        assert!(
            code == Some(1) && err.contains("function 'probed-dead': its program ended with code 3"),
            "{err}"
        );
        let (code, _, err) = probe("count");
        assert!(code == Some(2) && err.contains("`fn test`"), "{err}");
        assert_eq!(left("probed"), Vec::<String>::new());
    });
}

#[test]
fn a_chain_with_containers_is_tried_hop_by_hop() {
    in_namespace(|| {
        let functions = format!(
            "{}[function.swap]\nkind = 'replace'\nreplace = [{{ find = 'dull', with = 'fine' }}]\n",
            own("tried", "")
        );
        let folder = folder("['swap', 'tried', 'swap']", &functions);
        let arguments = [&["chain", "try", "all", "--bytes", "1000000"], &CONFIG[..]].concat();
        let output = sidetrack(&arguments, folder.path());
        let out = text(&output.stdout);
        assert!(output.status.success(), "{out}{}", text(&output.stderr));
        let lines: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1][..3], ["swap", "replace", "1000000"]);
        assert_eq!(lines[2][..3], ["tried", "container", "1000000"]);
        assert!(lines[2][5].parse::<f64>().is_ok_and(|ms| ms > 0.0), "{out}");
        assert_eq!(lines[3][5], "-", "no connection");
        assert_eq!(left("tried"), Vec::<String>::new());
    });
}

/// What `fn new` writes is a SOCKS5 proxy that works, with half-closed flows, before anybody changes it.
#[test]
fn a_new_function_works_as_it_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = sidetrack(&["fn", "new", "audit"], folder.path());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains("podman build --tag localhost/audit:1"),
        "{}",
        text(&output.stdout)
    );
    let again = sidetrack(&["fn", "new", "audit"], folder.path());
    assert!(!again.status.success() && text(&again.stderr).contains("is it there already?"));
    assert!(!sidetrack(&["fn", "new", "../x"], folder.path()).status.success());
    let written = folder.path().join("audit");
    let checked = sidetrack(&["check", "sidetrack.toml"], &written);
    assert!(checked.status.success(), "{}{}", text(&checked.stdout), text(&checked.stderr));

    let mut function = Command::new("python3");
    function.args(["-u", "function.py"]).current_dir(&written).env("PORT", "0").stdout(Stdio::piped());
    let mut function = function.spawn().expect("python3");
    let mut line = String::new();
    BufReader::new(function.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let port: u16 = line.trim().rsplit(' ').next().and_then(|port| port.parse().ok()).expect("its port");
    let server = crate::scene::Echo::start();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("the function");
    stream.set_read_timeout(Some(LIMIT)).expect("a socket");
    let request =
        [&[5, 1, 0, 5, 1, 0, 1, 127, 0, 0, 1][..], &server.address.port().to_be_bytes(), b"hello"].concat();
    // In pieces: the handshake may be cut anywhere.
    for byte in request {
        stream.write_all(&[byte]).expect("an open stream");
    }
    stream.shutdown(Shutdown::Write).expect("an open stream");
    let mut came = Vec::new();
    stream.read_to_end(&mut came).expect("an end in order");
    assert_eq!(came, [&[5, 0, 5, 0, 0, 1, 0, 0, 0, 0, 0, 0][..], b"hellobye\n"].concat());
    function.kill().expect("our own process");
    function.wait().expect("our own process");
}
