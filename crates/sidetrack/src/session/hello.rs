//! Checks the server name in a client's TLS hello, where the client has asked for a destination by another name.
//!
//! A client may ask for a host that the rules allow and then send another name in its hello; servers behind one
//! address go by the name in the hello. So where rules match host names, no byte of the client is forwarded
//! before the hello is checked against the policy. If the server sends first, the wait ends: such a server does
//! not speak TLS.

use super::client::{Client, Incoming};
use super::setup::gone;
use crate::carry::{Carried, Failure, FirstBytes, Stream, Wire};
use crate::live::LiveFlow;
use sidetrack_core::flow::{Destination, EndReason, Flow, Host, HostName};
use sidetrack_core::http::sni::{ClientHello, client_hello};
use sidetrack_core::policy::{Action, Decision, Policy, Seen};
use std::cell::Cell;
use std::future::poll_fn;
use std::task::{Context, Poll};

/// Most bytes of one read from the server.
const READ_MAX: usize = 2048;

/// Checks a client's TLS hello before any of its bytes are forwarded.
pub(super) struct Guard<'a> {
    /// The rules.
    pub policy: &'a Policy,
    /// The flow, with the name in the client's request.
    pub flow: &'a Flow,
    /// Its entry in the ledger, for the record.
    pub live: &'a LiveFlow,
    /// Number of bytes that we put before the client's.
    pub preface: Cell<usize>,
}

/// The result of looking at the bytes so far.
enum Look {
    /// They may be forwarded.
    Clear,
    /// They may become a hello.
    More,
    /// They name a host that the policy denies.
    Denied(Failure),
}

impl Guard<'_> {
    fn look(&self, bytes: &[u8]) -> Look {
        let denied = |why: String| Look::Denied(Failure::new(EndReason::PolicyDenied, why));
        match client_hello(bytes.get(self.preface.get()..).unwrap_or_default()) {
            ClientHello::Incomplete => Look::More,
            ClientHello::NotTls => Look::Clear,
            ClientHello::Malformed(error) => {
                denied(format!("the name in the TLS hello cannot be read: {error}"))
            }
            ClientHello::Hello(hello) => {
                let Some(name) = hello.server_name.filter(|name| Some(name) != self.flow.host.as_ref())
                else {
                    return Look::Clear;
                };
                self.live.greeted(name.clone());
                match self.ask(&name) {
                    Ok(()) => Look::Clear,
                    Err(why) => denied(format!("the TLS hello names '{name}': {why}")),
                }
            }
        }
    }

    /// Asks the policy about the flow as if the client had asked for this name.
    fn ask(&self, name: &HostName) -> Result<(), String> {
        let host = match &self.flow.orig_dst.host {
            Host::Name(_) => Host::Name(name.clone()),
            Host::Ip(ip) => Host::Ip(*ip),
        };
        let orig_dst = Destination { host, port: self.flow.orig_dst.port };
        let flow = Flow { host: Some(name.clone()), orig_dst, ..self.flow.clone() };
        match self.policy.decide(&flow, Seen::FirstBytes(Some(name))) {
            Decision::Verdict(verdict) if matches!(verdict.action, Action::Carry(_)) => Ok(()),
            Decision::Verdict(verdict) => Err(verdict.why.to_string()),
            Decision::NeedProcess { rule } | Decision::NeedFirstBytes { rule, .. } => {
                Err(format!("rule '{rule}' asks for what is not known"))
            }
        }
    }

    /// Waits until the client's first bytes are not a hello, or are an allowed one, or until the server sends
    /// first.
    ///
    /// # Errors
    /// Fails if the policy denies the name, or if the client is gone.
    pub async fn wait(&self, client: &mut Client, carried: &mut Carried) -> Result<(), Failure> {
        // Bytes that were sent with the request were checked before.
        if carried.sent > 0 || !carried.early.is_empty() {
            return Ok(());
        }
        loop {
            match self.look(client.held()) {
                Look::Clear => return Ok(()),
                Look::Denied(failure) => return Err(failure),
                Look::More => {}
            }
            let Carried { stream, early, .. } = &mut *carried;
            tokio::select! {
                biased;
                read = client.read_more() => match read {
                    Ok(0) if client.is_full() => {
                        let why = "the TLS hello is too long for its name to be read";
                        return Err(Failure::new(EndReason::PolicyDenied, why));
                    }
                    Ok(0) => return Ok(()),
                    Ok(_) => {}
                    Err(_) => return Err(gone()),
                },
                spoke = poll_fn(|cx| poll_spoke(stream, early, cx)) => return spoke,
            }
        }
    }
}

/// Ready when the server has sent something or has ended its direction.
fn poll_spoke(stream: &mut Stream, early: &mut Vec<u8>, cx: &mut Context<'_>) -> Poll<Result<(), Failure>> {
    if let Stream::Tcp(socket) = stream {
        // Only readiness is awaited: the pump reads the bytes, or the error.
        return socket.poll_read_ready(cx).map(Ok);
    }
    let mut buffer = [0; READ_MAX];
    let failed = |error: std::io::Error| Failure::new(EndReason::ServerReset, error.to_string());
    stream
        .poll_recv(cx, &mut buffer)
        .map(|read| read.map(|n| early.extend_from_slice(&buffer[..n])).map_err(failed))
}

/// The first bytes of a client, as far as they may be forwarded.
pub(super) struct Guarded<'a> {
    pub incoming: Incoming<'a>,
    pub guard: Option<&'a Guard<'a>>,
}

impl FirstBytes for Guarded<'_> {
    fn held(&mut self) -> &[u8] {
        let held = self.incoming.held();
        match self.guard.map(|guard| guard.look(held)) {
            None | Some(Look::Clear) => held,
            Some(Look::More | Look::Denied(_)) => &[],
        }
    }

    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.incoming.poll_more(cx)
    }
}
