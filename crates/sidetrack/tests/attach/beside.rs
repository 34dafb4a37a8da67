//! Beside an attach: `flows`, and the shell that has started it.

use crate::{Attached, Program, echo, records};
use sidetrack_testkit::{Line, Node, awaited, is_root};
use std::process::{Command, Output, Stdio};

/// `sidetrack flows` of this attach.
fn flows(host: &Node, attached: &Attached, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.arg("flows").args(["--pid", &attached.child.id().to_string()]).args(arguments);
    host.run(move || command.output()).expect("it runs")
}

#[test]
fn flows_shows_and_ends_what_an_attach_carries() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let port = echo(&line.server, "10.0.2.1");
    let mut program = Program::start(&line.client);
    let pid = program.pid().to_string();
    let attached = Attached::start(&line.client, &[&pid]);
    assert_eq!(program.ask(&format!("open 10.0.2.1 {port}")), "open");
    assert_eq!(program.ask("use"), "ping");
    let shown = awaited("the flow is shown", || {
        let ended = flows(&line.client, &attached, &["--json", &format!("port == {port}")]);
        let text = String::from_utf8_lossy(&ended.stdout).into_owned();
        serde_json::from_str::<serde_json::Value>(text.lines().next()?).ok()
    });
    assert_eq!(
        (&shown["orig_dst"], &shown["intercept"]),
        (&format!("10.0.2.1:{port}").into(), &"run".into()),
        "{shown}"
    );
    assert!(shown["process"].as_str().is_some_and(|name| name.starts_with("python3")), "{shown}");
    let ended = flows(&line.client, &attached, &["kill", &shown["flow"].to_string()]);
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let answer = program.ask("use");
    assert!(["ConnectionResetError", "BrokenPipeError"].contains(&&*answer), "{answer}");
    assert_eq!(program.ask(&format!("tcp 10.0.2.1 {port}")), "ping", "others go on");
    attached.detach();
    program.end();
}

/// Attaches to itself, lets a child connect, detaches, and connects again.
const SCRIPT: &str = r#"
"$SIDETRACK" attach --force --records "$FOLDER/records" $$ 2>"$FOLDER/told" &
attached=$!
left=1200
until grep -q 'attached to' "$FOLDER/told"; do
    left=$((left - 1))
    [ $left -gt 0 ] && kill -0 $attached || { cat "$FOLDER/told"; exit 9; }
    sleep 0.05
done
ask() { python3 -c "import socket; s = socket.create_connection(('10.0.2.1', $PORT), 60); s.sendall(b'ping'); print(s.recv(9).decode())"; }
ask
kill -TERM $attached
wait $attached
echo "code $?"
ask
"#;

#[test]
fn force_attaches_to_the_shell_that_has_started_it() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let port = echo(&line.server, "10.0.2.1");
    let folder = tempfile::tempdir().expect("a folder");
    let mut shell = Command::new("sh");
    shell.args(["-c", SCRIPT]).stdin(Stdio::null()).env("NO_COLOR", "1").env_remove("SIDETRACK_VIA");
    shell.env("SIDETRACK", env!("CARGO_BIN_EXE_sidetrack")).env("PORT", port.to_string());
    shell.env("FOLDER", folder.path());
    let ended = line.client.run(move || shell.output()).expect("it runs");
    let printed = String::from_utf8_lossy(&ended.stdout).into_owned();
    let told = std::fs::read_to_string(folder.path().join("told")).expect("text");
    assert_eq!(printed, "ping\ncode 0\nping\n", "{told}");
    // The second connection was not caught any more, and our own connection never was.
    let records = records(&folder.path().join("records"));
    let text = |field: &str| records.iter().map(|record| record.text(field)).collect::<Vec<_>>();
    assert_eq!((text("protocol"), text("reason")), (vec!["tcp"], vec!["ok"]));
    assert!(text("process")[0].starts_with("python3"), "{:?}", text("process"));
}
