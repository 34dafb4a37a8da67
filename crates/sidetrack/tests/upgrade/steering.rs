//! The kernel's rules are there at every moment, and go with the last process.

use crate::Upgrade;
use crate::node::Up;
use crate::node::peers::{Server, visit};
use sidetrack_testkit::in_namespace;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

fn tables(server: std::net::SocketAddr) -> String {
    format!(
        "[[listen]]\nkind = \"redirect\"\ndst = \"127.0.0.1\"\nports = {}\n[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n",
        server.port()
    )
}

#[test]
fn every_connection_is_redirected_while_the_node_is_replaced_and_none_after_its_end() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let up = Up::start("default = \"deny\"\n", &tables(server.address));
        let keeper = up.keeper();
        let to = server.address;
        let (done, visits) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let visitor = std::thread::spawn({
            let (done, visits) = (done.clone(), visits.clone());
            move || {
                let mut seen = Vec::new();
                while !done.load(Relaxed) {
                    seen.push(visit(to, b"redirected").0);
                    visits.fetch_add(1, Relaxed);
                }
                seen
            }
        });
        let goes_on = || {
            let before = visits.load(Relaxed);
            sidetrack_testkit::eventually("visits go on", || visits.load(Relaxed) >= before + 5);
        };
        goes_on();
        let mut upgrade = Upgrade::start(&up.folder(), &["--confirm", "1ms"]);
        let back = upgrade.started();
        assert!(!upgrade.ended().0);
        crate::ends(&back);
        goes_on();
        let mut upgrade = Upgrade::start(&up.folder(), &[]);
        let new = upgrade.started();
        let (success, said) = upgrade.ended();
        assert!(success, "{said}");
        goes_on();
        assert!(crate::runs(keeper), "the keeper goes on with the new process");
        done.store(true, Relaxed);
        let seen = visitor.join().expect("each is served");
        let records = crate::stop(up, &new);
        // A connection past the rules would reach the server all the same, and have no record.
        for client in seen {
            let count = records.iter().filter(|record| record.address("client") == client).count();
            assert_eq!(count, 1, "{client} was redirected");
        }
        assert!(!crate::runs(keeper), "it ends with the last process");
        visit(to, b"not redirected");
    });
}
