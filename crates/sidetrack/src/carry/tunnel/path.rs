//! One path of a tunnel: a task that keeps a connection to one address open, and the path's state.

use super::lanes::Lanes;
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

/// Head start of QUIC before TLS over TCP is tried in parallel.
const HEAD_START: Duration = Duration::from_millis(700);

/// While TLS over TCP is in use: time between two attempts with QUIC.
const QUIC_AGAIN: Duration = Duration::from_secs(30);

/// First and longest pause after a failure; the pause doubles in between. A flow that needs the path shortens it
/// to the first.
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(15);

/// The state of a path, as flows see it.
#[derive(Clone, Debug)]
pub enum State {
    /// An attempt is running.
    Connecting,
    /// The path is up.
    Up(Route),
    /// The last attempt failed with this. The next one follows by itself.
    Down(Failure),
}

/// The connections of a path that is up.
#[derive(Clone, Debug)]
pub enum Route {
    /// A QUIC connection with a stream for each flow.
    Quic(Connection, Arc<str>, Arc<Lanes>),
    /// TLS connections, one for each flow.
    Tls(Rc<Pool>),
}

/// A path: its address and its state.
pub struct Path {
    settings: Arc<Settings>,
    address: Destination,
    dialing: AskDialing,
    state: watch::Sender<State>,
    /// Notified when a flow needs the path now.
    wanted: Notify,
    endpoint: RefCell<Option<Endpoint>>,
    /// Whether nothing was received for longer than the far side leaves between two keep-alive messages.
    is_silent: Cell<bool>,
}

impl Path {
    /// A path to this address. It is not connected yet.
    pub fn new(settings: Arc<Settings>, address: Destination, dialing: AskDialing) -> Self {
        let (state, _) = watch::channel(State::Connecting);
        let (wanted, endpoint, is_silent) = (Notify::new(), RefCell::default(), Cell::new(false));
        Self { settings, address, dialing, state, wanted, endpoint, is_silent }
    }

    /// Whether the path is up.
    pub fn is_up(&self) -> bool {
        matches!(*self.state.borrow(), State::Up(_))
    }

    /// Whether a flow should prefer another path: this one is not up, or has been silent for unusually long.
    /// Only `lost_after_ms` decides that it is lost.
    pub fn is_doubtful(&self) -> bool {
        !self.is_up() || self.is_silent.get()
    }

    /// The address of the far side.
    pub const fn address(&self) -> &Destination {
        &self.address
    }

    /// Waits until the path is up, or until the present attempt fails. If none is running, starts one.
    ///
    /// # Errors
    /// Says why the attempt failed.
    pub async fn route(&self) -> Result<Route, Failure> {
        let mut state = self.state.subscribe();
        if matches!(*state.borrow_and_update(), State::Down(_)) {
            self.wanted.notify_one();
            // The earlier failure may be outdated: wait for a new attempt.
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

    /// Tells the far side that this end stops.
    pub async fn close(&self) {
        let endpoint = self.endpoint.take();
        if let Some(endpoint) = endpoint {
            endpoint.close(quic::CLOSED, b"stopping");
            endpoint.wait_idle().await;
        }
    }

    /// Keeps the path open until the future is dropped.
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

    /// Keeps a route until it is lost. Returns the reason.
    async fn serve(&self, route: Route) -> String {
        let mut route = route;
        loop {
            self.state.send_replace(State::Up(route.clone()));
            match &route {
                Route::Quic(connection, peer, _) => {
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

    /// Checks without end whether anything is received: each end sends a keep-alive message every
    /// `keepalive_ms`.
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
                tracing::warn!(tunnel = %self.settings.name, path = %self.address, "path silent: new flows use another path");
            }
            self.is_silent.set(is_silent);
        }
    }

    /// While TLS is in use: waits until QUIC gets through, if the configuration allows it.
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

    /// Tries QUIC with a head start, then TLS over TCP in parallel.
    async fn whichever(&self, to: SocketAddr) -> Result<Route, Failure> {
        let mut quic = std::pin::pin!(self.quic(to));
        let quic_failure = match timeout(HEAD_START, &mut quic).await {
            Ok(Ok(route)) => return Ok(route),
            // If one end does not trust the other over QUIC, TCP would not change that.
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
            "UDP does not get through: flows use TLS over TCP until it does"
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
        let lanes = Lanes::new(connection.clone());
        Ok(Route::Quic(connection, peer, lanes))
    }

    async fn tls(&self, to: SocketAddr) -> Result<Route, Failure> {
        let name = self.settings.server_name(&self.address);
        let pool = Pool::connect(self.settings.clone(), to, &name, self.dialing.clone()).await?;
        Ok(Route::Tls(Rc::new(pool)))
    }
}

/// Combines two failures into one. The reason is that of the second transport, unless it is only a time-out.
fn also(first: Failure, second: &Failure) -> Failure {
    let reason = if second.reason == EndReason::ConnectTimeout { first.reason } else { second.reason };
    Failure::new(reason, format!("{first}; {second}"))
}

/// Returns the name in the peer's certificate.
pub fn quic_peer(connection: &Connection) -> Arc<str> {
    let certificates =
        connection.peer_identity().and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
    let name = certificates.as_deref().and_then(|certificates| certificates.first()).map(peer_name);
    // Both ends require a certificate, so there is one.
    name.unwrap_or_else(|| "?".to_owned()).into()
}
