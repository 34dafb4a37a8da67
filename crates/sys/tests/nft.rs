//! Our tables on the live kernel: real connections, and the nft tool's reading of them.
#![allow(unsafe_code, reason = "the namespaces of tests/support")]

mod support;

use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::{nft, route};
use support::{accept, connect, flat, in_namespace, listen, original_destination};

fn netfilter() -> Socket {
    Socket::open(Protocol::Netfilter).expect("netfilter socket")
}

#[test]
fn run_namespace_catches_every_address_of_both_versions() {
    in_namespace(|| {
        let listener = listen("::");
        let port = listener.local_addr().expect("address").port();
        route::add_local_default("lo").expect("any address is local");
        route::add_local_default("lo").expect("twice is no error");
        let table = nft::run_namespace(port);
        table.apply(&mut netfilter()).expect("first time");
        table.apply(&mut netfilter()).expect("again, in place of the first");
        for destination in ["192.0.2.7:80", "127.0.0.1:81", "[2001:db8::7]:443", "[::1]:444"] {
            let _client = connect(destination).expect(destination);
            let (caught, _) = accept(&listener);
            assert_eq!(original_destination(&caught).to_string(), destination);
        }
        if let Some(listing) = support::nft("list table inet sidetrack") {
            assert_eq!(flat(&listing), flat(&table.to_string()));
        }
    });
}
