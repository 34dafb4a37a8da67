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

/// The size of the window at the start.
const ROWS: u16 = 24;
const COLUMNS: u16 = 80;

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
    /// What a terminal shows, for programs that draw.
    picture: vt100::Parser,
    /// The settings of the terminal before the program was started.
    first_settings: String,
}

impl Screen {
    /// Starts a program that has a terminal of its own. `arrange` sets its environment.
    pub fn start(program: &[&str], arrange: impl FnOnce(&mut Command)) -> Self {
        let Pair { screen, line } = Pair::open().expect("a terminal");
        let picture = vt100::Parser::new(ROWS, COLUMNS, 0);
        resize(&screen, ROWS, COLUMNS).expect("a size");
        let first_settings = format!("{:?}", tcgetattr(&screen).expect("settings"));
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
        let (rest, all) = (String::new(), String::new());
        Self { screen: Some(screen), program, reader, rest, all, shown, picture, first_settings }
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
            self.take(&more);
        }
    }

    fn take(&mut self, more: &[u8]) {
        self.picture.process(more);
        let more = String::from_utf8_lossy(more);
        self.rest.push_str(&more);
        self.all.push_str(&more);
    }

    /// Waits until the picture that a terminal shows is as asked for. Returns it: one line for each row.
    pub fn wait_for_picture(&mut self, what: &str, is_right: impl Fn(&str) -> bool) -> String {
        let until = Instant::now() + LIMIT;
        loop {
            while let Ok(more) = self.shown.try_recv() {
                self.take(&more);
            }
            let picture = self.picture.screen().contents();
            if is_right(&picture) {
                self.rest.clear();
                return picture;
            }
            let more = self.shown.recv_timeout(until.saturating_duration_since(Instant::now()));
            let Ok(more) = more else { panic!("{what}: this is shown:\n{picture}") };
            self.take(&more);
        }
    }

    /// Whether a program draws on the second screen of the terminal, which keeps the first one as it was.
    pub fn is_second_screen(&self) -> bool {
        self.picture.screen().alternate_screen()
    }

    /// Types a line, and waits for a text that it leads to.
    pub fn type_and_wait(&mut self, line: &str, text: &str) -> String {
        self.press(&format!("{line}\n"));
        self.wait_for(text)
    }

    /// Changes the size of the window.
    pub fn resize(&mut self, rows: u16, columns: u16) {
        self.picture.screen_mut().set_size(rows, columns);
        resize(self.screen(), rows, columns).expect("a size");
    }

    /// Returns the settings of the terminal as text, to be compared.
    pub fn settings(&self) -> String {
        format!("{:?}", tcgetattr(self.screen()).expect("settings"))
    }

    /// Waits until the terminal shows its first screen and has the settings that it had before the program.
    pub fn is_as_at_first(&mut self) -> bool {
        let until = Instant::now() + LIMIT;
        while self.settings() != self.first_settings || self.is_second_screen() {
            if Instant::now() > until {
                return false;
            }
            if let Ok(more) = self.shown.recv_timeout(std::time::Duration::from_millis(20)) {
                self.take(&more);
            }
        }
        true
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
