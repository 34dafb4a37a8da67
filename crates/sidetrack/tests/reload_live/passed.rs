//! Sockets that come from systemd: those of a socket unit, and those that it keeps while a process has crashed.

use crate::node::peers::{Client, Server, visit};
use crate::{free, reverse, rule};
use rustix::process::Signal;
use sidetrack_sys::scm;
use sidetrack_testkit::{LIMIT, awaited, eventually, in_namespace};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

/// Sockets with their names.
type Named = Vec<(String, OwnedFd)>;

/// What a service manager does for a node: it hears messages, keeps sockets, and passes them to the next process.
struct Systemd {
    folder: tempfile::TempDir,
    heard: Arc<Mutex<Vec<String>>>,
    kept: Arc<Mutex<Named>>,
}

impl Systemd {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = UnixDatagram::bind(folder.path().join("notify")).expect("bound");
        let systemd = Self { folder, heard: Arc::default(), kept: Arc::default() };
        let (heard, kept) = (systemd.heard.clone(), systemd.kept.clone());
        // It ends with the test's process.
        std::thread::spawn(move || {
            while let Ok(Some(message)) = scm::receive(&socket) {
                let text = String::from_utf8(message.bytes).expect("text");
                let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).map(str::to_owned);
                let mut kept = kept.lock().expect("kept");
                match (text.lines().next(), name) {
                    (Some("FDSTORE=1"), Some(name)) => {
                        kept.extend(message.fds.into_iter().map(|fd| (name.clone(), fd)));
                    }
                    (Some("FDSTOREREMOVE=1"), Some(name)) => kept.retain(|(known, _)| *known != name),
                    // The descriptors of a barrier are closed by now.
                    _ => {}
                }
                heard.lock().expect("heard").push(text);
            }
        });
        systemd
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, top: &str, tables: &str) {
        let admin = format!("[admin]\nsocket = \"{}\"\n", self.path("admin.sock").display());
        let text = format!("version = 1\ndefault = \"deny\"\n{top}{admin}{tables}");
        std::fs::write(self.path("sidetrack.toml"), text).expect("a file");
    }

    /// Starts a process, with at most two sockets.
    fn start(&self, passed: &[(String, OwnedFd)]) -> Child {
        self.spawn(passed, passed.len(), Stdio::from(File::create(self.path("log")).expect("a file")))
    }

    fn spawn(&self, passed: &[(String, OwnedFd)], promised: usize, log: Stdio) -> Child {
        let copies = passed.iter().map(|(_, fd)| Stdio::from(fd.try_clone().expect("a copy")));
        let mut copies = copies.chain([Stdio::null(), Stdio::null()]);
        let names: Vec<_> = passed.iter().map(|(name, _)| &**name).collect();
        // The shell gives them the numbers that the protocol says, and has the process's number.
        let moves = ["", "3<&0", "3<&0 4<&1"][passed.len()];
        let script = format!("exec {moves} </dev/null >/dev/null; LISTEN_PID=$$ exec \"$0\" \"$@\"");
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &script, env!("CARGO_BIN_EXE_sidetrack"), "up", "-c"])
            .arg(self.path("sidetrack.toml"));
        shell.env("NOTIFY_SOCKET", self.path("notify"));
        shell.env("LISTEN_FDS", promised.to_string()).env("LISTEN_FDNAMES", names.join(":"));
        shell.stdin(copies.next().expect("one")).stdout(copies.next().expect("two")).stderr(log);
        shell.spawn().expect("a shell")
    }

    /// Waits until a start or a reload is done for this number of times.
    fn ready(&self, times: usize) {
        eventually("a start or a reload is done", || {
            let heard = self.heard.lock().expect("heard");
            heard.iter().filter(|text| text.starts_with("READY=1")).count() == times
        });
    }

    /// Waits until as many sockets are kept.
    fn keeps(&self, count: usize) {
        eventually("the sockets are kept", || self.kept.lock().expect("kept").len() == count);
    }

    /// The kept sockets.
    fn store(&self) -> Named {
        let kept = self.kept.lock().expect("kept");
        kept.iter().map(|(name, fd)| (name.clone(), fd.try_clone().expect("a copy"))).collect()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).expect("the log")
    }
}

fn kill(child: &mut Child) {
    child.kill().expect("killed");
    child.wait().expect("waited");
}

fn stop(child: &mut Child) {
    crate::node::send(child.id(), Signal::TERM);
    eventually("the node ends", || child.try_wait().expect("waited").is_some());
}

/// The socket of a unit.
fn unit(socket: &impl AsFd) -> Named {
    vec![("sidetrack.socket".to_owned(), socket.as_fd().try_clone_to_owned().expect("a copy"))]
}

#[test]
fn a_socket_of_a_unit_serves_before_and_after_a_process() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let to = listener.local_addr().expect("an address");
        let systemd = Systemd::new();
        let text = reverse("in", &to.to_string(), server.address) + &rule("all");
        systemd.write("workers = 2\n", &text);
        // It waits in the socket until there is a process.
        let early = std::net::TcpStream::connect(to).expect("connected");
        let mut child = systemd.start(&unit(&listener));
        Client::over(early).expect("greeted").echo(b"word").expect("an echo");
        systemd.ready(1);
        for _ in 0..8 {
            visit(to, b"word");
        }
        // A reload without the listener, and one with it again: the socket is still there.
        systemd.write("workers = 2\n", &rule("all"));
        systemd.ready(2);
        systemd.write("workers = 2\n", &text);
        systemd.ready(3);
        visit(to, b"word");
        // Killed. A connection waits, and the next process answers.
        kill(&mut child);
        let meanwhile = std::net::TcpStream::connect(to).expect("connected");
        let mut child = systemd.start(&unit(&listener));
        Client::over(meanwhile).expect("greeted").echo(b"word").expect("an echo");
        assert!(systemd.kept.lock().expect("kept").is_empty(), "the unit has its socket anyway");
        stop(&mut child);
    });
}

#[test]
fn a_crash_refuses_no_connection() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let (to, systemd) = (free(), Systemd::new());
        let text = |server: SocketAddr| reverse("in", &to, server) + &rule("all");
        systemd.write("workers = 2\n", &text(server.address));
        let mut child = systemd.start(&[]);
        systemd.keeps(2);
        let address: SocketAddr = to.parse().expect("an address");
        for round in 0..3 {
            systemd.ready(round + 1);
            kill(&mut child);
            // Both sockets of the port get some of them.
            let meanwhile: Vec<_> =
                (0..16).map(|_| std::net::TcpStream::connect(address).expect("connected")).collect();
            child = systemd.start(&systemd.store());
            for stream in meanwhile {
                Client::over(stream).expect("greeted").echo(b"word").expect("an echo");
            }
        }
        systemd.ready(4);
        // A reload that binds the address again: no connection gets to the sockets from before.
        let other = Server::start("127.0.0.1");
        systemd.write("workers = 2\n", &text(other.address));
        systemd.ready(5);
        drop(server);
        systemd.keeps(2);
        for _ in 0..32 {
            visit(address, b"word");
        }
        // Another address in the file than before the crash.
        kill(&mut child);
        let next = free();
        systemd.write("workers = 2\n", &(reverse("in", &next, other.address) + &rule("all")));
        child = systemd.start(&systemd.store());
        visit_when_up(next.parse().expect("an address"));
        assert!(std::net::TcpStream::connect(address).is_err(), "no process listens there any more");
        systemd.keeps(2);
        // In an orderly end it closes them.
        stop(&mut child);
        systemd.keeps(0);
    });
}

/// Waits until something listens there.
fn visit_when_up(to: SocketAddr) {
    let stream = awaited("a listener", || std::net::TcpStream::connect(to).ok());
    Client::over(stream).expect("greeted").echo(b"word").expect("an echo");
}

#[test]
fn datagrams_wait_for_the_next_process() {
    in_namespace(|| {
        let server = UdpSocket::bind("127.0.0.1:0").expect("bound");
        let to = free();
        let systemd = Systemd::new();
        let server_at = server.local_addr().expect("an address");
        let listen = reverse("in", &to, server_at) + "protocol = \"udp\"\n" + &rule("all");
        systemd.write("workers = 1\n", &listen);
        let mut child = systemd.start(&[]);
        systemd.keeps(1);
        kill(&mut child);
        let client = UdpSocket::bind("127.0.0.1:0").expect("bound");
        client.send_to(b"word", &to).expect("sent");
        let mut child = systemd.start(&systemd.store());
        server.set_read_timeout(Some(LIMIT)).expect("set");
        let mut bytes = [0; 16];
        let (count, _) = server.recv_from(&mut bytes).expect("a datagram");
        assert_eq!(&bytes[..count], b"word");
        stop(&mut child);
    });
}

/// A socket unit may have UDP sockets, too.
#[test]
fn a_datagram_socket_of_a_unit_serves() {
    in_namespace(|| {
        let bound = || UdpSocket::bind("127.0.0.1:0").expect("bound");
        let (server, listener, client) = (bound(), bound(), bound());
        let address = |socket: &UdpSocket| socket.local_addr().expect("an address");
        server.set_read_timeout(Some(LIMIT)).expect("set");
        let systemd = Systemd::new();
        let listen = reverse("in", &address(&listener).to_string(), address(&server));
        systemd.write("workers = 1\n", &(listen + "protocol = \"udp\"\n" + &rule("all")));
        let received = || {
            let mut bytes = [0; 16];
            let (count, _) = server.recv_from(&mut bytes).expect("a datagram");
            bytes[..count].to_vec()
        };
        client.send_to(b"early", address(&listener)).expect("sent");
        let mut child = systemd.start(&unit(&listener));
        assert_eq!(received(), b"early");
        client.send_to(b"late", address(&listener)).expect("sent");
        assert_eq!(received(), b"late");
        stop(&mut child);
    });
}

#[test]
fn what_does_not_fit_is_said() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let systemd = Systemd::new();
        systemd.write("", &(reverse("in", &free(), server.address) + &rule("all")));
        // More than there are.
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let output = systemd.spawn(&unit(&listener), 2, Stdio::piped()).wait_with_output().expect("waited");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && said.contains("LISTEN_FDS=2, and descriptor 4 is not open"),
            "{said}"
        );
        // An address without a listener, and something else than a socket.
        let mut passed = unit(&listener);
        passed.push(("pipe".to_owned(), std::io::pipe().expect("a pipe").0.into()));
        let mut child = systemd.start(&passed);
        systemd.ready(1);
        let log = systemd.log();
        let address = listener.local_addr().expect("an address");
        assert!(log.contains(&format!("'sidetrack.socket' of systemd has tcp {address}")), "{log}");
        assert!(log.contains("'pipe' is not used"), "{log}");
        stop(&mut child);
    });
}

/// The address of the metrics page may be one of a socket unit, too.
#[test]
fn the_metrics_have_a_socket_of_a_unit() {
    in_namespace(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let to = listener.local_addr().expect("an address");
        let systemd = Systemd::new();
        let text = format!(
            "version = 1\ndefault = \"deny\"\n[admin]\nsocket = \"none\"\nmetrics = \"{to}\"\n[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n"
        );
        std::fs::write(systemd.path("sidetrack.toml"), text).expect("a file");
        let mut child = systemd.start(&unit(&listener));
        systemd.ready(1);
        let mut stream = std::net::TcpStream::connect(to).expect("connected");
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n").expect("sent");
        let mut page = String::new();
        stream.read_to_string(&mut page).expect("an answer");
        assert!(page.starts_with("HTTP/1.1 200") && page.contains("sidetrack_"), "{page}");
        stop(&mut child);
    });
}
