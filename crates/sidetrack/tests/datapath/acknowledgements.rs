//! Peers that speak in pieces and hold one back until the one before is acknowledged (RFC 896): we save packets by
//! acknowledging late, but never where the sender waits for it.

use crate::node::Node;
use crate::peers::{Server, connect, expect};
use sidetrack_testkit::in_namespace;
use std::io::{Read, Write};

/// Connections; each used to wait for a timer of 40 ms three times.
const ROUNDS: u64 = 20;

/// How many acknowledgements have waited for their timer in this namespace.
fn delayed() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/netstat").expect("counters");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt:"));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let mut counters = names.split_whitespace().zip(values.split_whitespace());
    let (_, value) = counters.find(|(name, _)| *name == "DelayedACKs").expect("a counter of the kernel");
    value.parse().expect("a number")
}

#[test]
fn who_speaks_in_pieces_waits_for_no_timer() {
    in_namespace(|| {
        let server = Server::start(|mut stream| {
            // The second piece leaves when the first is acknowledged.
            stream.set_nodelay(false).unwrap();
            let _ = stream.read_exact(&mut [0]);
            let _ = stream.write_all(&[1; 200]).and_then(|()| stream.write_all(&[2; 200]));
            let _ = stream.read(&mut [0]);
        });
        let node = Node::start(
            "default = 'direct'\n[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n",
        );
        let before = delayed();
        for _ in 0..ROUNDS {
            let mut client = connect(node.entry());
            client.set_nodelay(false).unwrap();
            for piece in [&[5][..], &[1, 0]] {
                client.write_all(piece).unwrap();
            }
            expect(&mut client, &[5, 0]);
            let port = server.address.port().to_be_bytes();
            for piece in [&[5, 1, 0, 1][..], &[127, 0, 0, 1, port[0], port[1]]] {
                client.write_all(piece).unwrap();
            }
            client.read_exact(&mut [0; 10]).unwrap();
            client.write_all(b"?").unwrap();
            client.read_exact(&mut [0; 400]).unwrap();
        }
        let waited = delayed() - before;
        // A pause of the machine may let a timer run out here and there.
        assert!(waited < ROUNDS, "{waited} acknowledgements waited for their timer in {ROUNDS} connections");
    });
}
