//! UDP with programs of others: dante as a hop, PySocks as a client, dig and socat at a `reverse` listener.

use super::node::Up;
use super::socks::RULES;
use super::{Echo, client, echo};
use rustix::process::{Pid, Signal, kill_process_group};
use sidetrack_testkit::{LIMIT, eventually};
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Whether a program is here. Otherwise the test says that it is skipped.
pub(crate) fn is_here(program: &str, arguments: &[&str]) -> bool {
    let found = Command::new(program).args(arguments).stdin(Stdio::null()).output().is_ok();
    if !found {
        eprintln!("skipped: needs {program}");
    }
    found
}

/// A process that ends with the test, with those that it has started.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // dante passes each client to a process of its own.
        let group = Pid::from_child(&self.0);
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.0.wait();
    }
}

/// dante on a free port of loopback.
fn start_dante(folder: &Path) -> (Running, SocketAddr) {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let config = format!(
        "logoutput: {}\ninternal: 127.0.0.1 port = {}\nexternal: 127.0.0.1\nclientmethod: none\nsocksmethod: none\n\
         user.privileged: root\nuser.unprivileged: root\nclient pass {{ from: 0.0.0.0/0 to: 0.0.0.0/0 }}\n\
         socks pass {{ from: 0.0.0.0/0 to: 0.0.0.0/0 }}\n",
        folder.join("log").display(),
        address.port()
    );
    let path = folder.join("danted.conf");
    std::fs::write(&path, config).unwrap();
    let mut command = Command::new("danted");
    command.args(["-p", "/dev/null", "-f"]).arg(&path);
    let running =
        Running(command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap());
    eventually("dante listens", || TcpStream::connect(address).is_ok());
    (running, address)
}

fn reverse(server: SocketAddr, carrier: &str) -> Up {
    let tables = format!(
        "[[listen]]\nname = \"dns\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n\
         [[rule]]\nname = \"all\"\nmatch = {{ protocol = \"udp\" }}\ncarrier = \"{carrier}\"\nkernel = \"never\"\n"
    );
    Up::start("default = \"deny\"\n", &tables)
}

#[test]
fn dante_relays_our_datagrams() {
    if !is_here("danted", &["-v"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (dante, hop) = start_dante(folder.path());
    let server = Echo::start("127.0.0.1");
    let mut up = reverse(server.address, &format!("socks5://{hop}"));
    let client = client(up.addresses("dns")[0]);
    for payload in [&b"through dante"[..], &[7; 1200]] {
        assert_eq!(echo(&client, payload), payload);
    }
    drop(dante);
    let record = up.record();
    assert_eq!((record.text("rule"), record.text("reason")), ("all", "hop_failed"), "{record:?}");
}

#[test]
fn pysocks_is_served() {
    if !is_here("python3", &["-c", "import socks"]) {
        return;
    }
    let server = Echo::start("127.0.0.1");
    let up = super::socks::up("", RULES);
    let proxy = up.addresses("proxy")[0];
    let script = format!(
        "import socket, socks\ns = socks.socksocket(socket.AF_INET, socket.SOCK_DGRAM)\n\
         s.set_proxy(socks.SOCKS5, '127.0.0.1', {})\ns.settimeout(60)\ns.sendto(b'from python', ('127.0.0.1', {}))\n\
         data, peer = s.recvfrom(100)\nassert data == b'from python' and peer[1] == {}, (data, peer)\n",
        proxy.port(),
        server.address.port(),
        server.address.port()
    );
    let done = Command::new("python3").args(["-c", &script]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    if said.contains("No module named 'socks'") {
        return eprintln!("skipped: needs python3-socks");
    }
    assert!(done.status.success(), "{said}");
}

/// Answers each question for an address with 192.0.2.53 (RFC 1035 Sec. 4).
pub(crate) fn answer_one(server: &UdpSocket) {
    server.set_read_timeout(Some(LIMIT)).unwrap();
    let mut buffer = [0; 1500];
    let (length, from) = server.recv_from(&mut buffer).unwrap();
    let name = buffer[12..length].iter().position(|byte| *byte == 0).unwrap();
    let mut answer = buffer[..12 + name + 5].to_vec();
    answer[2..12].copy_from_slice(&[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
    answer.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 53]);
    server.send_to(&answer, from).unwrap();
}

#[test]
fn dig_asks_through_a_reverse_listener() {
    if !is_here("dig", &["-v"]) {
        return;
    }
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let up = reverse(server.local_addr().unwrap(), "direct");
    let port = up.addresses("dns")[0].port().to_string();
    let mut command = Command::new("dig");
    command.args(["+short", "+tries=1", "+time=60", "@127.0.0.1", "-p", &port, "host.example", "A"]);
    let dig = command.stdout(Stdio::piped()).spawn().unwrap();
    answer_one(&server);
    let said = dig.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "192.0.2.53");
}

#[test]
fn socat_passes_through_a_reverse_listener() {
    if !is_here("socat", &["-V"]) {
        return;
    }
    let server = Echo::start("127.0.0.1");
    let up = reverse(server.address, "direct");
    let to = format!("UDP4:{}", up.addresses("dns")[0]);
    let mut command = Command::new("socat");
    command.args(["-t", "60", "STDIO", &to]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut socat = Running(command.process_group(0).spawn().unwrap());
    socat.0.stdin.take().unwrap().write_all(b"a line").unwrap();
    let mut said = [0; 6];
    let mut out = socat.0.stdout.take().unwrap();
    std::io::Read::read_exact(&mut out, &mut said).unwrap();
    assert_eq!(&said, b"a line");
}
