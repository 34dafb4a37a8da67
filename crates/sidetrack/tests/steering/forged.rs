//! Datagrams with a forged sender, and fragments without an end, at a port for a server: what leaves towards the address that
//! they name.

use crate::node::Up;
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, Line, is_root};
use std::net::{SocketAddr, UdpSocket};
use std::process::Command;

/// Sends packets of IPv4 with any sender. Arguments: sender's address and port, then port, payload and flag of fragments for each.
const FORGE: &str = "
import socket, struct, sys
source, sport = sys.argv[1], int(sys.argv[2])
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
def send(port, payload, more):
    # The first of several fragments has a multiple of eight bytes. A checksum of 0 says that there is none.
    udp = struct.pack('>HHHH', sport, port, 8 + len(payload) + (8 if more else 0), 0) + payload
    ip = struct.pack('>BBHHHBBH4s4s', 0x45, 0, 20 + len(udp), 7 if more else 0, 0x2000 if more else 0, 64, 17, 0,
                     socket.inet_aton(source), socket.inet_aton('10.0.1.254'))
    raw.sendto(ip + udp, ('10.0.1.254', 0))
for port, payload, more in zip(*[iter(sys.argv[3:])] * 3):
    send(int(port), payload.encode(), more == 'more')
";

#[test]
fn a_forged_sender_gets_what_the_server_answers_and_nothing_of_ours() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let server = line.server.run(|| Echo::start("10.0.2.1"));
    line.client.ip("addr add 10.0.1.77/24 dev eth0");
    let victim = line.client.run(|| UdpSocket::bind("10.0.1.77:0").expect("a socket"));
    victim.set_read_timeout(Some(LIMIT)).expect("a limit");
    let named = victim.local_addr().expect("an address");
    let listen = |name: &str, port: u16| {
        format!(
            "[[listen]]\nname = \"{name}\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"10.0.1.254:{port}\"\n\
             to = \"{}\"\n",
            server.address
        )
    };
    let tables = format!(
        "[limits]\ndrain_ms = 0\n{}{}[[rule]]\nname = \"open\"\nmatch = {{ listener = \"open\" }}\ncarrier = \"direct\"\n\
         kernel = \"never\"\n",
        listen("open", 53),
        listen("denied", 54)
    );
    let mut up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    let forge = |packets: &[&str]| {
        let (ip, port) = (named.ip().to_string(), named.port().to_string());
        let arguments: Vec<_> =
            ["-c", FORGE, &ip, &port].into_iter().chain(packets.iter().copied()).collect();
        let arguments: Vec<_> = arguments.into_iter().map(str::to_owned).collect();
        let done =
            line.client.run(move || Command::new("python3").args(arguments).output().expect("python3"));
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    // Refused: there is a record, and neither a datagram nor an ICMP error for an address that may be forged.
    forge(&["54", "denied", "whole", "54", "denied", "whole"]);
    let record = up.record();
    assert_eq!((record.address("client"), record.text("reason")), (named, "policy_denied"));
    // A fragment without the others does not count. The answer to a whole one is the first that comes.
    forge(&["53", "begins--", "more", "53", "whole", "whole"]);
    let mut buffer = [0; 100];
    let (length, from) = victim.recv_from(&mut buffer).expect("the server's answer");
    assert_eq!(
        (&buffer[..length], from),
        (&b"whole"[..], "10.0.1.254:53".parse::<SocketAddr>().expect("one"))
    );
    let (status, records) = up.stop();
    assert!(status.success());
    let open: Vec<_> = records.iter().filter(|record| record.text("rule") == "open").collect();
    assert_eq!(open.len(), 1, "{records:?}");
    assert_eq!((open[0].number("bytes_up"), open[0].number("bytes_down")), (5, 5), "as much as was sent");
}
