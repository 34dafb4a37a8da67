//! Addresses that another program has. Two nodes on one address would share its connections, and two policies would decide.

use crate::free;
use crate::node::Up;
use crate::node::peers::{Server, visit};
use crate::zones::link;
use crate::{TOP, reverse, rule};
use sidetrack::tls::{Pin, self_signed};
use sidetrack_testkit::in_namespace;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::Path;

/// Starts a node, which has to end with an error; gives what it said.
fn refused(top: &str, tables: &str, files: impl FnOnce(&Path)) -> String {
    let mut up = Up::spawn_with(top, tables, files);
    let (status, _) = up.gone();
    assert!(!status.success(), "it started:\n{}", up.logged());
    // Errors are wrapped at the terminal's width.
    up.logged().replace('│', " ").split_whitespace().collect::<Vec<_>>().join(" ")
}

fn in_use(address: &str, by: &str, pid: u32) -> String {
    format!("address {address} is in use by {by}, pid {pid}: stop it, or choose another address")
}

#[test]
fn a_second_node_on_an_address_does_not_start() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let address = free();
        let top = format!("workers = 2\n{TOP}");
        let text = |address: &str| reverse("in", address, server.address) + &rule("all");
        let mut first = Up::start(&top, &text(&address));
        let port = address.rsplit_once(':').expect("a port").1;
        for address in [address.clone(), format!("0.0.0.0:{port}")] {
            let said = refused(&top, &text(&address), |_| {});
            assert!(said.contains(&in_use(&address, "sidetrack", first.pid())), "{said}");
            assert!(said.contains("listener 'in'"), "{said}");
        }
        // Its own listener does not hinder a reload: the old and the new one share the address for a moment.
        first.reload(&top, &(reverse("renamed", &address, server.address) + &rule("all")));
        let to: SocketAddr = address.parse().expect("an address");
        for _ in 0..8 {
            visit(to, b"word");
            let record = first.record();
            assert_eq!((record.text("listener"), record.text("reason")), ("renamed", "ok"));
        }
        assert!(first.stop().0.success());
        assert!(Up::start(&top, &text(&address)).stop().0.success(), "it is free again");
    });
}

#[test]
fn a_listener_has_a_link_local_address_with_its_zone() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        link();
        let top = format!("workers = 2\n{TOP}");
        let mut up = Up::start(&top, &(reverse("in", "[fe80::5%veth0]:0", server.address) + &rule("all")));
        let to = up.addresses("in")[0];
        assert!(matches!(to, SocketAddr::V6(v6) if v6.scope_id() != 0), "{to}");
        visit(to, b"word");
        let record = up.record();
        assert_eq!(record.text("reason"), "ok");
        assert!(record.address("client").to_string().starts_with("[fe80::5%"), "{record:?}");
        assert!(up.stop().0.success());
    });
}

#[test]
fn another_program_is_named() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let taken = TcpListener::bind(free()).expect("bound");
        let address = taken.local_addr().expect("an address").to_string();
        let said = refused(TOP, &(reverse("in", &address, server.address) + &rule("all")), |_| {});
        let own = std::env::current_exe().expect("a program");
        let name = own.file_name().expect("a name").to_string_lossy().into_owned();
        assert!(said.contains(&in_use(&address, &name, std::process::id())), "{said}");
    });
}

/// TCP and UDP have ports of their own.
#[test]
fn a_listener_of_datagrams_does_not_mind_a_program_on_the_tcp_port() {
    in_namespace(|| {
        let server = UdpSocket::bind("127.0.0.1:0").expect("bound");
        let other = TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = other.local_addr().expect("an address").to_string();
        let listener = reverse("in", &address, server.local_addr().expect("an address"));
        let text = format!("{listener}protocol = \"udp\"\n{}", rule("all"));
        assert!(Up::start(TOP, &text).stop().0.success());
        let _taken = UdpSocket::bind(&address).expect("bound");
        let said = refused(TOP, &text, |_| {});
        assert!(said.contains(&format!("address {address} (UDP) is in use by ")), "{said}");
    });
}

#[test]
fn a_port_for_datagrams_is_not_shared_either() {
    in_namespace(|| {
        let made = self_signed("far.test", 1).expect("a key");
        let pin = Pin::of_pem(&made.certificate_pem).expect("a pin");
        let key = |folder: &Path| std::fs::write(folder.join("key"), made.identity_pem()).expect("written");
        let address = free();
        let listener = format!(
            "[[listen]]\nname = \"far\"\nkind = \"tunnel\"\naddress = \"{address}\"\nidentity = \"@/key\"\n\
             pins = [\"{pin}\"]\n{}",
            rule("all")
        );
        let taken = UdpSocket::bind(&address).expect("bound");
        let said = refused(TOP, &listener, key);
        assert!(said.contains(&format!("address {address} (UDP) is in use by ")), "{said}");
        assert!(said.contains(&format!(", pid {}", std::process::id())), "{said}");
        drop(taken);
        let first = Up::start_with(TOP, &listener, key);
        let said = refused(TOP, &listener, key);
        assert!(said.contains(&in_use(&address, "sidetrack", first.pid())), "{said}");
        first.reload(TOP, &listener.replace("\"far\"", "\"renamed\""));
        assert!(first.stop().0.success());
    });
}
