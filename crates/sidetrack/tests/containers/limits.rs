//! Limits of running containers: raised by a reload, the containers and their flows go on.

use crate::engine::engine;
use crate::node::Up;
use crate::passing::children;
use crate::scene::{Echo, ask, connect, own, tables, up};
use sidetrack_testkit::{eventually, in_namespace};
use std::fs;

const LED: &str = "chain = ['f']\non_function_down = 'deny'\n";

/// The limits of a container's control group: memory in bytes, and the most processes. With version 1 of control groups each
/// kind has a folder of its own, with version 2 all are in one.
fn limits(container: &str) -> (String, String) {
    let inspected = engine().podman(&["inspect", "--format", "{{.State.Pid}}", container]);
    let pid = String::from_utf8_lossy(&inspected.stdout).trim().to_owned();
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let read = |kind: &str, old: &str, new: &str| {
        let of = |wanted: &str| {
            groups.lines().find_map(|line| {
                let (_, line) = line.split_once(':')?;
                let (kinds, path) = line.split_once(':')?;
                kinds.split(',').any(|kind| kind == wanted).then(|| path.to_owned())
            })
        };
        let file = match of(kind) {
            Some(path) => format!("/sys/fs/cgroup/{kind}{path}/{old}"),
            None => format!("/sys/fs/cgroup{}/{new}", of("").unwrap_or_default()),
        };
        fs::read_to_string(file).unwrap_or_default().trim().to_owned()
    };
    (read("memory", "memory.limit_in_bytes", "memory.max"), read("pids", "pids.max", "pids.max"))
}

#[test]
fn limits_are_raised_while_flows_pass_and_lower_ones_take_a_new_container() {
    in_namespace(|| {
        let server = Echo::start();
        let keys =
            |memory_bytes: u64, pids: u32| own("f", &format!("memory_bytes = {memory_bytes}\npids = {pids}"));
        let node = up(server.address, LED, &keys(100 << 20, 64));
        let names = |node: &Up| engine().containers(&format!("-{}-", children(node)));
        let first = names(&node);
        let [name] = &first[..] else { panic!("one container: {first:?}") };
        let of = |memory_bytes: u64, pids: u32| (memory_bytes.to_string(), pids.to_string());
        assert_eq!(limits(name), of(100 << 20, 64));
        let mut stream = connect(&node);
        assert_eq!(ask(&mut stream, "before\n").expect("an answer"), "before\n");
        let reload = |text: &str| node.reload("default = 'deny'\n", &tables(server.address, LED, text));
        reload(&keys(200 << 20, 128));
        eventually("the limits are raised", || limits(name) == of(200 << 20, 128));
        assert_eq!(names(&node), first, "the same container");
        assert_eq!(ask(&mut stream, "after\n").expect("an answer"), "after\n");
        reload(&keys(150 << 20, 128));
        let mut next = connect(&node);
        assert_eq!(ask(&mut next, "next\n").expect("an answer"), "next\n");
        assert_eq!(limits(name), of(200 << 20, 128), "the flow's container stays as it is");
        drop(stream);
        eventually("it leaves with its flow", || !names(&node).contains(name));
        let second = names(&node);
        let [name] = &second[..] else { panic!("one container: {second:?}") };
        assert_eq!(limits(name), of(150 << 20, 128));
    });
}
