//! Readiness of a node that starts, serves and stops.

use crate::node::peers::Server;
use crate::node::{Up, admin};
use rustix::process::Signal;
use sidetrack_testkit::{awaited, in_namespace};
use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;

#[test]
fn a_node_that_drains_is_not_ready() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let tables = format!(
            "[limits]\ndrain_ms = 60000\n[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
             [[rule]]\nname = \"echoes\"\nmatch = {{ listener = \"port\" }}\ncarrier = \"direct\"\nkernel = \"never\"\n",
            server.address
        );
        let mut node = Up::start("default = \"deny\"\nuser = \"root\"\n", &tables);
        let word = |path| {
            let (status, body) = admin::ask(&node, "GET", path);
            (status, body.trim().to_owned())
        };
        assert_eq!(word("/healthz"), (200, "ok".to_owned()));
        assert_eq!(word("/readyz"), (200, "ready".to_owned()));
        // A flow that keeps the node from ending.
        let client = TcpStream::connect(node.addresses("port")[0]).unwrap();
        let mut line = String::new();
        BufReader::new(&client).read_line(&mut line).unwrap();
        node.signal(Signal::TERM);
        awaited("it stops", || (word("/readyz") == (503, "stopping".to_owned())).then_some(()));
        assert_eq!(word("/healthz"), (200, "ok".to_owned()));
        drop(client);
        let (status, _) = node.gone();
        assert!(status.success(), "{status}");
    });
}
