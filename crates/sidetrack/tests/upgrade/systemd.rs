//! What systemd hears: the old process names the new one as the main process, and only then the new one speaks.

use crate::node::peers::Server;
use crate::node::upgrading::{SIDETRACK, Started, Upgrade};
use rustix::process::Signal;
use sidetrack_testkit::{LIMIT, eventually};
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};

#[test]
fn the_new_process_becomes_the_main_one_of_its_unit() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify");
    let systemd = UnixDatagram::bind(&path).expect("bound");
    systemd.set_read_timeout(Some(LIMIT)).expect("set");
    let next = || {
        let mut bytes = [0; 4096];
        let count = systemd.recv(&mut bytes).expect("a message within a minute");
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    };
    let server = Server::start("127.0.0.1");
    let config = folder.path().join("sidetrack.toml");
    let admin = folder.path().join("admin.sock");
    let text = format!(
        "version = 1\ndefault = \"direct\"\n[admin]\nsocket = \"{}\"\n[[listen]]\nkind = \"reverse\"\n\
         address = \"127.0.0.1:0\"\nto = \"{}\"\n",
        admin.display(),
        server.address
    );
    std::fs::write(&config, text).expect("a file");
    let mut up = Command::new(SIDETRACK);
    up.args(["up", "-c"]).arg(&config).env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "3000000");
    let mut child = up.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary");
    assert!(next().starts_with("READY=1\n"));
    let mut upgrade = Upgrade::start(folder.path(), &[]);
    let new: Started = upgrade.started();
    let other = |text: &String| text != "WATCHDOG=1";
    let said: Vec<_> = std::iter::from_fn(|| Some(next())).filter(other).take(2).collect();
    assert!(said[0].starts_with(&format!("MAINPID={}\n", new.0)), "{said:?}");
    assert!(said[1].starts_with("READY=1\n"), "{said:?}");
    assert!(upgrade.ended().0);
    eventually("the old process ends", || child.try_wait().expect("waited").is_some_and(|end| end.success()));
    assert_eq!(next(), "WATCHDOG=1", "the watchdog hears of the new process");
    crate::node::send(new.0, Signal::TERM);
    let said: Vec<_> = std::iter::from_fn(|| Some(next())).filter(other).take(1).collect();
    assert!(said[0].starts_with("STOPPING=1\n"), "{said:?}");
    crate::ends(&new);
}
