//! What systemd hears of an orchestrator and of an agent by its notification protocol, and sockets that it passes to them.

use crate::node::send;
use crate::plane::Plane;
use rustix::process::Signal;
use sidetrack_testkit::LIMIT;
use std::net::TcpListener;
use std::os::unix::net::UnixDatagram;

#[test]
fn systemd_hears_of_start_watchdog_and_stop() {
    let mut plane = Plane::start("[[grant]]\n");
    let path = plane.folder.path().join("notify");
    let systemd = UnixDatagram::bind(&path).expect("bound");
    systemd.set_read_timeout(Some(LIMIT)).expect("set");
    let next = || {
        let mut bytes = [0; 4096];
        let count = systemd.recv(&mut bytes).expect("a message within a minute");
        String::from_utf8(bytes[..count].to_vec()).expect("text")
    };
    let path = path.to_str().expect("text").to_owned();
    for part in [&mut plane.orchestrator, &mut plane.hospital] {
        part.kill();
        part.restart_with(&[("NOTIFY_SOCKET", &path), ("WATCHDOG_USEC", "600000")]);
        assert!(next().starts_with("READY=1\n"));
        assert_eq!(next(), "WATCHDOG=1");
        send(part.pid(), Signal::TERM);
        let stopping = std::iter::repeat_with(next).find(|said| said != "WATCHDOG=1");
        assert!(stopping.is_some_and(|said| said.starts_with("STOPPING=1\n")));
        assert!(part.ended().success());
    }
}

#[test]
fn a_socket_of_a_unit_serves() {
    let mut plane = Plane::start("[[grant]]\n");
    for part in [&mut plane.orchestrator, &mut plane.hospital] {
        part.kill();
        let listener = TcpListener::bind(part.listens()).expect("bound");
        // The test has the socket, too: it could not be bound again.
        part.restart_on(listener.try_clone().expect("a copy"));
        drop(listener);
    }
    assert_eq!(plane.applications().map(|all| all.len()), Some(0));
    assert_eq!(plane.held(0).map(|held| held.len()), Some(0));
    plane.hospital.kill();
    let other = TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = other.local_addr().expect("an address");
    plane.hospital.restart_on(other);
    let logged = plane.hospital.logged();
    assert!(logged.contains(&format!("'unknown' of systemd has tcp {address}")), "{logged}");
}
