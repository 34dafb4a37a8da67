//! What a stranger gets from the port of HTTP/3 whose address is not validated: it may be forged.

use crate::Site;
use crate::client::Client;
use sidetrack::reactor::{block_on, timeout};
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

/// Sends a datagram from a socket of its own. Returns the bytes that come back in this time.
fn answered(to: SocketAddr, datagram: &[u8], wait: Duration) -> usize {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(to).unwrap();
    socket.set_read_timeout(Some(wait)).unwrap();
    socket.send(datagram).unwrap();
    let mut buffer = [0; 65_536];
    std::iter::from_fn(|| socket.recv(&mut buffer).ok()).sum()
}

/// Returns the first datagram with which a client begins a connection: its Initial packet.
fn initial(ca: &str) -> Vec<u8> {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = socket.local_addr().unwrap();
    // The client has no answer, so it ends by the time-out.
    let _ = block_on(async { timeout(Duration::from_millis(200), Client::connect(to, ca)).await.is_ok() });
    let mut buffer = [0; 65_536];
    socket.set_read_timeout(Some(sidetrack_testkit::LIMIT)).unwrap();
    let length = socket.recv(&mut buffer).expect("an Initial packet");
    buffer[..length].to_vec()
}

#[test]
fn a_stranger_gets_three_times_what_it_has_sent_and_less_than_one_datagram_more() {
    let site = Site::start("");
    let (to, short) = (site.address(), Duration::from_millis(100));
    let initial = initial(&site.ca);
    assert!(initial.len() >= 1200, "RFC 9000 Sec. 14.1");
    // Retransmissions count, too: the first comes after about a second.
    let bytes = answered(to, &initial, Duration::from_millis(1500));
    // RFC 9000 Sec. 8.1 allows three times as much. quinn ends when that is reached, and sends the last datagram whole.
    assert!(bytes > 0 && bytes < 3 * initial.len() + 1200, "{bytes} bytes");
    // All else has no answer, or one that is not longer.
    let unknown_version = {
        let mut packet = initial.clone();
        packet[1..5].copy_from_slice(&[0x1a; 4]);
        packet
    };
    let no_connection = [&[0x40][..], &[7; 1199]].concat();
    for (what, packet) in [
        ("a version that is not known", unknown_version.as_slice()),
        ("a packet of no connection", &no_connection),
        ("a short one", &no_connection[..30]),
        ("an Initial packet that is cut", &initial[..1199]),
        ("one byte", &[0xc0]),
        ("nothing", &[]),
    ] {
        let bytes = answered(to, packet, short);
        assert!(bytes <= packet.len(), "{what}: {bytes} bytes for {}", packet.len());
    }
}
