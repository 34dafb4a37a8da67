//! Intercepts TLS: we speak to the client as its server, with the consent of the person who installed our authority. To the
//! server we speak as a client, and trust only the roots that the configuration gives.

use super::har::Har;
use super::keylog::KeyLogs;
use super::servers::{Servers, protocols};
use crate::carry::tls::reason;
use crate::config;
use crate::live::Clock;
use crate::tls::{TlsError, provider};
use rustls::server::{ClientHello as Shown, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, Error, ServerConfig};
use sidetrack_core::flow::{Destination, Host};
use sidetrack_core::http::sni::ClientHello;
use sidetrack_core::http::tap::{Learnt, Untouched};
use sidetrack_core::placeholder::Secrets;
use sidetrack_sys::sync::lock;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

/// TLS interception of one listener, shared by its connections.
pub struct Tap {
    settings: Arc<config::Tap>,
    /// The server side of TLS, without a certificate.
    clients: ServerConfig,
    servers: Arc<Servers>,
    learnt: Mutex<Learnt>,
    har: Option<Arc<Har>>,
}

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tap")
    }
}

impl Tap {
    /// Prepares interception as configured.
    ///
    /// # Errors
    /// The key log cannot be written, or the system has no root certificates.
    pub fn new(settings: Arc<config::Tap>) -> Result<Self, TlsError> {
        let mut servers = settings.roots.client()?;
        let mut clients = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(NoLeaf));
        clients.alpn_protocols = protocols();
        clients.ticketer = rustls::crypto::ring::Ticketer::new()?;
        clients.send_tls13_tickets = 1;
        let log = KeyLogs::open(settings.keylog.as_deref()).map_err(|error| {
            let path = settings.keylog.as_deref().unwrap_or(Path::new(""));
            TlsError::Authority(format!("cannot write {}: {error}", path.display()))
        })?;
        (clients.key_log, servers.key_log) = (log.clone(), log);
        let har = settings.har.as_deref().map(|path| {
            let cannot = |error| TlsError::Authority(format!("cannot write {}: {error}", path.display()));
            Har::create(path, settings.har_bodies_max).map(Arc::new).map_err(cannot)
        });
        let har = har.transpose()?;
        let servers = Servers::new(servers, settings.secrets.clone());
        Ok(Self { settings, clients, servers, learnt: Mutex::default(), har })
    }

    /// Whether connections to this server may be intercepted, as far as is known before the client's first bytes.
    ///
    /// # Errors
    /// Why it is forwarded unchanged.
    pub fn consider(&self, to: &Destination) -> Result<(), Untouched> {
        self.settings.rules.consider(Some(&to.host), to.port)
    }

    /// Returns the host that is impersonated, and the TLS configuration for the client.
    ///
    /// # Errors
    /// Why it is forwarded unchanged.
    pub fn choose(
        &self,
        to: &Destination,
        hello: &ClientHello,
        client: IpAddr,
        clock: Clock,
    ) -> Result<(Host, Arc<ServerConfig>), Untouched> {
        let host = self.settings.rules.choose(&to.host, hello)?;
        if let Some(why) = self.learnt().why(clock.now(), client, &host) {
            return Err(why);
        }
        let leaf = self.settings.signer.leaf(&host).ok_or(Untouched::NotAllowed)?;
        let mut config = self.clients.clone();
        config.cert_resolver = Arc::new(Leaf(leaf));
        Ok((host, Arc::new(config)))
    }

    /// Notes how the client's handshake went; returns the text for the record.
    pub fn shook_hands(
        &self,
        client: IpAddr,
        host: &Host,
        error: Option<&io::Error>,
        clock: Clock,
    ) -> String {
        let Some(error) = error else {
            self.learnt().accepted(client, host);
            return format!("opened for {host}");
        };
        if !is_refusal(error) {
            return format!("TLS with the client failed: {error}");
        }
        let passes = self.learnt().refused(clock.now(), client, host);
        let next = if passes { ": from now on its connections to this host pass untouched" } else { "" };
        format!("the client does not take our certificate for {host} ({error}){next}")
    }

    /// The HAR archive, if requests are archived.
    pub const fn har(&self) -> Option<&Arc<Har>> {
        self.har.as_ref()
    }

    /// The secrets of the command, if it has some.
    pub(super) fn secrets(&self) -> Option<&Arc<Secrets>> {
        self.settings.secrets.as_ref()
    }

    /// TLS with servers.
    pub(super) const fn servers(&self) -> &Arc<Servers> {
        &self.servers
    }

    /// Notes that a server asks for a client certificate: the next connection to it passes unchanged.
    pub(super) fn wants_certificate(&self, host: &Host, clock: Clock) {
        self.learnt().wants_certificate(clock.now(), host);
    }

    fn learnt(&self) -> MutexGuard<'_, Learnt> {
        lock(&self.learnt)
    }
}

/// Always shows the certificate of one host.
#[derive(Debug)]
struct Leaf(Arc<CertifiedKey>);

impl ResolvesServerCert for Leaf {
    fn resolve(&self, _: Shown<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

/// A placeholder: each connection replaces it by its [`Leaf`].
#[derive(Debug)]
struct NoLeaf;

impl ResolvesServerCert for NoLeaf {
    fn resolve(&self, _: Shown<'_>) -> Option<Arc<CertifiedKey>> {
        None
    }
}

/// Whether a handshake failed because the client rejects our certificate: it sends an alert, or closes after it has
/// seen the certificate.
fn is_refusal(error: &io::Error) -> bool {
    use AlertDescription as Alert;
    match reason(error) {
        Some(Error::AlertReceived(alert)) => matches!(
            alert,
            Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateRevoked
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::UnknownCA
                | Alert::AccessDenied
        ),
        Some(_) => false,
        None => matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
        ),
    }
}
