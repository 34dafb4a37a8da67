//! Numbered datagrams from an application on node a to one on node b, as whole packets of the overlay.

use crate::node::{Up, at};
use crate::scene::Keys;
use serde_json::Value;
use sidetrack_testkit::{LIMIT, Node};
use std::net::{SocketAddr, UdpSocket};
use std::sync::mpsc;
use std::time::Duration;

/// Joins two nodes by a cable; the addresses are `net`.1 and `net`.2.
pub(crate) fn link(one: &Node, other: &Node, net: &str, names: [&str; 2]) {
    let (near, far) = (names[0], names[1]);
    one.ip(&format!("link add {near} type veth peer name {far} netns {}", other.thread_id()));
    for (node, name, part) in [(one, near, 1), (other, far, 2)] {
        node.ip(&format!("addr add {net}.{part}/24 dev {name}"));
        node.ip(&format!("link set {name} up"));
    }
    one.carries(near);
    other.carries(far);
}

/// Starts an end: an application's address 10.`own`.0.1 on it, and packets to 10.`far`.0.0/24 to the node `other`.
pub(crate) fn end(
    node: &Node,
    (keys, name, other): (&Keys, &str, &str),
    (own, far): (u8, u8),
    dials: &[(&str, SocketAddr)],
    service: &str,
) -> Up {
    behind(node, (own, far));
    let text = keys.section(name, dials, false)
        + &format!(
            "[[overlay.packets]]\nnode = \"{other}\"\nto = \"10.{far}.0.0/24\"\n{service}\
             [[overlay.deliver]]\nto = \"10.{own}.0.0/24\"\n"
        );
    node.run(move || Up::start("", &text))
}

/// Gives a node the address 10.`own`.0.1 of an application, and packets to 10.`far`.0.0/24 that are caught or arrive nowhere.
pub(crate) fn behind(node: &Node, (own, far): (u8, u8)) {
    node.ip("link set lo up");
    node.ip(&format!("addr add 10.{own}.0.1/32 dev lo"));
    // What is not caught arrives nowhere.
    node.ip("link add nowhere type veth peer name nothing");
    node.ip("link set nowhere up");
    node.ip(&format!("route add 10.{far}.0.0/24 dev nowhere src 10.{own}.0.1"));
}

/// The path to b in a's status.
pub(crate) fn to_b(status: &Value) -> &Value {
    let paths = status["paths"].as_array().expect("paths");
    paths.iter().find(|path| path["to"] == "b").expect("a member")
}

/// True if packets to b arrive over this number of links.
pub(crate) fn arrives(status: &Value, links: usize) -> bool {
    let service = &to_b(status)["services"][0];
    service["arrives"] == true && service["links"].as_array().is_some_and(|all| all.len() == links)
}

/// Opens the sockets of the two applications: that of the sender on a, and that of the receiver on b.
pub(crate) fn sockets(a: &Node, b: &Node) -> [UdpSocket; 2] {
    let receiver = b.run(|| UdpSocket::bind(at("10.2.0.1", 0)).expect("a socket"));
    let sender = a.run(|| UdpSocket::bind(at("10.1.0.1", 0)).expect("a socket"));
    [sender, receiver]
}

/// Sends this number of datagrams from a to b; `fault` happens after a third of them. Returns how often each one came.
pub(crate) fn stream(
    [sender, receiver]: [UdpSocket; 2],
    (count, pace): (u32, Duration),
    fault: impl FnOnce(),
) -> Vec<u32> {
    let to = receiver.local_addr().expect("an address");
    receiver.set_read_timeout(Some(Duration::from_millis(100))).expect("a time-out");
    let (third, is_third) = mpsc::channel();
    let (ended, has_ended) = mpsc::channel();
    let sending = std::thread::spawn(move || {
        for number in 0..count {
            sender.send_to(&number.to_be_bytes(), to).expect("sent");
            std::thread::park_timeout(pace);
            if number == count / 3 {
                third.send(()).expect("the test waits");
            }
        }
        ended.send(()).expect("the test waits");
        sender
    });
    let receiving = std::thread::spawn(move || {
        let mut times = vec![0; count as usize];
        let mut buffer = [0; 64];
        // All were sent, and then nothing came for a second.
        let (mut is_over, mut silent) = (false, 0);
        while silent < 10 {
            match receiver.recv(&mut buffer) {
                Ok(4) => {
                    let number = u32::from_be_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]);
                    times[number as usize] += 1;
                    silent = 0;
                }
                Ok(length) => panic!("{length} bytes"),
                Err(_) => silent += u32::from(is_over),
            }
            is_over |= has_ended.try_recv().is_ok();
        }
        times
    });
    is_third.recv_timeout(LIMIT).expect("a third is sent");
    fault();
    sending.join().expect("no panic");
    receiving.join().expect("no panic")
}
