//! Intercepts TLS: we speak to the client as its server, with the consent of the person who installed our authority. To the
//! server we speak as a client, and trust only the roots that the configuration gives.

use super::har::Har;
use super::keylog::KeyLogFile;
use crate::carry::tls::{Tls, reason};
use crate::carry::{Failure, Stream};
use crate::config;
use crate::live::Clock;
use crate::tls::{TlsError, provider, server_name};
use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello as Shown, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, CertificateError, ClientConfig, Error, ServerConfig, SignatureScheme};
use sidetrack_core::flow::{Destination, EndReason, Host};
use sidetrack_core::http::sni::ClientHello;
use sidetrack_core::http::tap::{Learnt, Untouched};
use sidetrack_sys::sync::lock;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

/// Most sessions with servers that are kept for resumption.
const SESSIONS_MAX: usize = 4096;

/// TLS interception of one listener, shared by its connections.
pub struct Tap {
    settings: Arc<config::Tap>,
    /// The server side of TLS, without a certificate.
    clients: ServerConfig,
    servers: ClientConfig,
    /// By host, and whether only HTTP/1.1 is offered. rustls resumes a session only with the configuration that made it, so
    /// configurations are kept.
    towards: Mutex<HashMap<(Host, bool), Arc<Towards>>>,
    learnt: Mutex<Learnt>,
    har: Option<Arc<Har>>,
}

/// The TLS configuration for one server.
struct Towards {
    config: Arc<ClientConfig>,
    /// The server has asked for a client certificate.
    wants: Arc<AtomicBool>,
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
        servers.alpn_protocols = protocols();
        servers.resumption = rustls::client::Resumption::in_memory_sessions(SESSIONS_MAX);
        let mut clients = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(NoLeaf));
        clients.alpn_protocols = protocols();
        clients.ticketer = rustls::crypto::ring::Ticketer::new()?;
        clients.send_tls13_tickets = 1;
        if let Some(path) = &settings.keylog {
            let log = KeyLogFile::open(path)
                .map_err(|error| TlsError::Authority(format!("cannot write {}: {error}", path.display())))?;
            let log = Arc::new(log);
            (clients.key_log, servers.key_log) = (log.clone(), log);
        }
        let har = settings.har.as_deref().map(|path| {
            let cannot = |error| TlsError::Authority(format!("cannot write {}: {error}", path.display()));
            Har::create(path).map(Arc::new).map_err(cannot)
        });
        let har = har.transpose()?;
        Ok(Self { settings, clients, servers, towards: Mutex::default(), learnt: Mutex::default(), har })
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

    /// The TLS configuration for a server.
    fn towards(&self, host: &Host, is_alone: bool) -> Arc<Towards> {
        let mut known = lock(&self.towards);
        let key = (host.clone(), is_alone);
        if let Some(towards) = known.get(&key) {
            return towards.clone();
        }
        let wants = Arc::new(AtomicBool::new(false));
        let mut config = self.servers.clone();
        config.client_auth_cert_resolver = Arc::new(NoCertificate(wants.clone()));
        if is_alone {
            config.alpn_protocols.retain(|protocol| protocol != b"h2");
        }
        if known.len() >= SESSIONS_MAX {
            known.clear();
        }
        let towards = Arc::new(Towards { config: Arc::new(config), wants });
        known.insert(key, towards.clone());
        towards
    }

    fn learnt(&self) -> MutexGuard<'_, Learnt> {
        lock(&self.learnt)
    }
}

/// The protocols that are offered, the preferred one first.
fn protocols() -> Vec<Vec<u8>> {
    vec![b"h2".to_vec(), b"http/1.1".to_vec()]
}

/// Parameters of TLS with a server.
#[derive(Clone, Debug)]
pub struct Secure {
    /// The roots to trust, and the kept sessions.
    pub tap: Arc<Tap>,
    /// The host whose certificate is required.
    pub host: Host,
    /// The connection is for one request that needs it alone: only HTTP/1.1 is offered.
    pub is_alone: bool,
}

impl Secure {
    /// Makes TLS with the server.
    ///
    /// # Errors
    /// `certificate`: the server's certificate is not valid for the host; `tls_failed`: any other failure.
    pub async fn shake_hands(&self, stream: Stream, early: Vec<u8>, clock: Clock) -> Result<Tls, Failure> {
        let host = &self.host;
        let name = server_name(host).ok_or_else(|| {
            Failure::new(EndReason::Certificate, format!("no certificate can be for {host}"))
        })?;
        let towards = self.tap.towards(host, self.is_alone);
        let made = Tls::client(stream, towards.config.clone(), name, early);
        let shaken = match made {
            Ok(mut tls) => tls.handshake().await.map(|()| tls),
            Err(error) => Err(error),
        };
        // A concurrent handshake with the host may see this flag first, but learns the same.
        let wants = towards.wants.swap(false, Relaxed);
        if wants {
            self.tap.learnt().wants_certificate(clock.now(), host);
        }
        shaken.map_err(|error| {
            let (why, what) = explained(&error);
            let next = if wants {
                "; it asks for a client certificate: the next connection passes untouched"
            } else {
                ""
            };
            Failure::new(why, format!("TLS with {host}: {what}{next}"))
        })
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

/// Offers no certificate, and notes that one was requested.
#[derive(Debug)]
struct NoCertificate(Arc<AtomicBool>);

impl ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.store(true, Relaxed);
        None
    }

    fn has_certs(&self) -> bool {
        // With false, rustls would not call `resolve`.
        true
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

/// Why TLS with a server failed: the end reason, and the text for the record and the error page.
fn explained(error: &io::Error) -> (EndReason, String) {
    use CertificateError as Bad;
    let Some(why) = reason(error) else { return (EndReason::TlsFailed, error.to_string()) };
    let Error::InvalidCertificate(bad) = why else { return (EndReason::TlsFailed, why.to_string()) };
    let what = match bad {
        Bad::Expired | Bad::ExpiredContext { .. } => "its certificate has expired".to_owned(),
        Bad::NotValidYet | Bad::NotValidYetContext { .. } => {
            "its certificate is not valid yet, or our clock is wrong".to_owned()
        }
        Bad::Revoked => "its certificate has been revoked".to_owned(),
        // A wrong key under the name of a trusted authority cannot have made a valid signature.
        Bad::UnknownIssuer | Bad::BadSignature => {
            "its certificate is not trusted: no trusted authority signed it. To accept it, name the certificate in a file \
             in `trust` of [tap], or with `run --trust`"
                .to_owned()
        }
        Bad::NotValidForName | Bad::NotValidForNameContext { .. } => {
            format!("its certificate is for others ({bad})")
        }
        other => format!("its certificate is not trusted: {other}"),
    };
    (EndReason::Certificate, what)
}
