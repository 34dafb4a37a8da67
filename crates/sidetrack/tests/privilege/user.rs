//! The user of the data plane.

use crate::node::peers::{Server, visit};
use crate::node::{Up, admin, at};
use rustix::process::Signal;
use sidetrack_testkit::{eventually, in_namespace, is_root};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

/// The user that this machine has in any case.
const NOBODY: u32 = 65_534;

const TOP: &str = "default = \"direct\"\nuser = \"nobody\"\n";

fn status(pid: u32, field: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect(field);
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn tasks(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("tasks").flatten();
    tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
}

fn open_to_all(folder: &Path) {
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).expect("mode");
}

fn socks(port: u16) -> String {
    format!("[[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"127.0.0.1:{port}\"\n")
}

#[test]
fn every_thread_of_the_data_plane_is_an_unprivileged_user() {
    in_namespace(|| {
        let cache = "[[listen]]\nname = \"web\"\nkind = \"http\"\naddress = \"127.0.0.1:3128\"\n\
                     cache = { disk = \"@/cache\", htcp = { address = \"127.0.0.1:4827\" } }\n";
        let up = Up::start(TOP, cache);
        let all = tasks(up.pid());
        assert!(all.len() >= 3, "a worker, the control thread, those of the cache: {all:?}");
        for task in all {
            let four = [NOBODY; 4].map(|id| id.to_string()).join(" ");
            assert_eq!(status(task, "Uid:"), four, "{}", status(task, "Name:"));
            assert_eq!(status(task, "Gid:"), four);
            assert_eq!(status(task, "Groups:"), NOBODY.to_string());
            assert_eq!(status(task, "Seccomp:"), "2", "{}", status(task, "Name:"));
        }
        assert_eq!(std::fs::metadata(up.folder().join("cache/lock")).expect("the cache").uid(), NOBODY);
        assert!(up.stop().0.success());
    });
}

#[test]
fn root_stays_root_only_where_the_configuration_says_so() {
    in_namespace(|| {
        let up = Up::start("default = \"direct\"\nuser = \"root\"\n", "");
        assert_eq!(status(up.pid(), "Uid:"), "0 0 0 0");
        assert!(up.stop().0.success());
        let up = Up::start("default = \"direct\"\n", "");
        assert_ne!(status(up.pid(), "Uid:"), "0 0 0 0");
        assert!(up.stop().0.success());
    });
}

#[test]
fn a_capability_is_kept_only_where_something_needs_it() {
    in_namespace(|| {
        let cases = [
            (0o755, 1080, "cap_net_raw"),
            (0o755, 80, "cap_net_raw cap_net_bind_service"),
            (0o700, 1080, "cap_net_raw cap_dac_read_search"),
        ];
        for (mode, port, expected) in cases {
            let up = Up::start_with(TOP, &socks(port), |folder| {
                std::fs::set_permissions(folder, std::fs::Permissions::from_mode(mode)).expect("mode");
            });
            let held = u64::from_str_radix(&status(up.pid(), "CapPrm:"), 16).expect("hex");
            let names = [(13, "cap_net_raw"), (10, "cap_net_bind_service"), (2, "cap_dac_read_search")];
            let held_names: Vec<_> =
                names.iter().filter(|(bit, _)| held & (1 << bit) != 0).map(|(_, name)| *name).collect();
            assert_eq!(held_names.join(" "), expected, "{held:#x}");
            assert_eq!(held.count_ones() as usize, held_names.len(), "{held:#x}");
            assert!(up.stop().0.success());
        }
    });
}

/// Files that only root may read, read again after root is gone; and a listener that takes the port of another one.
#[test]
fn reloads_go_on_with_files_of_root() {
    in_namespace(|| {
        let rule = "[[rule]]\nname = \"listed\"\nmatch = { host_file = \"hosts\" }\naction = \"deny\"\n";
        let list = |folder: &Path, text: &str| {
            std::fs::write(folder.join("hosts"), text).expect("written");
            std::fs::set_permissions(folder.join("hosts"), std::fs::Permissions::from_mode(0o600))
                .expect("mode");
        };
        let up =
            Up::start_with(TOP, &format!("{}{rule}", socks(1080)), |folder| list(folder, "one.example\n"));
        list(&up.folder(), "two.example\n");
        let again = socks(1080).replace("kind = \"socks\"", "kind = \"http\"");
        up.reload(TOP, &format!("{again}{rule}"));
        let (code, body) = admin::ask(&up, "GET", "/v1/status");
        assert!(code == 200 && body.contains("http"), "{body}");
        assert!(up.stop().0.success());
    });
}

#[test]
fn the_user_does_not_change_by_a_reload() {
    in_namespace(|| {
        let mut up = Up::start(TOP, &socks(1080));
        up.rewrite(&TOP.replace("nobody", "root"), &socks(1080));
        up.signal(Signal::HUP);
        up.log_line("a refusal", |line| line.contains("user is not changed by a reload"));
        assert!(up.stop().0.success());
    });
}

#[test]
fn records_go_on_after_log_rotation() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let tables = format!(
            "[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"127.0.0.1:1080\"\nto = \"{}\"\n",
            server.address
        );
        let mut up = Up::start(&format!("{TOP}#record-to @/records.jsonl\n"), &tables);
        let file = up.folder().join("records.jsonl");
        assert_eq!(std::fs::metadata(&file).expect("made at the start").uid(), NOBODY);
        let flow = || assert!(visit(at("127.0.0.1", 1080), b"hello").2 > 0);
        let lines = |file: &Path| std::fs::read_to_string(file).map_or(0, |text| text.lines().count());
        flow();
        eventually("the first record", || lines(&file) == 1);
        // The folder belongs to root: rotation makes the file, as logrotate does with `create`.
        let moved = up.folder().join("records.jsonl.1");
        std::fs::rename(&file, &moved).expect("moved");
        std::fs::write(&file, "").expect("made");
        chown(&file, Some(NOBODY), Some(NOBODY)).expect("given");
        up.signal(Signal::USR1);
        flow();
        eventually("the second record", || lines(&file) == 1);
        // Rotation that makes no file costs no record.
        std::fs::rename(&file, &moved).expect("moved");
        up.signal(Signal::USR1);
        flow();
        up.log_line("a warning", |line| line.contains("cannot create"));
        eventually("the third record", || lines(&moved) == 2);
        assert!(up.stop().0.success());
    });
}

#[test]
fn what_the_user_may_not_write_is_an_error_at_the_start() {
    in_namespace(|| {
        let mut up =
            Up::spawn_with(&format!("{TOP}#record-to @/folder/records.jsonl\n"), &socks(1080), |folder| {
                open_to_all(folder);
                std::fs::create_dir(folder.join("folder")).expect("a folder");
                std::fs::write(folder.join("folder/records.jsonl"), "").expect("a file");
                // Of another user: it is not given away.
                chown(folder.join("folder/records.jsonl"), Some(1), Some(1)).expect("chown");
            });
        let (status, _) = up.gone();
        assert_eq!(status.code(), Some(1));
        let log = up.logged();
        assert!(log.contains("user 'nobody' may not write") && log.contains("records.jsonl"), "{log}");
    });
}

/// The socket's folder belongs to root.
#[test]
fn the_admin_socket_goes_at_the_end_and_after_a_kill() {
    in_namespace(|| {
        for signal in [Signal::TERM, Signal::KILL] {
            let mut up = Up::start(TOP, &socks(1080));
            let socket = up.folder().join("admin.sock");
            let metadata = std::fs::metadata(&socket).expect("a socket");
            assert_eq!((metadata.uid(), metadata.mode() & 0o777), (0, 0o660));
            up.signal(signal);
            // Until the guards are gone, too.
            up.gone();
            assert!(!socket.exists(), "{signal:?}");
        }
    });
}

#[test]
fn a_user_that_does_not_exist_is_an_error_with_its_place() {
    if !is_root() {
        return;
    }
    let mut up = Up::spawn("default = \"direct\"\nuser = \"no-such-user\"\n", "");
    let (status, _) = up.gone();
    let log = up.logged();
    assert!(status.code() == Some(2) && log.contains("there is no user 'no-such-user'"), "{log}");
}
