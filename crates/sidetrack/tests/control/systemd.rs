//! What systemd hears of an orchestrator and of an agent: its notification protocol.

use crate::node::send;
use crate::plane::Plane;
use rustix::process::Signal;
use sidetrack_testkit::LIMIT;
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
