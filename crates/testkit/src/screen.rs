//! A terminal with a program on it: keys are pressed, and what is shown is waited for.

use crate::LIMIT;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::tcgetattr;
use sidetrack_sys::terminal::{Pair, resize};
use std::fs::File;
use std::io::{PipeWriter, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Instant;

/// A terminal, and the first program of its session.
pub struct Screen {
    screen: Option<OwnedFd>,
    program: Child,
    /// Its thread ends when the other end of this pipe is closed.
    reader: Option<(PipeWriter, JoinHandle<()>)>,
    /// What has been shown since the last wait ended.
    rest: String,
    all: String,
    shown: Receiver<Vec<u8>>,
}

impl Screen {
    /// Starts a program that has a terminal of its own. `arrange` sets its environment.
    pub fn start(program: &[&str], arrange: impl FnOnce(&mut Command)) -> Self {
        let Pair { screen, line } = Pair::open().expect("a terminal");
        // A shell that starts the tests in the background has SIGINT ignored, and programs inherit that.
        let mut command = Command::new("env");
        command.args(["--default-signal=INT,QUIT", "setsid", "--ctty"]).args(program).env("TERM", "dumb");
        arrange(&mut command);
        let copy = || Stdio::from(line.try_clone().expect("a copy"));
        let program = command.stdin(copy()).stdout(copy()).stderr(copy()).spawn().expect("setsid");
        // The command keeps copies, and while one is open the terminal does not end.
        drop((command, line));
        let (show, shown) = channel();
        let (stopped, stop) = std::io::pipe().expect("a pipe");
        let mut reading = File::from(screen.try_clone().expect("a copy"));
        let thread = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            loop {
                let mut fds = [PollFd::new(&reading, PollFlags::IN), PollFd::new(&stopped, PollFlags::IN)];
                if poll(&mut fds, None).is_err() || !fds[1].revents().is_empty() {
                    return;
                }
                // The end is an error: all programs have closed the terminal.
                let Ok(length @ 1..) = reading.read(&mut bytes) else { return };
                if show.send(bytes[..length].to_vec()).is_err() {
                    return;
                }
            }
        });
        let reader = Some((stop, thread));
        Self { screen: Some(screen), program, reader, rest: String::new(), all: String::new(), shown }
    }

    fn screen(&self) -> &OwnedFd {
        self.screen.as_ref().expect("not hung up")
    }

    /// Presses keys.
    pub fn press(&self, keys: &str) {
        File::from(self.screen().try_clone().expect("a copy")).write_all(keys.as_bytes()).expect("keys");
    }

    /// Waits until this is shown, after what an earlier wait has found. Returns what was shown before it.
    pub fn wait_for(&mut self, text: &str) -> String {
        let until = Instant::now() + LIMIT;
        loop {
            if let Some(at) = self.rest.find(text) {
                let before = self.rest[..at].to_owned();
                self.rest.drain(..at + text.len());
                return before;
            }
            let more = self.shown.recv_timeout(until.saturating_duration_since(Instant::now()));
            let Ok(more) = more else { panic!("{text:?} was not shown, but {:?}", self.all) };
            let more = String::from_utf8_lossy(&more);
            self.rest.push_str(&more);
            self.all.push_str(&more);
        }
    }

    /// Types a line, and waits for a text that it leads to.
    pub fn type_and_wait(&mut self, line: &str, text: &str) -> String {
        self.press(&format!("{line}\n"));
        self.wait_for(text)
    }

    /// Changes the size of the window.
    pub fn resize(&self, rows: u16, columns: u16) {
        resize(self.screen(), rows, columns).expect("a size");
    }

    /// Returns the settings of the terminal as text, to be compared.
    pub fn settings(&self) -> String {
        format!("{:?}", tcgetattr(self.screen()).expect("settings"))
    }

    /// The id of the program.
    pub fn pid(&self) -> u32 {
        self.program.id()
    }

    /// Closes the end with screen and keyboard, as a lost connection does.
    pub fn hang_up(&mut self) {
        if let Some((stop, thread)) = self.reader.take() {
            drop(stop);
            thread.join().expect("the thread that reads");
        }
        self.screen = None;
    }

    /// Waits for the end of the program.
    pub fn end(mut self) -> ExitStatus {
        let until = Instant::now() + LIMIT;
        // What is not read fills the terminal, and its program would wait.
        while let Ok(more) = self.shown.recv_timeout(until.saturating_duration_since(Instant::now())) {
            self.all.push_str(&String::from_utf8_lossy(&more));
        }
        assert!(Instant::now() < until, "the terminal is still open: {:?}", self.all);
        self.program.wait().expect("wait")
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A failed test leaves nothing behind: without its terminal, the session gets SIGHUP.
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}
