//! Nothing is left behind, however we end; and chains change under live flows.

use crate::engine::{Engine, engine};
use crate::node::{Up, admin, send};
use crate::passing::children;
use crate::scene::{Echo, ask, connect, exchange, own, tables, up};
use rustix::process::Signal;
use sidetrack_testkit::{eventually, in_namespace};
use std::io::Write;
use std::net::SocketAddr;
use std::process::Command;

const LED: &str = "chain = ['f']\non_function_down = 'deny'\n";

/// Containers of this node's process.
fn of(process: u32) -> Vec<String> {
    engine().containers(&format!("-{process}-"))
}

#[test]
fn containers_are_gone_when_we_stop() {
    in_namespace(|| {
        let server = Echo::start();
        let up = up(server.address, LED, &own("f", "instances = 2"));
        let process = children(&up);
        assert_eq!(of(process).len(), 2);
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
        let line = |field: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a line");
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_ne!(line("Uid:"), "0 0 0 0");
        // CAP_DAC_OVERRIDE (1), CAP_NET_ADMIN (12), CAP_SYS_PTRACE (19), CAP_SYS_ADMIN (21).
        let keeps = format!("{:016x}", 1_u64 << 1 | 1 << 12 | 1 << 19 | 1 << 21);
        assert_eq!([line("CapEff:"), line("CapBnd:")], [keeps.clone(), keeps]);
        assert_eq!([line("NoNewPrivs:"), line("Seccomp:")], ["1", "2"]);
        let mut stream = connect(&up);
        assert_eq!(ask(&mut stream, "hello\n").expect("an answer"), "hello\n");
        assert!(up.stop().0.success());
        assert!(of(process).is_empty(), "when the log has ended, all processes have");
    });
}

/// What the kernel says about a container's first process, line by line: the value behind `key`.
fn standing(container: &str) -> impl Fn(&str) -> String {
    let inspected = engine().podman(&["inspect", "--format", "{{.State.Pid}}", container]);
    let pid: u32 = String::from_utf8_lossy(&inspected.stdout).trim().parse().expect("a process");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    move |key| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        line.expect("a line").split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

#[test]
fn a_container_is_an_unprivileged_user_unless_another_is_named() {
    in_namespace(|| {
        let server = Echo::start();
        let none = "0000000000000000";
        for (keys, id) in [("", "65534"), ("user = '1234:1234'", "1234"), ("user = 'root'", "0")] {
            let up = up(server.address, LED, &own("f", keys));
            let [name] = &of(children(&up))[..] else { panic!("one container") };
            let standing = standing(name);
            for key in ["Uid", "Gid"] {
                assert_eq!(standing(key), [id; 4].join(" "), "{keys}: {key}");
            }
            for key in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
                assert_eq!(standing(key), none, "{keys}: {key}");
            }
            assert_eq!(standing("NoNewPrivs"), "1", "{keys}");
            let mut stream = connect(&up);
            assert_eq!(ask(&mut stream, "hello\n").expect("an answer"), "hello\n", "flows get through it");
        }
    });
}

#[test]
fn containers_are_gone_when_we_are_killed() {
    in_namespace(|| {
        let server = Echo::start();
        let mut up = up(server.address, LED, &own("f", ""));
        let process = children(&up);
        assert_eq!(of(process).len(), 1);
        up.signal(Signal::KILL);
        up.gone();
        assert!(of(process).is_empty());
    });
}

/// Both processes at once: who could remove the container is gone. The next start does it, or `cleanup`.
#[test]
fn what_nobody_could_remove_the_next_start_removes_or_cleanup() {
    in_namespace(|| {
        let server = Echo::start();
        let alone = Engine::alone();
        let of = |process: u32| alone.containers(&format!("-{process}-"));
        let text = tables(server.address, LED, &own("f", ""));
        let text =
            text.replace(&engine().socket().display().to_string(), &alone.socket().display().to_string());
        let orphaned = || {
            let mut up = Up::start(TOP, &text);
            let process = children(&up);
            for pid in [process, up.pid()] {
                send(pid, Signal::KILL);
            }
            up.gone();
            let names = of(process);
            assert_eq!(names.len(), 1, "it runs on, and nothing leads to it");
            (process, names)
        };
        let (process, names) = orphaned();
        let mut next = Up::start(TOP, &text);
        assert!(of(process).is_empty());
        assert!(
            next.logged().contains(&format!("container {}, which a crash had left, is removed", names[0]))
        );
        assert_eq!(exchange(connect(&next), b"x").expect("a flow"), b"xbye\n");
        assert_eq!(next.record().text("reason"), "ok");

        let (process, names) = orphaned();
        let cleanup = |more: &[&str]| {
            let mut cleanup = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
            cleanup.arg("cleanup").arg("--engine").arg(alone.socket()).args(more);
            let output = cleanup.output().expect("the binary");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        assert!(cleanup(&["--dry-run"]).contains(&names[0]));
        assert_eq!(of(process).len(), 1, "only said");
        assert!(cleanup(&[]).contains(&names[0]));
        assert!(of(process).is_empty());
        assert_eq!(of(children(&next)).len(), 1, "the container of one that runs is left alone");
        assert!(next.stop().0.success());
    });
}

fn tables_of(server: SocketAddr, chain: &str, functions: &str) -> String {
    tables(server, &format!("chain = {chain}\non_function_down = 'deny'\n"), functions)
}

const TOP: &str = "default = 'deny'\n";

/// Live flows keep the container they pass as long as they go on; new flows take the new chain at once.
#[test]
fn a_chain_changes_under_live_flows_and_none_is_cut() {
    in_namespace(|| {
        let server = Echo::start();
        let old = own("old", "pids = 512");
        let up = Up::start(TOP, &tables_of(server.address, "['old']", &old));
        let process = children(&up);
        let mut live: Vec<_> = (0..50).map(|_| connect(&up)).collect();
        for stream in &mut live {
            assert_eq!(ask(stream, "before\n").expect("an answer"), "before\n");
        }
        let swap = "[function.swap]\nkind = 'replace'\nreplace = [{ find = 'word', with = 'WORD' }]\n";
        let new = format!("{}{swap}", own("new", ""));
        up.reload(TOP, &tables_of(server.address, "['new', 'swap']", &new));
        assert_eq!(ask(&mut connect(&up), "word\n").expect("an answer"), "WORD\n", "at once");
        for stream in &mut live {
            assert_eq!(ask(stream, "word\n").expect("not cut"), "word\n");
        }
        assert_eq!(
            engine().containers(&format!("sidetrack-old-{process}")).len(),
            1,
            "as long as a flow passes it"
        );
        drop(live);
        eventually("the old container is gone", || {
            engine().containers(&format!("sidetrack-old-{process}")).is_empty()
        });
        assert_eq!(engine().containers(&format!("sidetrack-new-{process}")).len(), 1);
        assert!(up.stop().0.success());
    });
}

/// A configuration whose containers do not get well is not taken, and leaves nothing.
#[test]
fn a_reload_with_a_container_that_never_gets_well_changes_nothing() {
    in_namespace(|| {
        let server = Echo::start();
        let good = tables_of(server.address, "['f']", &own("f", ""));
        let mut up = Up::start(TOP, &good);
        let process = children(&up);
        let bad = own("g", "environment = { HOW = 'exit' }");
        up.rewrite(TOP, &tables_of(server.address, "['g']", &bad));
        let (status, answer) = admin::ask(&up, "POST", "/v1/reload");
        assert!(
            status >= 400 && answer.contains("function 'g'") && answer.contains("code 3"),
            "{status} {answer}"
        );
        assert_eq!(exchange(connect(&up), b"x").expect("the old chain"), b"xbye\n");
        let record = up.record();
        assert_eq!(record.0["chain"][0], "f", "{record:?}");
        eventually("nothing of it is left", || {
            engine().containers(&format!("sidetrack-g-{process}")).is_empty()
        });
        up.reload(TOP, &good);
        assert_eq!(of(process).len(), 1, "the same container as before");
        assert!(up.stop().0.success());
    });
}

/// A node that had no function in a container cannot get one by a reload unless it was told to be ready for it.
#[test]
fn the_first_container_by_a_reload_needs_an_engine_from_the_beginning() {
    in_namespace(|| {
        let server = Echo::start();
        let bare = |engine: &str| {
            format!(
                "{engine}[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '{}'\n\
                 [[rule]]\nname = 'led'\ncarrier = 'direct'\n",
                server.address
            )
        };
        let with = tables_of(server.address, "['f']", &own("f", ""));
        let up = Up::start(TOP, &bare(""));
        up.rewrite(TOP, &with);
        let (status, answer) = admin::ask(&up, "POST", "/v1/reload");
        assert!(status >= 400 && answer.contains("nothing here starts containers yet"), "{status} {answer}");
        assert!(up.stop().0.success());
        let engine = format!("[containers]\nengine = '{}'\n", engine().socket().display());
        let up = Up::start(TOP, &bare(&engine));
        let mut before = connect(&up);
        assert_eq!(ask(&mut before, "word\n").expect("an answer"), "word\n");
        up.reload(TOP, &with);
        assert_eq!(ask(&mut connect(&up), "!upper word\n").expect("an answer"), "!UPPER WORD\n");
        before.write_all(b"x").expect("not cut");
        assert!(up.stop().0.success());
    });
}
