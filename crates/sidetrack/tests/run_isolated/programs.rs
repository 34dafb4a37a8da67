//! Programs of every kind, unchanged: each fetches by name, by IPv4 and by IPv6 address, and checks the answers.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::served;
use sidetrack_testkit::apart::Outcome;

/// What every program is to reach.
const TARGETS: [&str; 3] = ["web.example.test:80", "192.0.2.80:8080", "[2001:db8::80]:81"];

/// Compiled programs, where everybody can execute them; removed when dropped.
pub(crate) struct Built(Option<PathBuf>);

impl Drop for Built {
    fn drop(&mut self) {
        if let Some(directory) = &self.0 {
            let _ = fs::remove_dir_all(directory);
        }
    }
}

/// The directory of the process that runs the scenarios.
fn directory(pid: u32) -> PathBuf {
    PathBuf::from(format!("/tmp/sidetrack-run-{pid}"))
}

/// Compiles what the scenarios to be run need.
pub(crate) fn build(runs: &[(&str, &str)]) -> Built {
    if !runs.iter().any(|(_, name)| name.starts_with("static") || *name == "java") {
        return Built(None);
    }
    let directory = directory(std::process::id());
    fs::create_dir(&directory).expect("directory");
    for (name, source) in [("fetch.go", GO), ("fetch.c", C), ("Fetch.java", JAVA)] {
        fs::write(directory.join(name), source).expect("source");
    }
    let make = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&directory).env("CGO_ENABLED", "0").stdin(Stdio::null());
        // One that is not installed is missed by its scenario, which says so.
        assert!(command.status().map_or(true, |status| status.success()), "{program} failed");
    };
    make("go", &["build", "-o", "go", "fetch.go"]);
    make("musl-gcc", &["-static", "-O1", "-o", "musl", "fetch.c"]);
    Built(Some(directory))
}

/// Runs one that checks its answers itself.
fn fetches(argv: &[&str]) -> Outcome {
    let argv: Vec<&str> = argv.iter().copied().chain(TARGETS).collect();
    let (code, seen) = served::run(&argv);
    assert_eq!(code, 0, "{}", argv[0]);
    let expected: BTreeMap<String, usize> = TARGETS.iter().map(|target| ((*target).to_owned(), 1)).collect();
    assert_eq!(seen, expected);
    Outcome::Done
}

fn is_installed(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|directory| directory.join(program).is_file()))
}

fn installed(program: &'static str, arguments: &[&str]) -> Outcome {
    if !is_installed(program) {
        return Outcome::Lacks(program);
    }
    let argv: Vec<&str> = [program].iter().chain(arguments).copied().collect();
    fetches(&argv)
}

fn built(name: &'static str) -> Outcome {
    let path = directory(std::os::unix::process::parent_id()).join(name);
    if !path.exists() {
        return Outcome::Lacks(name);
    }
    fetches(&[path.to_str().expect("UTF-8")])
}

pub(crate) fn curl() -> Outcome {
    const SCRIPT: &str = r#"for t in "$@"; do
        [ "$(curl -sS -g --fail --max-time 60 "http://$t/")" = "you reached $t" ] || exit 1
    done"#;
    if !is_installed("curl") {
        return Outcome::Lacks("curl");
    }
    fetches(&["sh", "-c", SCRIPT, "sh"])
}

pub(crate) fn python() -> Outcome {
    const SCRIPT: &str = "import sys, urllib.request\n\
        for t in sys.argv[1:]:\n\
        \x20 b = urllib.request.urlopen(f'http://{t}/', timeout=60).read().decode()\n\
        \x20 assert b == f'you reached {t}\\n', b\n";
    // The system's own: a version manager in the PATH may be root's.
    fetches(&["/usr/bin/python3", "-c", SCRIPT])
}

pub(crate) fn node() -> Outcome {
    const SCRIPT: &str = "(async () => { for (const t of process.argv.slice(1)) {\n\
        const b = await (await fetch(`http://${t}/`)).text();\n\
        if (b !== `you reached ${t}\\n`) throw new Error(b); } })().catch(e => { console.error(e); process.exit(1); })";
    installed("node", &["-e", SCRIPT])
}

pub(crate) fn java() -> Outcome {
    let source = directory(std::os::unix::process::parent_id()).join("Fetch.java");
    installed("java", &[source.to_str().expect("UTF-8")])
}

pub(crate) fn go() -> Outcome {
    built("go")
}

pub(crate) fn musl() -> Outcome {
    built("musl")
}

const JAVA: &str = r#"
import java.net.*;
public class Fetch {
    public static void main(String[] targets) throws Exception {
        for (String t : targets) {
            var c = (HttpURLConnection) new URL("http://" + t + "/").openConnection(Proxy.NO_PROXY);
            var b = new String(c.getInputStream().readAllBytes());
            if (!b.equals("you reached " + t + "\n")) throw new Exception(b);
        }
    }
}
"#;

/// Static by CGO_ENABLED=0, so with Go's own resolver. No net/http: it would triple the time to compile.
const GO: &str = r#"
package main

import ("fmt"; "io"; "net"; "os"; "strings")

func main() {
    for _, t := range os.Args[1:] {
        c, err := net.Dial("tcp", t)
        if err != nil { panic(err) }
        fmt.Fprintf(c, "GET / HTTP/1.0\r\n\r\n")
        b, err := io.ReadAll(c)
        if err != nil || !strings.HasSuffix(string(b), "\r\n\r\nyou reached " + t + "\n") { panic(string(b)) }
    }
}
"#;

const C: &str = r#"
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int fetch(const char *target) {
    char host[256], want[300], got[4096];
    snprintf(host, sizeof host, "%s", target[0] == '[' ? target + 1 : target);
    char *port = strrchr(host, ':');
    *port++ = 0;
    if (target[0] == '[') *strrchr(host, ']') = 0;
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *found;
    if (getaddrinfo(host, port, &hints, &found)) return 1;
    int fd = socket(found->ai_family, SOCK_STREAM, 0);
    if (connect(fd, found->ai_addr, found->ai_addrlen)) return 2;
    if (write(fd, "GET / HTTP/1.0\r\n\r\n", 18) != 18) return 3;
    size_t len = 0;
    for (ssize_t n; (n = read(fd, got + len, sizeof got - 1 - len)) > 0;) len += n;
    got[len] = 0;
    close(fd);
    snprintf(want, sizeof want, "\r\n\r\nyou reached %s\n", target);
    return strstr(got, want) ? 0 : 4;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        int failed = fetch(argv[i]);
        if (failed) { fprintf(stderr, "%s: %d\n", argv[i], failed); return failed; }
    }
    return 0;
}
"#;
