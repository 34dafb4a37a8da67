//! The name in a client's TLS hello, where the client has asked for a destination by another one.
//!
//! A client may ask for a host that rules allow and then greet another one on the connection: servers behind one address take
//! whom the hello names. So where rules ask for host names, none of the client's bytes goes on before the hello has been
//! looked at, and policy is asked for the second name, too. A server that speaks first ends the wait: it speaks no TLS.

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

/// Looks at a client's TLS hello before any of its bytes go on.
pub(super) struct Guard<'a> {
    /// The rules.
    pub policy: &'a Policy,
    /// The flow, with the name it was asked for.
    pub flow: &'a Flow,
    /// Its entry, for the record.
    pub live: &'a LiveFlow,
    /// Bytes of our own before the client's.
    pub preface: Cell<usize>,
}

/// What the bytes so far say.
enum Look {
    /// They may go on.
    Clear,
    /// They may become a hello.
    More,
    /// They name a host to which policy says no.
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

    /// Asks policy for the flow as if it had been asked for by this name.
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

    /// Waits until the client's first bytes are no hello, or one that may go on; or the server has spoken first.
    ///
    /// # Errors
    /// Policy denies the name in it, or the client is gone.
    pub async fn wait(&self, client: &mut Client, carried: &mut Carried) -> Result<(), Failure> {
        // What was sent with the request has been looked at.
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

/// Ready when the server has said something, or has ended its direction.
fn poll_spoke(stream: &mut Stream, early: &mut Vec<u8>, cx: &mut Context<'_>) -> Poll<Result<(), Failure>> {
    if let Stream::Tcp(socket) = stream {
        // The pump reads them, and an error, too.
        return socket.poll_read_ready(cx).map(Ok);
    }
    let mut buffer = [0; READ_MAX];
    let failed = |error: std::io::Error| Failure::new(EndReason::ServerReset, error.to_string());
    stream
        .poll_recv(cx, &mut buffer)
        .map(|read| read.map(|n| early.extend_from_slice(&buffer[..n])).map_err(failed))
}

/// The first bytes of a client, as far as they may go on.
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
