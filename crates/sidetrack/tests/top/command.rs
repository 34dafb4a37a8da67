//! `sidetrack run --top`: the screen beside one command.

use sidetrack_testkit::eventually;
use sidetrack_testkit::screen::Screen;
use std::path::Path;
use std::process::{Command, Stdio};

const SIDETRACK: &str = env!("CARGO_BIN_EXE_sidetrack");

fn environment(command: &mut Command) {
    command.env("NO_COLOR", "1").env("LC_ALL", "C.UTF-8").env("TERM", "xterm");
    command.env_remove("SIDETRACK_VIA").env_remove("SIDETRACK_ADMIN");
}

/// A command that tries an address behind a hop that is not there, until the file is there.
fn start(file: &Path) -> (Screen, socket2::Socket) {
    // A port that is bound, and never listens.
    let closed = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    closed.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let via = format!("socks5://{}", closed.local_addr().unwrap().as_socket().unwrap());
    let script = format!(
        "trap 'exit 9' INT; while [ ! -e {} ]; do curl -s http://192.0.2.77/; echo tried; sleep 0.1; done; echo at-the-end; exit 7",
        file.display()
    );
    let line = [SIDETRACK, "run", "--via", &via, "--quiet", "--top", "--", "sh", "-c", &script];
    (Screen::start(&line, environment), closed)
}

#[test]
fn the_screen_shows_the_connections_of_a_command() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("end");
    let (mut screen, _closed) = start(&file);
    let picture = screen.wait_for_picture("a flow", |picture| picture.contains("192.0.2.77:80"));
    assert!(picture.starts_with("sh: ") && !picture.contains("tried"), "{picture}");
    assert!(screen.is_second_screen());
    // Its end ends the screen. What it has written follows, and its exit code is ours.
    std::fs::write(&file, "").unwrap();
    screen.wait_for("tried");
    screen.wait_for("at-the-end");
    assert!(screen.is_as_at_first());
    assert_eq!(screen.end().code(), Some(7));
}

#[test]
fn the_output_is_shown_when_the_screen_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("end");
    let (mut screen, _closed) = start(&file);
    screen.wait_for_picture("a flow", |picture| picture.contains("192.0.2.77:80"));
    screen.press("q");
    assert!(screen.is_as_at_first());
    for _ in 0..5 {
        screen.wait_for("tried");
    }
    // A signal is the command's.
    let ours = screen.pid();
    let children = sidetrack_sys::process::children(ours);
    screen.press("\x03");
    assert_eq!(screen.end().code(), Some(9));
    eventually("nothing is left", || {
        children.iter().all(|pid| sidetrack_sys::process::process_info(*pid).is_err())
    });
}

#[test]
fn it_needs_a_terminal() {
    let mut command = Command::new(SIDETRACK);
    environment(&mut command);
    let ended = command.args(["run", "--top", "--", "echo", "here"]).stdin(Stdio::null()).output().unwrap();
    let told = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(125), "{told}");
    assert!(told.contains("--top needs a terminal") && ended.stdout.is_empty(), "{told}");
}
