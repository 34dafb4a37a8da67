//! Frames of other kinds than the usual: datagrams, fragments, jumbo frames.

use crate::firewall::{Network, Running, SHUNT};
use crate::flows::{Pair, connect};
use sidetrack::shunt::PathKind;
use sidetrack_sys::bpf::Forwarding;
use sidetrack_testkit::{LIMIT, is_root};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};

/// Two sockets that send each other datagrams.
pub(crate) struct Datagrams {
    client: UdpSocket,
    server: UdpSocket,
    pub from: SocketAddr,
}

impl Datagrams {
    /// From the client's host to `port` on the server's.
    pub(crate) fn new(network: &Network, address: &str, port: u16) -> Self {
        let to = SocketAddr::new(address.parse::<IpAddr>().expect("address"), port);
        let server = network.server.run(move || UdpSocket::bind(to).expect("bound"));
        let client = network.client.run(move || {
            let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = UdpSocket::bind(any).expect("bound");
            socket.connect(to).expect("connected");
            socket
        });
        let from = client.local_addr().expect("address");
        server.connect(from).expect("connected");
        for socket in [&client, &server] {
            socket.set_read_timeout(Some(LIMIT)).expect("limit");
        }
        Self { client, server, from }
    }

    /// One of this number of bytes each way.
    pub(crate) fn send(&mut self, length: usize) {
        let data = vec![7; length];
        let mut buffer = vec![0; length + 1];
        for (from, to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            assert_eq!(from.send(&data).expect("sent"), length);
            // A machine that is stopped and goes on interrupts a read with a limit.
            let received = loop {
                match to.recv(&mut buffer) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    other => break other.expect("it arrives"),
                }
            };
            assert_eq!(received, length);
        }
    }

    /// Sends until they are on the fast path.
    pub(crate) fn shunted(&mut self, shunt: &Running) {
        self.send(10);
        self.send(10);
        shunt.wait_for(self.from, |flow| flow.state == "installed");
    }
}

fn fragments(forwarding: Forwarding, path: PathKind) {
    if !is_root() {
        return;
    }
    let network = Network::new(forwarding);
    network.prepare(path);
    let shunt = network.start(path);
    for address in network.server_addresses {
        let mut datagrams = Datagrams::new(&network, address, SHUNT);
        datagrams.shunted(&shunt);
        datagrams.send(1000);
        let before = shunt.wait_for(datagrams.from, |flow| flow.fast.packets_up == 1).fast;
        // Three fragments: none may take the fast path while the others do not.
        datagrams.send(4000);
        datagrams.send(1000);
        let after = shunt.wait_for(datagrams.from, |flow| flow.fast.packets_up > before.packets_up).fast;
        assert_eq!((after.packets_up, after.packets_down), (before.packets_up + 1, before.packets_down + 1));
    }
}

#[test]
fn fragments_take_the_slow_path_of_a_bridge() {
    fragments(Forwarding::Bridged, PathKind::Tc);
}

#[test]
fn fragments_take_the_slow_path_of_a_router() {
    fragments(Forwarding::Routed, PathKind::Tc);
}

#[test]
fn fragments_take_the_slow_path_where_the_driver_runs_it() {
    fragments(Forwarding::Bridged, PathKind::Xdp);
}

#[test]
fn jumbo_frames_take_the_fast_path_where_they_fit_and_the_slow_one_answers_where_not() {
    if !is_root() {
        return;
    }
    let network = Network::new(Forwarding::Routed);
    for (host, name) in [
        (&network.client, "eth0"),
        (&network.firewall, "to-client"),
        (&network.firewall, "to-server"),
        (&network.server, "eth0"),
    ] {
        host.ip(&format!("link set {name} mtu 9000"));
        let name = name.to_owned();
        // Frames as they would be on a wire.
        host.run(move || crate::firewall::tool("ethtool", &format!("-K {name} tso off gso off gro off"), ""));
    }
    let shunt = network.start(PathKind::Tc);
    let mut pair = connect(&network, network.server_addresses[0], SHUNT);
    pair.shunted(&shunt);
    Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
    let flow = shunt.wait_for(pair.from, |flow| flow.fast.bytes_up > 900_000);
    let mean = flow.fast.bytes_up / flow.fast.packets_up;
    assert!(mean > 4000, "{mean} bytes a packet: {flow:?}");
    // The egress shrinks under the flow: what is too large takes the slow path, whose router says so.
    network.firewall.ip("link set to-server mtu 1400");
    Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
}
