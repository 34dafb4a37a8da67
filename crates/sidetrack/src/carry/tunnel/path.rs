//! One path of a tunnel: a task that holds a connection to one address open, and what it knows of it.

use super::pool::Pool;
use super::quic::{self, Dial};
use super::{AskDialing, Settings, stream};
use crate::carry::{Failure, resolve};
use crate::config::Transport;
use crate::reactor::{sleep, timeout};
use crate::tls::peer_name;
use quinn::{Connection, Endpoint};
use rustls::pki_types::CertificateDer;
use sidetrack_core::flow::{Destination, EndReason};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};

/// How long a QUIC handshake may take.
const QUIC_PATIENCE: Duration = Duration::from_secs(4);

/// How long QUIC has the field to itself before TLS over TCP is tried beside it.
const HEAD_START: Duration = Duration::from_millis(700);

/// While TLS over TCP is in use: how often QUIC is tried again.
const QUIC_AGAIN: Duration = Duration::from_secs(30);

/// After a failure: the first and the longest wait before the next attempt; it doubles in between. A flow that wants
/// the path shortens it to the first.
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(15);

/// What flows see of a path.
#[derive(Clone, Debug)]
pub enum State {
    /// An attempt is under way.
    Connecting,
    /// It stands.
    Up(Route),
    /// The last attempt failed so; the next one comes by itself.
    Down(Failure),
}

/// What a path that stands consists of.
#[derive(Clone, Debug)]
pub enum Route {
    /// A connection with a stream for each flow.
    Quic(Connection, Arc<str>),
    /// TLS connections, one for each flow.
    Tls(Rc<Pool>),
}

/// See the module.
pub struct Path {
    settings: Arc<Settings>,
    address: Destination,
    dialing: AskDialing,
    state: watch::Sender<State>,
    /// Somebody needs it now.
    wanted: Notify,
    endpoint: RefCell<Option<Endpoint>>,
    /// Nothing has come for longer than the far side leaves between two signs of life.
    is_silent: Cell<bool>,
}

impl Path {
    /// A path to this address, not held open yet.
    pub fn new(settings: Arc<Settings>, address: Destination, dialing: AskDialing) -> Self {
        let (state, _) = watch::channel(State::Connecting);
        let (wanted, endpoint, is_silent) = (Notify::new(), RefCell::default(), Cell::new(false));
        Self { settings, address, dialing, state, wanted, endpoint, is_silent }
    }

    /// Whether it stands.
    pub fn is_up(&self) -> bool {
        matches!(*self.state.borrow(), State::Up(_))
    }

    /// Whether a flow should rather take another path: this one does not stand, or has been silent for longer than it
    /// ever is. Such a path may be lost, which only `lost_after_ms` decides.
    pub fn is_doubtful(&self) -> bool {
        !self.is_up() || self.is_silent.get()
    }

    /// Where it leads to.
    pub const fn address(&self) -> &Destination {
        &self.address
    }

    /// Waits until it stands, or until the attempt that is under way, or one begun for this, has failed.
    ///
    /// # Errors
    /// Why the attempt failed.
    pub async fn route(&self) -> Result<Route, Failure> {
        let mut state = self.state.subscribe();
        if matches!(*state.borrow_and_update(), State::Down(_)) {
            self.wanted.notify_one();
            // The old failure says nothing about now.
            let _ = state.changed().await;
        }
        let settled = state.wait_for(|state| !matches!(state, State::Connecting)).await;
        match settled.as_deref() {
            Ok(State::Up(route)) => Ok(route.clone()),
            Ok(State::Down(failure)) => Err(failure.clone()),
            Ok(State::Connecting) | Err(_) => {
                Err(Failure::new(EndReason::Shutdown, "the tunnel was taken out of the configuration"))
            }
        }
    }

    /// Tells the far side that nobody is here any more.
    pub async fn close(&self) {
        let endpoint = self.endpoint.take();
        if let Some(endpoint) = endpoint {
            endpoint.close(quic::CLOSED, b"stopping");
            endpoint.wait_idle().await;
        }
    }

    /// Holds the path open, for ever.
    pub async fn hold(&self) {
        let mut wait = FIRST_WAIT;
        let mut told = false;
        loop {
            match self.connect().await {
                Ok(route) => {
                    (wait, told) = (FIRST_WAIT, false);
                    let why = self.serve(route).await;
                    tracing::warn!(tunnel = %self.settings.name, path = %self.address, %why, "path lost");
                    self.state.send_replace(State::Connecting);
                    continue;
                }
                Err(failure) => {
                    if !told {
                        tracing::warn!(tunnel = %self.settings.name, path = %self.address, %failure, "no path");
                        told = true;
                    }
                    self.state.send_replace(State::Down(failure));
                }
            }
            sleep(FIRST_WAIT).await;
            let _ = timeout(wait - FIRST_WAIT, self.wanted.notified()).await;
            wait = (wait * 2).min(LONGEST_WAIT);
            self.state.send_replace(State::Connecting);
        }
    }

    /// Keeps a route that stands until it is lost; says why it was.
    async fn serve(&self, route: Route) -> String {
        let mut route = route;
        loop {
            self.state.send_replace(State::Up(route.clone()));
            match &route {
                Route::Quic(connection, peer) => {
                    tracing::info!(tunnel = %self.settings.name, path = %self.address, %peer, transport = "quic", "path up");
                    tokio::select! {
                        error = connection.closed() => return stream::lost(&error).to_string(),
                        () = self.listen(connection) => {}
                    }
                }
                Route::Tls(pool) => {
                    tracing::info!(tunnel = %self.settings.name, path = %self.address, transport = "tls", "path up");
                    self.is_silent.set(false);
                    tokio::select! {
                        failure = pool.keep() => return failure.to_string(),
                        better = self.quic_again() => route = better,
                    }
                }
            }
        }
    }

    /// Looks for ever whether anything comes at all: each end asks for a sign of life every `keepalive_ms`.
    async fn listen(&self, connection: &Connection) {
        let window = Duration::from_millis(self.settings.keepalive_ms) * 3 / 2;
        let mut before = connection.stats().udp_rx.datagrams;
        self.is_silent.set(false);
        loop {
            sleep(window).await;
            let now = connection.stats().udp_rx.datagrams;
            let is_silent = now == before;
            before = now;
            if is_silent && !self.is_silent.replace(is_silent) {
                tracing::warn!(tunnel = %self.settings.name, path = %self.address, "path silent: new flows take another that is not");
            }
            self.is_silent.set(is_silent);
        }
    }

    /// While TLS is in use: waits until QUIC gets through, where it is allowed.
    async fn quic_again(&self) -> Route {
        if self.settings.transport != Transport::Auto {
            return std::future::pending().await;
        }
        loop {
            sleep(QUIC_AGAIN).await;
            let Ok(addresses) = resolve(&self.address).await else { continue };
            if let Some(to) = addresses.first()
                && let Ok(route) = self.quic(*to).await
            {
                return route;
            }
        }
    }

    async fn connect(&self) -> Result<Route, Failure> {
        let addresses = resolve(&self.address).await?;
        let mut first = None;
        for to in addresses {
            match self.connect_to(to).await {
                Ok(route) => return Ok(route),
                Err(failure) => drop(first.get_or_insert(failure)),
            }
        }
        Err(first.unwrap_or_else(|| Failure::new(EndReason::Dns, format!("{} has no address", self.address))))
    }

    async fn connect_to(&self, to: SocketAddr) -> Result<Route, Failure> {
        match self.settings.transport {
            Transport::Quic => self.quic(to).await,
            Transport::Tls => self.tls(to).await,
            Transport::Auto => self.whichever(to).await,
        }
    }

    /// QUIC with a head start, TLS over TCP beside it.
    async fn whichever(&self, to: SocketAddr) -> Result<Route, Failure> {
        let mut quic = std::pin::pin!(self.quic(to));
        let quic_failure = match timeout(HEAD_START, &mut quic).await {
            Ok(Ok(route)) => return Ok(route),
            // Whoever does not believe us, or whom we do not believe, is no more to be believed over TCP.
            Ok(Err(failure)) if failure.reason == EndReason::AuthFailed => return Err(failure),
            Ok(Err(failure)) => Some(failure),
            Err(_) => None,
        };
        let tls = self.tls(to);
        let Some(quic_failure) = quic_failure else {
            tokio::pin!(tls);
            return tokio::select! {
                route = &mut quic => match route {
                    Ok(route) => Ok(route),
                    Err(failure) => self.fallen_back(tls.await, failure),
                },
                route = &mut tls => match route {
                    Ok(route) => self.fallen_back(Ok(route), Failure::new(EndReason::ConnectTimeout, "no answer by UDP")),
                    Err(failure) => quic.await.map_err(|quic| also(quic, &failure)),
                },
            };
        };
        self.fallen_back(tls.await, quic_failure)
    }

    fn fallen_back(&self, tls: Result<Route, Failure>, quic: Failure) -> Result<Route, Failure> {
        let route = tls.map_err(|tls| also(quic.clone(), &tls))?;
        tracing::warn!(
            tunnel = %self.settings.name, path = %self.address, why = %quic,
            "UDP does not get through: flows go over TLS on TCP until it does"
        );
        Ok(route)
    }

    async fn quic(&self, to: SocketAddr) -> Result<Route, Failure> {
        let name = self.settings.server_name(&self.address);
        let dial = Dial {
            to,
            name: &name,
            mutual: &self.settings.mutual,
            keepalive: Duration::from_millis(self.settings.keepalive_ms),
            lost_after: Duration::from_millis(self.settings.lost_after_ms),
        };
        let dialing = (self.dialing)();
        let (endpoint, connection) = timeout(QUIC_PATIENCE, quic::connect(&dial, &dialing))
            .await
            .map_err(|_| Failure::new(EndReason::ConnectTimeout, format!("QUIC to {to}: no answer")))??;
        self.endpoint.replace(Some(endpoint));
        let peer = quic_peer(&connection);
        Ok(Route::Quic(connection, peer))
    }

    async fn tls(&self, to: SocketAddr) -> Result<Route, Failure> {
        let name = self.settings.server_name(&self.address);
        let pool = Pool::connect(self.settings.clone(), to, &name, self.dialing.clone()).await?;
        Ok(Route::Tls(Rc::new(pool)))
    }
}

/// One failure in place of two: the reason is that of the second transport, unless it says less.
fn also(first: Failure, second: &Failure) -> Failure {
    let reason = if second.reason == EndReason::ConnectTimeout { first.reason } else { second.reason };
    Failure::new(reason, format!("{first}; {second}"))
}

/// The name in the certificate of the other end.
pub fn quic_peer(connection: &Connection) -> Arc<str> {
    let certificates =
        connection.peer_identity().and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
    let name = certificates.as_deref().and_then(|certificates| certificates.first()).map(peer_name);
    // Both ends ask for a certificate, so there is one.
    name.unwrap_or_else(|| "?".to_owned()).into()
}
