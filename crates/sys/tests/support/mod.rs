//! A network namespace of its own for each test, and small TCP peers in it.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
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
    // SAFETY: only this thread is moved; it holds no state of the old namespace.
    let moved = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    assert_eq!(moved, 0, "unshare: {}", io::Error::last_os_error());
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

/// SO_ORIGINAL_DST, read with nothing of the crate under test.
pub fn original_destination(stream: &TcpStream) -> SocketAddr {
    let v4 = matches!(stream.local_addr().expect("address").ip().to_canonical(), IpAddr::V4(_));
    let level = if v4 { libc::SOL_IP } else { libc::SOL_IPV6 };
    let mut raw = [0u8; 28];
    let mut length = libc::socklen_t::try_from(raw.len()).expect("small");
    // SAFETY: `raw` is live and `length` bytes long; the kernel writes a sockaddr_in (16) or sockaddr_in6 (28).
    let got =
        unsafe { libc::getsockopt(stream.as_raw_fd(), level, 80, raw.as_mut_ptr().cast(), &raw mut length) };
    assert_eq!(got, 0, "SO_ORIGINAL_DST: {}", io::Error::last_os_error());
    let port = u16::from_be_bytes([raw[2], raw[3]]);
    let ip = if v4 {
        IpAddr::from([raw[4], raw[5], raw[6], raw[7]])
    } else {
        IpAddr::from(<[u8; 16]>::try_from(&raw[8..24]).expect("16 bytes"))
    };
    SocketAddr::new(ip, port)
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
