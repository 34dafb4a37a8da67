//! Servers and hops with link-local addresses: the zone says by which interface they are reached.

use crate::node::Up;
use crate::node::peers::{Client, Server, visit};
use crate::{TOP, reverse, rule};
use sidetrack_testkit::in_namespace;
use std::net::{SocketAddr, SocketAddrV6};
use std::process::Command;

/// A link between two interfaces with link-local addresses: `fe80::5` at `veth0`, `fe80::6` at `veth1`.
pub(crate) fn link() {
    for arguments in [
        "link add veth0 type veth peer name veth1",
        "link set veth0 up",
        "link set veth1 up",
        "-6 addr add fe80::5/64 dev veth0 nodad",
        "-6 addr add fe80::6/64 dev veth1 nodad",
    ] {
        let done = Command::new("ip").args(arguments.split(' ')).status();
        assert!(done.expect("ip").success(), "{arguments}");
    }
}

/// A server at the far end of the link.
fn server() -> Server {
    let index = sidetrack_sys::route::interface_index("veth1").expect("an interface");
    Server::bound(SocketAddrV6::new("fe80::6".parse().expect("an address"), 0, 0, index).into())
}

/// The address of such a server as a configuration names it.
fn by_name(address: SocketAddr) -> String {
    format!("[fe80::6%veth0]:{}", address.port())
}

fn to(text: &str, address: &str) -> String {
    format!(
        "[[listen]]\nname = \"{text}\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{address}\"\n"
    )
}

#[test]
fn a_server_is_reached_by_the_interface_of_its_zone() {
    in_namespace(|| {
        link();
        let server = server();
        let index = sidetrack_sys::route::interface_index("veth0").expect("an interface");
        let written = format!("[fe80::6%{index}]:{}", server.address.port());
        // A packet filter cannot translate to such an address: the rule leaves the flow to user space by itself.
        let all = "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\n";
        let mut up = Up::start(TOP, &(to("in", &by_name(server.address)) + all));
        let (_, seen_as, _) = visit(up.addresses("in")[0], b"word");
        assert!(matches!(seen_as, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local()), "{seen_as}");
        let record = up.record();
        assert_eq!((record.text("reason"), record.text("orig_dst")), ("ok", &*written), "{record:?}");
        assert!(!record.flag("shunted"), "{record:?}");
        // The same by a rule that leads elsewhere, and by a match that names the network.
        let other = Server::start("127.0.0.1");
        let rules = format!(
            "[[rule]]\nname = \"no\"\naction = \"deny\"\nmatch = {{ to = \"fe80::/10\" }}\n\
             [[rule]]\nname = \"led\"\ncarrier = \"direct\"\nto = \"{}\"\n",
            by_name(server.address)
        );
        let listeners = to("in", &by_name(server.address)) + &reverse("led", "127.0.0.1:0", other.address);
        assert!(up.stop().0.success());
        let mut up = Up::start(TOP, &(listeners + &rules));
        let (_, seen_as, _) = visit(up.addresses("led")[0], b"word");
        assert!(matches!(seen_as, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local()), "{seen_as}");
        assert_eq!((up.record().text("rule"), up.addresses("in").len()), ("led", 1));
        assert!(Client::connect(up.addresses("in")[0]).is_err());
        assert_eq!(up.record().text("rule"), "no");
        assert!(up.stop().0.success());
    });
}

#[test]
fn a_hop_is_reached_by_the_interface_of_its_zone_and_is_told_no_zone() {
    in_namespace(|| {
        link();
        let (server, far) = (Server::start("127.0.0.1"), server());
        let socks = "[[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"[fe80::6%veth1]:0\"\n";
        // The client of the hop has an address of the link, and `never_dial` knows no loopback for it.
        let hop_rule = "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nmatch = { to = \"127.0.0.0/8\" }\n";
        let hop = Up::start(TOP, &format!("{socks}{hop_rule}"));
        let listeners = reverse("in", "127.0.0.1:0", server.address) + &to("far", &by_name(far.address));
        let carrier = format!("socks5://{}", by_name(hop.addresses("socks")[0]));
        let rules = format!("[[rule]]\nname = \"all\"\ncarrier = \"{carrier}\"\n");
        let mut up = Up::start(TOP, &(listeners + &rules));
        visit(up.addresses("in")[0], b"word");
        let record = up.record();
        assert_eq!(record.text("reason"), "ok", "{record:?}");
        let told = record.0["carrier"].to_string();
        assert!(told.contains("socks5://[fe80::6%"), "{told}");
        assert!(Client::connect(up.addresses("far")[0]).is_err());
        let record = up.record();
        assert_eq!(record.text("reason"), "unreachable", "{record:?}");
        assert!(record.text("detail").contains("no other host can dial it"), "{record:?}");
        assert!(up.stop().0.success() && hop.stop().0.success());
    });
}

#[test]
fn explain_takes_zones_by_name() {
    in_namespace(|| {
        link();
        let up = Up::start(TOP, &(to("in", "[fe80::6%veth0]:80") + &rule("all")));
        let explained = |flow: &str| {
            let said = Command::new(env!("CARGO_BIN_EXE_sidetrack"))
                .args(["explain", "-c"])
                .arg(up.folder().join("sidetrack.toml"))
                .arg(flow)
                .output()
                .expect("the binary");
            String::from_utf8_lossy(&said.stdout).into_owned() + &String::from_utf8_lossy(&said.stderr)
        };
        let index = sidetrack_sys::route::interface_index("veth0").expect("an interface");
        let text = explained("[fe80::5%veth0]:4711 to [fe80::6%veth0]:80");
        assert!(text.contains(&format!("-> [fe80::6%{index}]:80")), "{text}");
        let text = explained("10.0.0.1 to [fe80::6%wlan7]:80");
        assert!(text.contains("there is no interface 'wlan7' on this machine"), "{text}");
        let text = explained("10.0.0.1 to [2001:db8::6%veth0]:80");
        assert!(text.contains("has a zone that means nothing"), "{text}");
    });
}
