//! What systemd hears from a node: its notification protocol.

use crate::node::{peers::Server, send};
use crate::reverse;
use rustix::process::Signal;
use sidetrack_testkit::{LIMIT, eventually};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Systemd's end of the socket.
struct Told(UnixDatagram);

impl Told {
    /// The next message other than the watchdog's.
    fn next(&self) -> String {
        loop {
            let text = self.any();
            if text != "WATCHDOG=1" {
                return text;
            }
        }
    }

    fn any(&self) -> String {
        let mut bytes = [0; 4096];
        let count = self.0.recv(&mut bytes).expect("a message within a minute");
        String::from_utf8(bytes[..count].to_vec()).expect("text")
    }
}

fn start(folder: &Path, keys: &str, socket: &str, watchdog: bool) -> Child {
    let config = folder.join("sidetrack.toml");
    std::fs::write(&config, keys).expect("a file");
    let mut up = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    up.args(["up", "-c"]).arg(&config).env("NOTIFY_SOCKET", socket);
    if watchdog {
        up.env("WATCHDOG_USEC", "600000");
    }
    up.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary")
}

#[test]
fn systemd_hears_of_start_reload_watchdog_and_stop() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify");
    let systemd = Told(UnixDatagram::bind(&path).expect("bound"));
    systemd.0.set_read_timeout(Some(LIMIT)).expect("set");
    let server = Server::start("127.0.0.1");
    let admin = folder.path().join("admin.sock");
    let text = format!(
        "version = 1\nworkers = 2\ndefault = \"direct\"\n[admin]\nsocket = \"{}\"\n{}",
        admin.display(),
        reverse("in", "127.0.0.1:0", server.address)
    );
    // It gives up its rights before it serves: the folder of the socket is closed to it then.
    let mut child = start(folder.path(), &text, &path.to_string_lossy(), true);
    assert!(systemd.next().starts_with("READY=1\n"));
    assert_eq!(systemd.any(), "WATCHDOG=1");
    for (text, what) in [(format!("{text}# changed\n"), "accepted"), ("[[listen".to_owned(), "rejected")] {
        std::fs::write(folder.path().join("sidetrack.toml"), text).expect("a file");
        let reloading = systemd.next();
        let time = reloading.lines().find_map(|line| line.strip_prefix("MONOTONIC_USEC="));
        let time: u64 = time.and_then(|time| time.parse().ok()).unwrap_or_else(|| panic!("{reloading}"));
        assert!(reloading.starts_with("RELOADING=1\n") && time > 0, "{what}: {reloading}");
        assert!(systemd.next().starts_with("READY=1\n"), "{what}");
    }
    send(child.id(), Signal::TERM);
    assert!(systemd.next().starts_with("STOPPING=1\n"));
    eventually("the node ends", || child.try_wait().expect("waited").is_some());
}

/// An abstract socket, as the systemd of a container has it.
#[test]
fn the_socket_may_be_an_abstract_one() {
    use std::os::linux::net::SocketAddrExt;
    let folder = tempfile::tempdir().expect("a folder");
    let name = format!("sidetrack-test-{}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).expect("a name");
    let systemd = Told(UnixDatagram::bind_addr(&address).expect("bound"));
    systemd.0.set_read_timeout(Some(LIMIT)).expect("set");
    let text = "version = 1\ndefault = \"deny\"\n[admin]\nsocket = \"none\"\n[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n";
    let mut child = start(folder.path(), text, &format!("@{name}"), false);
    assert!(systemd.any().starts_with("READY=1\n"));
    send(child.id(), Signal::TERM);
    assert!(systemd.any().starts_with("STOPPING=1\n"));
    eventually("the node ends", || child.try_wait().expect("waited").is_some());
}
