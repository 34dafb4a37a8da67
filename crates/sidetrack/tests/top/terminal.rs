//! The program on a terminal, beside a node with traffic.

use crate::node::Up;
use crate::node::peers::Server;
use rustix::process::Signal;
use sidetrack_testkit::screen::Screen;
use sidetrack_testkit::{LIMIT, in_namespace};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;

const SIDETRACK: &str = env!("CARGO_BIN_EXE_sidetrack");

/// A node with one listener.
fn start(server: &Server) -> Up {
    let tables = format!(
        "[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n[[rule]]\nname = \"echoes\"\nmatch \
         = {{ listener = \"port\" }}\ncarrier = \"direct\"\nkernel = \"never\"\n",
        server.address
    );
    Up::start("default = \"deny\"\nuser = \"root\"\n", &tables)
}

/// A client that sends all the time and reads what comes back. It ends with the connection.
struct Traffic {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Traffic {
    fn start(node: &Up) -> Self {
        let mut stream = TcpStream::connect(node.addresses("port")[0]).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let until = stop.clone();
        let work = move || {
            let mut back = [0; 64];
            while !until.load(SeqCst) {
                if stream.write_all(&[7; 64]).is_err() || stream.read(&mut back).unwrap_or(0) == 0 {
                    return;
                }
                std::thread::park_timeout(std::time::Duration::from_millis(10));
            }
        };
        Self { stop, thread: Some(std::thread::spawn(work)) }
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A name for the node's socket that can lead to another node later.
fn lead(link: &Path, node: &Up) {
    let next = link.with_extension("next");
    std::os::unix::fs::symlink(node.folder().join("admin.sock"), &next).unwrap();
    std::fs::rename(next, link).unwrap();
}

fn environment(command: &mut Command) {
    command.env("NO_COLOR", "1").env("LC_ALL", "C.UTF-8").env("TERM", "xterm").env_remove("SIDETRACK_ADMIN");
}

fn top(link: &Path) -> Screen {
    Screen::start(&[SIDETRACK, "top", "--admin", link.to_str().unwrap()], environment)
}

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("link.sock");
    (folder, link)
}

#[test]
fn it_shows_filters_and_ends_flows_of_a_node() {
    in_namespace(|| {
        let (_folder, link) = folder();
        let server = Server::start("127.0.0.1");
        let node = start(&server);
        lead(&link, &node);
        let traffic = Traffic::start(&node);
        let mut screen = top(&link);
        let moves =
            |picture: &str| picture.contains("live") && picture.contains("echoes") && picture.contains(" kB");
        screen.wait_for_picture("a flow that moves", moves);
        assert!(screen.is_second_screen());
        // Another size.
        screen.resize(40, 150);
        screen.wait_for_picture("more columns", |picture| {
            picture.contains("CARRIER") && picture.contains("direct")
        });
        // A filter with a mistake, mended in place.
        screen.press("/rul == echoes");
        screen.wait_for_picture("what is wrong", |picture| picture.contains("^^^"));
        screen.press("\x15rule != echoes\r");
        screen.wait_for_picture("no flow", |picture| {
            picture.contains("No flow in flight matches") && picture.contains("0 of 1 in flight")
        });
        screen.press("\x1b");
        screen.wait_for_picture("the flow again", moves);
        // Its trace, as `flows show` prints it.
        screen.press("\r");
        screen.wait_for_picture("the trace", |picture| {
            picture.contains("orig_dst") && picture.contains("SECONDS")
        });
        // The end of the flow.
        screen.press("x");
        screen.wait_for_picture("the question", |picture| picture.contains("y ends it"));
        screen.press("y");
        screen.wait_for_picture("its end", |picture| picture.contains("killed"));
        screen.press("q3");
        screen.wait_for_picture("health", |picture| {
            picture.contains("Nothing was lost or refused") && picture.contains("reverse")
        });
        screen.press("2");
        screen.wait_for_picture("the fast path", |picture| picture.contains("has no [shunt]"));
        screen.press("q");
        drop(traffic);
        assert!(screen.is_as_at_first());
        assert!(screen.end().success());
        node.stop();
    });
}

#[test]
fn it_says_that_the_node_went_away_and_goes_on_with_the_next() {
    in_namespace(|| {
        let (_folder, link) = folder();
        let server = Server::start("127.0.0.1");
        let node = start(&server);
        lead(&link, &node);
        let mut screen = top(&link);
        screen.wait_for_picture("the node", |picture| picture.contains("0 in flight"));
        node.stop();
        screen.wait_for_picture("that it went away", |picture| picture.contains("NO ANSWER for"));
        let node = start(&server);
        let traffic = Traffic::start(&node);
        lead(&link, &node);
        let back = screen.wait_for_picture("that it is there", |picture| picture.contains("echoes"));
        assert!(!back.contains("NO ANSWER"), "{back}");
        screen.press("q");
        drop(traffic);
        assert!(screen.end().success());
        node.stop();
    });
}

#[test]
fn signals_give_the_terminal_back() {
    in_namespace(|| {
        let (_folder, link) = folder();
        let server = Server::start("127.0.0.1");
        let node = start(&server);
        lead(&link, &node);
        for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
            let mut screen = top(&link);
            screen.wait_for_picture("the node", |picture| picture.contains("0 in flight"));
            crate::node::send(screen.pid(), signal);
            assert!(screen.is_as_at_first(), "{signal:?}");
            assert_eq!(screen.end().signal(), Some(signal.as_raw()));
        }
        node.stop();
    });
}

#[test]
fn it_stops_and_goes_on_as_a_job() {
    in_namespace(|| {
        let (_folder, link) = folder();
        let server = Server::start("127.0.0.1");
        let node = start(&server);
        lead(&link, &node);
        let shell = ["bash", "--norc", "--noprofile", "--noediting", "-i"];
        let mut screen = Screen::start(&shell, |command| {
            environment(command);
            command.env("PS1", "outer> ").env("top", format!("{SIDETRACK} top --admin {}", link.display()));
        });
        screen.wait_for("outer> ");
        for stop in ["\x1a", "kill"] {
            screen.press("$top\n");
            screen.wait_for_picture("the screen", |picture| picture.contains("0 in flight"));
            if stop == "kill" {
                let children = sidetrack_sys::process::children(screen.pid());
                children.into_iter().for_each(|pid| crate::node::send(pid, Signal::TSTP));
            } else {
                screen.press(stop);
            }
            screen.wait_for_picture("the shell", |picture| {
                picture.contains("Stopped") && picture.trim_end().ends_with("outer>")
            });
            assert!(!screen.is_second_screen());
            screen.press("stty -a\n");
            let settings = screen.wait_for("-echoprt");
            assert!(settings.contains(" icanon") && !settings.contains("-icanon"), "{settings}");
            screen.wait_for("outer> ");
            screen.press("fg\n");
            screen.wait_for_picture("the screen again", |picture| picture.contains("0 in flight"));
            assert!(screen.is_second_screen());
            screen.press("q");
            screen.wait_for_picture("the shell again", |picture| picture.trim_end().ends_with("outer>"));
            screen.press("clear\n");
            screen.wait_for_picture("nothing else", |picture| !picture.contains("Stopped"));
        }
        screen.press("exit\n");
        screen.end();
        node.stop();
    });
}

#[test]
fn without_a_terminal_or_a_node_it_says_so() {
    let run = |arguments: &[&str]| {
        let mut command = Command::new(SIDETRACK);
        environment(&mut command);
        let ended = command.args(arguments).stdin(Stdio::null()).output().unwrap();
        (ended.status.code(), String::from_utf8(ended.stderr).unwrap())
    };
    let (code, told) = run(&["top", "--admin", "/nonexistent"]);
    assert!(code == Some(1) && told.contains("no sidetrack runs at /nonexistent"), "{told}");
    let (code, told) = run(&["top", "prot", "==", "443"]);
    assert!(code == Some(2) && told.contains("  ^^^^"), "{told}");
    in_namespace(move || {
        let server = Server::start("127.0.0.1");
        let node = start(&server);
        let mut command = Command::new(SIDETRACK);
        environment(&mut command);
        command.args(["top", "--admin"]).arg(node.folder().join("admin.sock")).stdin(Stdio::null());
        let ended = command.output().unwrap();
        let told = String::from_utf8(ended.stderr).unwrap();
        assert!(ended.status.code() == Some(1) && told.contains("flows --follow"), "{told}");
        assert!(ended.stdout.is_empty());
        node.stop();
    });
}
