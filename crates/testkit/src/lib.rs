//! What the tests of several crates share: hosts in network namespaces of their own, small TCP and UDP peers, and waiting for a
//! condition. Only tests depend on this crate.

pub mod apart;
pub mod datagrams;
pub mod screen;
pub mod streams;

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use sidetrack_sys::sysctl;

/// How long any single step may take before the test fails.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Runs `test` on a thread with a fresh network namespace whose `lo` is up. Says so and does nothing when not root.
pub fn in_namespace(test: impl FnOnce() + Send + 'static) {
    if !is_root() {
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

/// Moves this thread into a mount namespace of its own: what it mounts from now on goes with it.
pub fn enter_new_mounts() {
    use rustix::mount::{MountPropagationFlags, mount_change};
    #[expect(deprecated, reason = "the new form is unsafe because of CLONE_FILES, which is not used here")]
    rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNS).expect("unshare");
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).expect("private");
}

/// A host: a thread in a network namespace of its own that does what it is told.
pub struct Node {
    thread_id: u32,
    work: Option<mpsc::Sender<Box<dyn FnOnce() + Send>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Node {
    /// A new host with only `lo`.
    #[must_use]
    pub fn new() -> Self {
        let (work, queue) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let (started, start) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            enter_new_namespace();
            started
                .send(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned())
                .expect("the test waits");
            queue.into_iter().for_each(|work| work());
        });
        let thread_id = start.recv_timeout(LIMIT).expect("a namespace");
        Self { thread_id, work: Some(work), thread: Some(thread) }
    }

    /// The id of its thread, by which `ip` finds its namespace.
    pub const fn thread_id(&self) -> u32 {
        self.thread_id
    }

    /// Does something on this host and waits for its result; a panic there is one here.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = mpsc::channel();
        let job = move || drop(done.send(std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))));
        self.work.as_ref().expect("alive").send(Box::new(job)).expect("the host's thread lives");
        match result.recv_timeout(LIMIT * 5).expect("the host answers in time") {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Runs the `ip` tool on this host.
    pub fn ip(&self, arguments: &str) {
        let arguments = arguments.to_owned();
        self.run(move || tool("ip", &arguments));
    }

    /// Runs the `ethtool` tool on this host.
    pub fn ethtool(&self, arguments: &str) {
        let arguments = arguments.to_owned();
        self.run(move || tool("ethtool", &arguments));
    }

    /// Waits until this interface carries packets: it is up, and so is the other end of its cable. The kernel notices that a
    /// moment after the command that brought it up; on a busy machine, seconds.
    pub fn carries(&self, interface: &str) {
        let interface = interface.to_owned();
        self.run(move || {
            eventually("the interface carries packets", || {
                let shown = Command::new("ip").args(["-o", "link", "show", "dev", &interface]).output();
                String::from_utf8_lossy(&shown.expect("the ip tool").stdout).contains(" state UP ")
            });
        });
    }
}

impl Default for Node {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Runs the `ip` tool in the network namespace of this thread.
///
/// # Panics
/// Panics if it fails.
pub fn ip(arguments: &str) {
    tool("ip", arguments);
}

fn tool(program: &str, arguments: &str) {
    let output = Command::new(program).args(arguments.split_whitespace()).output().expect(program);
    assert!(output.status.success(), "{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// client (10.0.1.1, fd00:1::1) - router (.254, ::fe) - server (10.0.2.1, fd00:2::1), all forwarding.
pub struct Line {
    /// 10.0.1.1 and fd00:1::1.
    pub client: Node,
    /// 10.0.1.254 and 10.0.2.254, fd00:1::fe and fd00:2::fe; interfaces `to-client` and `to-server`.
    pub router: Node,
    /// 10.0.2.1 and fd00:2::1.
    pub server: Node,
}

impl Line {
    /// Builds it.
    #[must_use]
    pub fn new() -> Self {
        let line = Self { client: Node::new(), router: Node::new(), server: Node::new() };
        for (node, name, net) in [(&line.client, "to-client", 1), (&line.server, "to-server", 2)] {
            line.router.ip(&format!("link add {name} type veth peer name eth0 netns {}", node.thread_id));
            for (host, interface, part4, part6) in
                [(&line.router, name, "254", "fe"), (node, "eth0", "1", "1")]
            {
                host.ip(&format!("addr add 10.0.{net}.{part4}/24 dev {interface}"));
                host.ip(&format!("addr add fd00:{net}::{part6}/64 dev {interface} nodad"));
                host.ip(&format!("link set {interface} up"));
            }
            node.ip(&format!("route add default via 10.0.{net}.254"));
            node.ip(&format!("route add default via fd00:{net}::fe"));
        }
        // A cable carries nothing before both ends have seen each other, and an address that cannot be resolved for 3 s is unreachable.
        line.router.carries("to-client");
        line.router.carries("to-server");
        line.client.carries("eth0");
        line.server.carries("eth0");
        line.router.run(|| {
            sysctl::write("net/ipv4/ip_forward", "1").expect("forwarding");
            sysctl::write("net/ipv6/conf/all/forwarding", "1").expect("forwarding");
        });
        line
    }
}

impl Default for Line {
    fn default() -> Self {
        Self::new()
    }
}

/// Says so and returns `false` when not root.
#[must_use]
pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root");
    }
    root
}

/// Sends a word from one end and expects it at the other, both ways.
pub fn talk(client: &mut TcpStream, server: &mut TcpStream) {
    let mut buffer = [0; 4];
    for stream in [&*client, &*server] {
        stream.set_read_timeout(Some(LIMIT)).expect("limit");
    }
    client.write_all(b"ping").expect("send");
    server.read_exact(&mut buffer).expect("receive");
    assert_eq!(&buffer, b"ping");
    server.write_all(b"pong").expect("send");
    client.read_exact(&mut buffer).expect("receive");
    assert_eq!(&buffer, b"pong");
}

/// A listener on a free port of `address`.
pub fn listen(address: &str) -> TcpListener {
    TcpListener::bind(SocketAddr::new(address.parse().expect("address"), 0)).expect("listen")
}

/// Waits until the condition holds; the test fails with `what` if it does not within [`LIMIT`].
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    awaited(what, || holds().then_some(()));
}

/// Waits until `done` gives something; the test fails with `what` if it does not within [`LIMIT`].
pub fn awaited<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + LIMIT;
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < until, "not within {LIMIT:?}: {what}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
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
