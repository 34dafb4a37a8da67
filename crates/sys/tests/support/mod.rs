//! A network namespace of its own for each test, and small TCP peers in it.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

/// How long any single step may take before the test fails.
pub const LIMIT: Duration = Duration::from_secs(10);

/// Runs `test` on a thread with a fresh network namespace whose `lo` is up. Says so and does nothing when not root.
pub fn in_namespace(test: impl FnOnce() + Send + 'static) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let thread = std::thread::spawn(|| {
        enter_new_namespace();
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Moves this thread into a new network namespace and brings its `lo` up.
pub fn enter_new_namespace() {
    #[expect(deprecated, reason = "the new form is unsafe because of CLONE_FILES, which is not used here")]
    rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNET).expect("unshare");
    sidetrack_sys::route::link_up("lo").expect("lo up");
}

/// A listener on a free port of `address`.
pub fn listen(address: &str) -> TcpListener {
    TcpListener::bind(SocketAddr::new(address.parse().expect("address"), 0)).expect("listen")
}

/// Accepts one connection within the limit.
pub fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    assert!(readable(listener, LIMIT), "nobody connected");
    listener.accept().expect("accept")
}

/// Whether the descriptor becomes readable within `limit`.
pub fn readable(fd: impl AsFd, limit: Duration) -> bool {
    let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec {
        tv_sec: limit.as_secs().cast_signed(),
        tv_nsec: limit.subsec_nanos().into(),
    };
    rustix::event::poll(&mut fds, Some(&limit)).expect("poll") > 0
}

/// Connects within the limit.
pub fn connect(to: &str) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(&to.parse().expect("socket address"), LIMIT)
}

/// Runs the nft tool in this thread's namespace; its output, or `None` if it is not installed.
pub fn nft(arguments: &str) -> Option<String> {
    let output = match Command::new("nft").args(arguments.split_whitespace()).output() {
        Ok(output) => output,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            eprintln!("skipped: needs the nft tool");
            return None;
        }
        Err(error) => panic!("nft: {error}"),
    };
    assert!(output.status.success(), "nft {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).expect("text"))
}

/// Text with every run of white space as one space, for comparing listings whose line breaks differ.
pub fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
