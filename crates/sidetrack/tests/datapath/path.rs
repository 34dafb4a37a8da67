//! Paths through nodes: a first node that stands for the server, and the hops that its rule names.

use super::node::{Node, reverse_config};
use super::peers::{Server, connect};
use sidetrack_core::flow::EndReason;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

/// The user that hops with a password know, and that user's password.
pub(crate) const USER: (&str, &str) = ("alice", "open sesame");
const USER_IN_URL: &str = "alice:open%20sesame@";

/// One hop: a scheme of the configuration, its options, and whether it asks for a password.
#[derive(Clone, Copy)]
pub(crate) struct Hop {
    scheme: &'static str,
    options: &'static str,
    password: bool,
}

impl Hop {
    /// A hop without a password.
    pub(crate) const fn new(scheme: &'static str) -> Self {
        Self { scheme, options: "", password: false }
    }

    /// The same, with these options (`?optimistic=true`).
    pub(crate) const fn with(self, options: &'static str) -> Self {
        Self { options, ..self }
    }

    /// The same, with a password.
    pub(crate) const fn password(self) -> Self {
        Self { password: true, ..self }
    }
}

/// A path and what it consists of.
pub(crate) struct Path {
    /// Its nodes, the first one first.
    pub nodes: Vec<Node>,
    /// HTTP proxies of the test, which live as long as the path.
    _proxies: Vec<Server>,
}

impl Path {
    /// A path to `server` over these hops; `rule` are further keys of the first node's rule.
    pub(crate) fn over(hops: &[Hop], server: SocketAddr, rule: &str) -> Self {
        let (mut nodes, mut proxies, mut urls) = (Vec::new(), Vec::new(), Vec::new());
        for hop in hops {
            let address = if hop.scheme == "http" {
                proxies.push(connect_proxy(hop.password));
                proxies[proxies.len() - 1].address
            } else {
                nodes.push(socks_node(hop.password));
                nodes[nodes.len() - 1].entry()
            };
            let user = if hop.password { USER_IN_URL } else { "" };
            urls.push(format!("'{}://{user}{address}{}'", hop.scheme, hop.options));
        }
        let carrier = if urls.is_empty() { "'direct'".into() } else { format!("[{}]", urls.join(", ")) };
        let first = Node::start(&reverse_config(server, &format!("carrier = {carrier}\n{rule}")));
        nodes.insert(0, first);
        Self { nodes, _proxies: proxies }
    }

    /// A new connection of a client.
    pub(crate) fn open(&self) -> TcpStream {
        connect(self.nodes[0].entry())
    }

    /// Waits until every node knows that the path of its one flow stands.
    pub(crate) fn await_made(&self) {
        for node in &self.nodes {
            node.await_live("the path stands", |flow| flow.connect_time().is_some());
        }
    }

    /// Waits for the one flow to end at every node, at each for this reason.
    pub(crate) fn ends_with(&self, reason: EndReason) {
        for node in &self.nodes {
            node.ends_with(reason);
        }
    }
}

/// A SOCKS node that carries directly.
fn socks_node(password: bool) -> Node {
    let (user, secret) = USER;
    let users = if password {
        format!("users = [{{ user = '{user}', password = '{secret}' }}]")
    } else {
        String::new()
    };
    Node::start(&format!("[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n{users}"))
}

/// A small HTTP proxy that serves CONNECT, and asks for a password if it is to.
pub(crate) fn connect_proxy(password: bool) -> Server {
    Server::start(move |client| {
        // The client sees what went wrong: its connection ends.
        let _ = serve_connect(client, password);
    })
}

fn serve_connect(mut client: TcpStream, password: bool) -> io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head);
    // Base64 of USER.
    if password && !head.contains("\r\nProxy-Authorization: Basic YWxpY2U6b3BlbiBzZXNhbWU=\r\n") {
        let refusal =
            b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=\"x\"\r\n\
            Content-Length: 0\r\n\r\n";
        client.write_all(refusal)?;
        return client.shutdown(Shutdown::Write);
    }
    let to = head.strip_prefix("CONNECT ").and_then(|rest| rest.split(' ').next()).unwrap_or_default();
    let Ok(server) = TcpStream::connect(to) else {
        return client.write_all(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n");
    };
    client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")?;
    let (client_too, server_too) = (client.try_clone()?, server.try_clone()?);
    let up = std::thread::spawn(move || copy(client_too, server_too));
    copy(server, client);
    up.join().map_err(|_| io::Error::other("a copying thread panicked"))
}

/// Copies to the end, and passes the end on.
fn copy(mut from: TcpStream, mut to: TcpStream) {
    if io::copy(&mut from, &mut to).is_ok() {
        // Fails where the other side is gone already.
        let _ = to.shutdown(Shutdown::Write);
    } else {
        let _ = sidetrack_sys::sockopt::reset_on_close(&to);
    }
}
