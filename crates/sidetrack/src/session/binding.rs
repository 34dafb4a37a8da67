//! BIND of a SOCKS client (RFC 1928 Sec. 4 and 6): a port of ours waits for one connection, which is the server's side of the
//! flow then. FTP in active mode is the usual case.
//!
//! ```text
//! client: BIND, the host that will connect -> rules decide about that host
//!      <- first answer: the address of our port
//!                  a connection comes: is it that host, and do the rules allow it? otherwise it is reset
//!      <- second answer: the peer's address; bytes move
//! ```

use super::containers::Way;
use super::hello;
use super::setup::{Asker, Setup, gone};
use crate::carry::{Carried, Client, Failure, resolve};
use crate::reactor::TcpListener;
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{Destination, EndReason, Flow, Host};
use sidetrack_core::policy::{Action, Carry, Decision, Policy, Seen};
use sidetrack_core::socks::Command;
use sidetrack_core::socks::server::Reply;
use sidetrack_sys::sockopt::{self, ListenOptions};
use std::net::{IpAddr, SocketAddr};

/// Most connections of others that are turned away before the wait ends.
const STRANGERS_MAX: usize = 64;

/// Who may connect.
#[derive(Debug, PartialEq, Eq)]
enum Expected {
    /// Any host that the rules allow.
    Anyone,
    /// A host with one of these addresses.
    One(Vec<IpAddr>),
}

impl Expected {
    fn admits(&self, ip: IpAddr) -> bool {
        match self {
            Self::Anyone => true,
            Self::One(addresses) => addresses.contains(&ip.to_canonical()),
        }
    }
}

impl Setup<'_> {
    /// Gets the server's side of the flow: by dialling, or for BIND by waiting for it.
    pub(super) async fn reach(
        &self,
        carry: &Carry,
        (flow, asker, looks_at_hello): (&Flow, &mut Asker, bool),
        client: &mut Client,
        way: &mut Way,
        guard: Option<&hello::Guard<'_>>,
    ) -> Result<Carried, Failure> {
        match asker {
            Asker::Socks(handshake, request) if request.command == Command::Bind => {
                let policy = &self.config.policy;
                let listener = prepare(carry, flow, client).await?;
                let told = listener.told;
                if handshake.reply(client, Reply::connected(told)).await.is_err() {
                    return Err(gone());
                }
                Box::pin(listener.wait(policy, flow, client)).await
            }
            asker => self.carry(carry, (flow, asker, looks_at_hello), client, way, guard).await,
        }
    }
}

/// Asks the policy about the address that has connected, as if the client had asked for it: before, only zeros or a name
/// may have been known.
fn ask(policy: &Policy, flow: &Flow, peer: SocketAddr) -> Result<(), Failure> {
    let orig_dst = Destination::from(SocketAddr::new(peer.ip(), flow.orig_dst.port));
    let flow = Flow { orig_dst, ..flow.clone() };
    let why = match policy.decide(&flow, Seen::FirstBytes(flow.host.as_ref())) {
        Decision::Verdict(verdict) if matches!(verdict.action, Action::Carry(_)) => return Ok(()),
        Decision::Verdict(verdict) => verdict.why.to_string(),
        Decision::NeedProcess { rule } | Decision::NeedFirstBytes { rule, .. } => {
            format!("rule '{rule}' asks for what is not known")
        }
    };
    Err(Failure::new(EndReason::PolicyDenied, format!("{peer} connected: {why}")))
}

/// A port that waits for one connection.
struct Waiting {
    listener: TcpListener,
    expected: Expected,
    told: SocketAddr,
}

/// Opens a port for the host that the client expects.
async fn prepare(carry: &Carry, flow: &Flow, client: &Client) -> Result<Waiting, Failure> {
    if carry.carrier != Carrier::Direct || carry.chain.is_some() || carry.proxy_protocol.is_some() {
        let why = "BIND is served only by the carrier \"direct\" without `chain` and `proxy_protocol`";
        return Err(Failure::new(EndReason::Unsupported, why));
    }
    let expected = expected(&flow.orig_dst).await?;
    let internal = |error: std::io::Error| {
        Failure::new(EndReason::Internal, format!("cannot listen for the peer: {error}"))
    };
    let mut address = sockopt::canonical(client.stream.local_address().map_err(internal)?);
    address.set_port(0);
    let socket = sockopt::listen(address, &ListenOptions::default()).map_err(internal)?;
    let told = socket.local_addr().map_err(internal)?;
    let listener = TcpListener::new(socket).map_err(internal)?;
    Ok(Waiting { listener, expected, told })
}

/// Returns who may connect: the host that the client names, from any port.
async fn expected(peer: &Destination) -> Result<Expected, Failure> {
    match &peer.host {
        Host::Ip(ip) if ip.is_unspecified() => Ok(Expected::Anyone),
        Host::Ip(ip) => Ok(Expected::One(vec![ip.to_canonical()])),
        Host::Name(_) => {
            let addresses = resolve(peer).await?;
            Ok(Expected::One(addresses.into_iter().map(|address| address.ip().to_canonical()).collect()))
        }
    }
}

impl Waiting {
    /// Waits for the connection. The flow's deadline for connecting ends the wait.
    async fn wait(self, policy: &Policy, flow: &Flow, client: &mut Client) -> Result<Carried, Failure> {
        let (presence, _) = client.split();
        tokio::select! {
            biased;
            carried = self.accept(policy, flow) => carried,
            () = presence.lost() => Err(gone()),
        }
    }

    async fn accept(self, policy: &Policy, flow: &Flow) -> Result<Carried, Failure> {
        let mut denied = None;
        for _ in 0..STRANGERS_MAX {
            let accepted = self.listener.accept().await;
            let (mut stream, peer) = accepted.map_err(|error| {
                Failure::new(EndReason::Internal, format!("cannot accept the peer: {error}"))
            })?;
            let peer = sockopt::canonical(peer);
            let admitted = self.expected.admits(peer.ip()).then(|| ask(policy, flow, peer));
            match admitted {
                Some(Ok(())) => {
                    let _ = sockopt::set_tcp_nodelay(&stream, true);
                    return Ok(Carried {
                        stream: stream.into(),
                        early: Vec::new(),
                        bound: Some(peer.into()),
                        sent: 0,
                        stack: Vec::new(),
                        taken: None,
                        leads_to: Some(peer),
                        spread: None,
                    });
                }
                Some(Err(failure)) => denied = Some(failure),
                None => {}
            }
            stream.reset_on_close();
        }
        let why = "too many connections came that were not the expected one";
        Err(denied.unwrap_or_else(|| Failure::new(EndReason::Limit, why)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_known_by_its_address_and_zeros_are_anyone() {
        let known = |text: &str| {
            let peer = Destination::from(text.parse::<SocketAddr>().expect("an address"));
            crate::reactor::block_on(expected(&peer)).expect("a loop").expect("no name to resolve")
        };
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        assert_eq!(known("0.0.0.0:0"), Expected::Anyone);
        assert_eq!(known("[::]:21"), Expected::Anyone);
        let one = known("192.0.2.1:20");
        assert!(one.admits(ip("192.0.2.1")) && one.admits(ip("::ffff:192.0.2.1")));
        assert!(!one.admits(ip("192.0.2.2")));
    }
}
