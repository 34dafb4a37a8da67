//! Intercepts TLS connections, inside CONNECT and on redirected connections. Their requests are served like any others.
//! A connection that is not intercepted is forwarded unchanged, with the bytes that were read.

use super::connection::Connection;
use super::copy::write_all;
use super::duplex::Duplex;
use super::request::Desk;
use super::servers::Secure;
use super::tap::Tap;
use crate::carry::tls::Tls;
use crate::carry::{Stream, Wire};
use crate::live::Decided;
use crate::reactor::{timeout, timeout_at};
use crate::session::{AskingTunnel, Connect, ESTABLISHED, Entry, Passage, carry_on, keep};
use crate::worker::{CROWDED, Place};
use sidetrack_core::flow::{Destination, EndReason, Process, Side};
use sidetrack_core::http::sni::{ClientHello, client_hello};
use sidetrack_core::http::uri::Scheme;
use sidetrack_core::policy::Action;
use std::future::Future;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Properties shared by all requests on a connection that was made for one server.
#[derive(Clone, Debug)]
pub(super) struct Inside {
    /// The destination of the connection.
    pub destination: Destination,
    /// The user who asked for it, if the listener asks for users.
    pub user: Option<String>,
    /// The process behind it, if it was looked up.
    pub process: Option<Process>,
    /// TLS with the client ends here, and TLS with the server is made to this host.
    pub secure: Option<Secure>,
}

impl Inside {
    /// The scheme of its requests.
    pub(super) const fn scheme(&self) -> Scheme {
        match self.secure {
            Some(_) => Scheme::Https,
            None => Scheme::Http,
        }
    }
}

/// What happened to a connection that may be intercepted.
pub(super) enum Opened {
    /// It brings requests.
    Requests(Connection, String),
    /// It is forwarded unchanged, for this reason.
    Untouched(Connection, String),
    /// It has ended.
    Over(EndReason, String),
}

impl Connection {
    /// Serves CONNECT: a tunnel, or requests inside it.
    pub(super) async fn tunnel(
        mut self,
        destination: Destination,
        user: Option<String>,
        mut entry: Entry,
    ) -> Option<Self> {
        let tap = self.proxy.tap.clone().filter(|tap| tap.consider(&destination).is_ok());
        let mut is_established = false;
        let may_open = tap.is_some() && {
            let (may, decided) = self.may_open(&destination, user.as_deref());
            self.process.clone_from(&decided.flow.process);
            entry.live().decide(decided);
            self.stream.note_leg(entry.live(), Side::Client);
            may
        };
        if let Some(tap) = tap.filter(|_| may_open) {
            // Answer the CONNECT first: the client sends its ClientHello only after that.
            let told = write_all(&self.stream, &mut [IoSlice::new(ESTABLISHED)]).await;
            if let Err(error) = told {
                entry.end(EndReason::ClientGone, Some(format!("the client left: {error}")));
                return None;
            }
            is_established = true;
            match self.open(&tap, &destination, user.clone()).await {
                Opened::Requests(requests, what) => {
                    entry.end(EndReason::Ok, Some(what));
                    return Some(requests);
                }
                Opened::Untouched(same, why) => {
                    entry.note(why);
                    self = same;
                }
                Opened::Over(reason, detail) => {
                    entry.end(reason, Some(detail));
                    return None;
                }
            }
        }
        let (worker, listening, peer) = (self.worker.clone(), self.listening.clone(), self.peer);
        let connect = Some(Connect { destination, user, refusals: self.proxy.clone(), is_established });
        let admission = self.admission.take();
        let passage = Passage { worker, listening, peer, connect, held: None, relays: None };
        let wired = carry_on(passage, self.client(), entry).await;
        keep(wired, admission);
        None
    }

    /// Serves CONNECT-UDP: a tunnel of datagrams in the rest of the connection.
    pub(super) fn datagrams(
        self,
        destination: Destination,
        user: Option<String>,
        entry: Entry,
    ) -> Pin<Box<dyn Future<Output = ()>>> {
        let (worker, listening, peer) = (self.worker.clone(), self.listening.clone(), self.peer);
        let connect = Connect { destination, user, refusals: self.proxy.clone(), is_established: false };
        let tunnel = self.proxy.datagrams;
        tunnel(AskingTunnel { worker, listening, client: self.client(), connect, peer, entry, near: None })
    }

    /// Whether policy allows interception. A connection is not intercepted if a rule denies it, sends it through functions
    /// or requires an agreement.
    pub(super) fn may_open(&self, to: &Destination, user: Option<&str>) -> (bool, Decided) {
        let (worker, listening, proxy) = (&*self.worker, &*self.listening, &*self.proxy);
        let desk = Desk {
            worker,
            listening,
            proxy,
            peer: self.peer,
            stream: &self.stream,
            inside: None,
            received: self.received,
        };
        let mut flow = desk.flow_to(to.clone(), user.map(str::to_owned));
        let verdict = desk.decide(&mut flow, None);
        let may = matches!(&verdict.action, Action::Carry(carry) if carry.chain.is_none() && carry.agreement.is_none());
        (may, Decided::new(flow, Some(verdict)).by(&worker.config().policy))
    }

    /// Reads the ClientHello, and answers as the server if the connection is to be intercepted.
    pub(super) async fn open(mut self, tap: &Arc<Tap>, to: &Destination, user: Option<String>) -> Opened {
        let clock = self.worker.clock;
        let patience = Duration::from_millis(self.worker.config().limits.handshake_timeout_ms);
        // The client counts as waiting until the handshake is over.
        let place = Place::enter(&self.worker);
        let reading = self.hello(Instant::now() + patience);
        let Some(hello) = Place::while_kept(Some(&place), reading).await else {
            return Opened::Over(EndReason::Limit, CROWDED.to_owned());
        };
        let (host, config) = match tap.choose(to, &hello, self.peer.ip(), clock) {
            Ok(chosen) => chosen,
            Err(why) => return Opened::Untouched(self, format!("passes untouched: {why}")),
        };
        let process = self.process.take();
        let mut held = self.buffer.take();
        let (below, peeked) = self.stream.into_stream();
        held.extend(peeked);
        let mut tls = match Tls::server(below, config, held) {
            Ok(tls) => tls,
            Err(error) => return Opened::Over(EndReason::Internal, error.to_string()),
        };
        let Some(shaken) = Place::while_kept(Some(&place), timeout(patience, tls.handshake())).await else {
            Stream::Tls(Box::new(tls)).close(true);
            return Opened::Over(EndReason::Limit, CROWDED.to_owned());
        };
        drop(place);
        let shaken = shaken.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        let told = tap.shook_hands(self.peer.ip(), &host, shaken.as_ref().err(), clock);
        if shaken.is_err() {
            Stream::Tls(Box::new(tls)).close(false);
            return Opened::Over(EndReason::TlsFailed, told);
        }
        let secure =
            Some(Secure { servers: tap.servers().clone(), tap: Some(tap.clone()), host, is_alone: false });
        let is_multiplexed = tls.protocol() == Some(b"h2");
        let stream = Duplex::from(Stream::Tls(Box::new(tls)));
        let inside = Some(Inside { destination: to.clone(), user, process, secure });
        Opened::Requests(Self { stream, inside, is_multiplexed, ..self }, told)
    }

    /// Reads the first bytes, until they are a ClientHello or cannot become one.
    async fn hello(&mut self, deadline: Instant) -> ClientHello {
        loop {
            match client_hello(self.buffer.data()) {
                ClientHello::Incomplete => {}
                told => return told,
            }
            match timeout_at(deadline, self.buffer.fill(&self.stream)).await {
                Ok(Ok(1..)) => {}
                _ => return ClientHello::NotTls,
            }
        }
    }
}
