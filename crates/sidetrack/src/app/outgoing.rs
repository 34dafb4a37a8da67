//! `[outgoing]`: listening ports that services ask for, each for one server, with the interface of Brane's proxy
//! (`POST /outgoing/new`). Each is a listener of kind reverse. Rules decide about its flows as about all others.

use super::node::Node;
use super::sockets::{self, Before, Bound};
use super::threads::Serving;
use super::upgrade::{Came, Heritage, PathPart};
use crate::carry::tls::ToServer;
use crate::config::{Config, Listener, ListenerKind, Outgoing, ReverseTarget};
use crate::intercept;
use crate::tls::towards;
use anyhow::Context;
use arc_swap::ArcSwap;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path as InPath, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, post};
use serde::{Deserialize, Serialize};
use sidetrack_core::flow::{Destination, Protocol};
use sidetrack_core::net::IpSet;
use sidetrack_core::time::Instant;
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

/// Longest request, bytes.
const REQUEST_MAX: usize = 64 << 10;

/// How long the workers may take to stop accepting.
const REST_PATIENCE: Duration = Duration::from_secs(5);

/// The request of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    /// The server: "https://host:port".
    address: String,
    /// TLS with the server. The service itself does not use TLS.
    #[serde(default)]
    tls: Option<WantedTls>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WantedTls {
    /// The location whose certificates are used.
    location: String,
    /// Whether to present our own certificate.
    #[serde(default)]
    use_client_auth: bool,
}

/// An open path.
struct Opened {
    wanted: Wanted,
    outgoing: Arc<intercept::outgoing::Outgoing>,
    name: Arc<str>,
    serving: Vec<Serving>,
}

impl Opened {
    /// Stops accepting. Flows continue.
    fn finish(self) {
        self.serving.into_iter().for_each(Serving::finish);
    }
}

/// Why no path was opened.
#[derive(Debug)]
struct Refused(StatusCode, anyhow::Error);

#[derive(Serialize)]
struct Said {
    error: String,
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let said = Said { error: format!("{:#}", self.1) };
        tracing::warn!(status = self.0.as_u16(), error = %said.error, "no path");
        (self.0, axum::Json(said)).into_response()
    }
}

fn bad(error: anyhow::Error) -> Refused {
    Refused(StatusCode::BAD_REQUEST, error)
}

/// A path that accepts nothing for a while: connections wait in its sockets.
struct Resting {
    wanted: Wanted,
    outgoing: Arc<intercept::outgoing::Outgoing>,
    name: Arc<str>,
    bound: Vec<Bound>,
}

/// All open paths.
pub(super) struct Paths {
    settings: Outgoing,
    node: Arc<Node>,
    config: Arc<ArcSwap<Config>>,
    opened: Mutex<BTreeMap<u16, Opened>>,
    /// While another process may go on with them.
    resting: Mutex<BTreeMap<u16, Resting>>,
}

/// Serves requests of services until `stop` becomes true.
///
/// # Errors
/// Fails if the listener cannot be registered with this runtime.
pub(super) async fn serve(
    paths: Arc<Paths>,
    listener: TcpListener,
    mut stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let router = Router::new()
        .route("/outgoing/new", post(open))
        .route("/outgoing/{port}", delete(close))
        .layer(DefaultBodyLimit::max(REQUEST_MAX))
        .with_state(paths);
    let serving = axum::serve(listener, router);
    tokio::select! {
        result = async move { serving.await } => result,
        _ = stop.wait_for(|stop| *stop) => Ok(()),
    }
}

/// Opens a path. The answer is its port, as text.
async fn open(State(paths): State<Arc<Paths>>, body: Bytes) -> Result<String, Refused> {
    let wanted = serde_json::from_slice(&body).context("the request is not {\"address\", \"tls\"} in JSON");
    paths.open(wanted.map_err(bad)?).map(|port| port.to_string())
}

async fn close(State(paths): State<Arc<Paths>>, InPath(port): InPath<u16>) -> Result<(), Refused> {
    match paths.close(port) {
        true => Ok(()),
        false => Err(Refused(StatusCode::NOT_FOUND, anyhow::anyhow!("port {port} is not a path"))),
    }
}

impl Paths {
    /// Starts without paths.
    pub(super) fn new(settings: Outgoing, node: Arc<Node>, config: Arc<ArcSwap<Config>>) -> Arc<Self> {
        Arc::new(Self { settings, node, config, opened: Mutex::default(), resting: Mutex::default() })
    }

    /// Accepts nothing any more, and keeps the sockets.
    pub(super) fn rest(&self) {
        let opened = std::mem::take(&mut *lock(&self.opened));
        let rested = opened.into_iter().map(|(port, Opened { wanted, outgoing, name, serving })| {
            let bound = serving.into_iter().map(|serving| serving.rest(REST_PATIENCE)).collect();
            (port, Resting { wanted, outgoing, name, bound })
        });
        *lock(&self.resting) = rested.collect();
    }

    /// Describes the paths that rest, with copies of their sockets.
    ///
    /// # Errors
    /// All descriptors are in use.
    pub(super) fn resting(&self) -> anyhow::Result<Vec<(PathPart, Vec<OwnedFd>)>> {
        let now = self.node.now();
        let part = |(port, path): (&u16, &Resting)| {
            let unused = now.since(path.outgoing.last_used());
            let part = PathPart {
                address: SocketAddr::new(self.settings.address, *port),
                wanted: serde_json::to_value(&path.wanted)?,
                unused_ms: u64::try_from(unused.as_millis()).unwrap_or(u64::MAX),
            };
            let sockets = path.bound.iter().flat_map(|bound| &bound.sockets);
            let fds = sockets.map(|socket| socket.as_fd().try_clone_to_owned());
            Ok((part, fds.collect::<std::io::Result<_>>()?))
        };
        lock(&self.resting).iter().map(part).collect()
    }

    /// Accepts again. `given_back`: the paths that are open in the process that gives everything back; those that are missing were
    /// closed there.
    pub(super) fn resume(&self, given_back: Option<&[Came]>) {
        let resting = std::mem::take(&mut *lock(&self.resting));
        let parts = given_back.map(|came| came.iter().filter_map(|came| came.body::<PathPart>().ok()));
        let is_open = parts.map(|parts| parts.map(|part| part.address.port()).collect::<Vec<_>>());
        let mut opened = lock(&self.opened);
        for (port, Resting { wanted, outgoing, name, bound }) in resting {
            if is_open.as_ref().is_some_and(|ports| !ports.contains(&port)) {
                continue;
            }
            let serving =
                bound.into_iter().map(|bound| self.node.serve(bound)).collect::<anyhow::Result<_>>();
            match serving {
                Ok(serving) => drop(opened.insert(port, Opened { wanted, outgoing, name, serving })),
                Err(error) => tracing::error!(port, "a path of a service is closed: {error:#}"),
            }
        }
        self.tell_node(&opened);
        drop(opened);
        if let Err(error) = self.take(given_back.unwrap_or_default()) {
            tracing::error!("paths of services are closed: {error:#}");
        }
    }

    /// Opens the paths of another process with their sockets, unless they are open here.
    ///
    /// # Errors
    /// A path cannot be opened, and why.
    pub(super) fn take(&self, came: &[Came]) -> anyhow::Result<()> {
        let mut opened = lock(&self.opened);
        for came in came {
            let PathPart { address, wanted, unused_ms } = came.body()?;
            let port = address.port();
            if opened.contains_key(&port) {
                continue;
            }
            let wanted: Wanted = serde_json::from_value(wanted)?;
            let server = server(&wanted.address)?;
            let tls = wanted.tls.as_ref().map(|tls| self.to_server(tls, &server)).transpose()?;
            let now = self.node.now();
            let last = now.as_nanos().saturating_sub(unused_ms.saturating_mul(1_000_000));
            let outgoing = Arc::new(intercept::outgoing::Outgoing::new(tls, Instant::from_nanos(last)));
            let fds = came.fds.iter().map(OwnedFd::try_clone).collect::<std::io::Result<_>>()?;
            let heritage = Heritage::of_sockets(&name(port), address, fds);
            let path = self.bind(port, wanted, server, (outgoing, Some(&heritage)));
            opened.insert(port, path.with_context(|| format!("the path at port {port}"))?);
        }
        self.tell_node(&opened);
        Ok(())
    }

    /// Returns the port of a path to what is wanted. Equal requests share a path.
    fn open(&self, wanted: Wanted) -> Result<u16, Refused> {
        let server = server(&wanted.address).map_err(bad)?;
        let tls = wanted.tls.as_ref().map(|tls| self.to_server(tls, &server)).transpose().map_err(bad)?;
        let mut opened = lock(&self.opened);
        let now = self.node.now();
        if let Some((port, path)) = opened.iter().find(|(_, path)| path.wanted == wanted) {
            path.outgoing.used(now);
            return Ok(*port);
        }
        let port = self.free_port(&mut opened).ok_or_else(|| {
            let ports = &self.settings.ports;
            let what = "free one by DELETE /outgoing/PORT, or give [outgoing] more";
            let error = anyhow::anyhow!("the ports {}-{} are all taken: {what}", ports.start(), ports.end());
            Refused(StatusCode::INSUFFICIENT_STORAGE, error)
        })?;
        let outgoing = Arc::new(intercept::outgoing::Outgoing::new(tls, now));
        let path = self.bind(port, wanted, server, (outgoing, None));
        let path = path.map_err(|error| Refused(StatusCode::INTERNAL_SERVER_ERROR, error))?;
        tracing::info!(port, to = %path.wanted.address, tls = path.wanted.tls.is_some(), "path");
        opened.insert(port, path);
        self.tell_node(&opened);
        Ok(port)
    }

    /// Closes a path; its flows continue. Returns false if there is none.
    fn close(&self, port: u16) -> bool {
        let mut opened = lock(&self.opened);
        let found = opened.remove(&port);
        self.tell_node(&opened);
        found.map(Opened::finish).is_some()
    }

    /// Tells the node about our ports, because flows to them would be loops.
    fn tell_node(&self, opened: &BTreeMap<u16, Opened>) {
        self.node.set_paths(opened.keys().map(|port| (self.settings.address, *port).into()).collect());
    }

    /// Returns a free port. If all are taken, closes the path that was unused for the longest time, if that time
    /// is long enough: a service that still uses its port would reach another server.
    fn free_port(&self, opened: &mut BTreeMap<u16, Opened>) -> Option<u16> {
        let free = |port: &u16| TcpListener::bind((self.settings.address, *port)).is_ok();
        let mut unknown = self.settings.ports.clone().filter(|port| !opened.contains_key(port));
        if let Some(port) = unknown.find(free) {
            return Some(port);
        }
        let patience = Duration::from_millis(self.settings.free_after_ms);
        let now = self.node.now();
        let is_idle = |path: &Opened| {
            now.since(path.outgoing.last_used()) >= patience && !self.node.has_flow(&path.name)
        };
        let idle = opened.iter().filter(|(_, path)| is_idle(path));
        let port = *idle.min_by_key(|(_, path)| path.outgoing.last_used())?.0;
        if let Some(path) = opened.remove(&port) {
            path.finish();
        }
        Some(port)
    }

    fn bind(
        &self,
        port: u16,
        wanted: Wanted,
        server: Destination,
        (outgoing, heritage): (Arc<intercept::outgoing::Outgoing>, Option<&Heritage>),
    ) -> anyhow::Result<Opened> {
        let name: Arc<str> = name(port).into();
        let listener = Listener {
            name: name.clone(),
            kind: ListenerKind::Reverse(ReverseTarget::Fixed(server)),
            addresses: vec![SocketAddr::new(self.settings.address, port)],
            accept_proxy_protocol: IpSet::default(),
            mptcp: false,
            protocol: Protocol::Tcp,
        };
        let before = Before { own: &[], heritage, passed: &self.node.parent.passed };
        let mut bound = sockets::bind(&listener, &self.config.load(), (self.node.workers(), None), before)?;
        for bound in &mut bound {
            let listening = Arc::get_mut(&mut bound.listening).context("somebody has the new listener")?;
            listening.outgoing = Some(outgoing.clone());
        }
        let serving = bound.into_iter().map(|bound| self.node.serve(bound)).collect::<anyhow::Result<_>>()?;
        Ok(Opened { wanted, outgoing, name, serving })
    }

    /// Returns TLS with the server, with the certificates of a location.
    fn to_server(&self, tls: &WantedTls, server: &Destination) -> anyhow::Result<ToServer> {
        let folder = self.settings.certificates.as_ref();
        let folder = folder.context("TLS is asked for, and [outgoing] names no folder of `certificates`")?;
        let location = &tls.location;
        let fits = |c: char| c.is_alphanumeric() || "-_.".contains(c);
        anyhow::ensure!(
            !location.is_empty() && !location.starts_with('.') && location.chars().all(fits),
            "'{location}' is not a location: use letters, digits and - _ ."
        );
        let read = |name: &str| read(&folder.join(location).join(name));
        let identity = if tls.use_client_auth { Some(read("client-id.pem")?) } else { None };
        let config = towards(&read("ca.pem")?, identity.as_deref())
            .with_context(|| format!("location '{location}'"))?;
        ToServer::new(config, server.host.clone())
            .with_context(|| format!("no certificate can be for {server}"))
    }
}

/// The name of a path's listener.
fn name(port: u16) -> String {
    format!("outgoing-{port}")
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Parses the server from an address: a scheme, a host, and a port unless the scheme has a default.
fn server(address: &str) -> anyhow::Result<Destination> {
    let (scheme, rest) = address
        .split_once("://")
        .with_context(|| format!("'{address}' is not an address: write https://host:port"))?;
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let port = match scheme {
        "https" => Some(443),
        "http" => Some(80),
        _ => None,
    };
    host.parse::<Destination>().or_else(|error| {
        let with_port = port.map(|port| format!("{host}:{port}")).filter(|_| !host.is_empty());
        with_port.and_then(|text| text.parse().ok()).with_context(|| format!("'{address}': {error}"))
    })
}

#[cfg(test)]
mod tests {
    use super::server;

    #[test]
    fn addresses_have_a_scheme_and_a_port_of_their_own_or_of_the_scheme() {
        for (address, wanted) in [
            ("https://data.example:8443", "data.example:8443"),
            ("https://data.example", "data.example:443"),
            ("http://192.0.2.1/path?x", "192.0.2.1:80"),
            ("https://[2001:db8::1]", "[2001:db8::1]:443"),
            ("grpc://data.example:50051", "data.example:50051"),
        ] {
            assert_eq!(server(address).expect(address).to_string(), wanted);
        }
        for wrong in
            ["data.example:80", "https://", "grpc://data.example", "https://data.example:x", "://", ""]
        {
            assert!(server(wrong).is_err(), "{wrong}");
        }
    }
}
