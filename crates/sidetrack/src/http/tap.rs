//! TLS that is opened: we speak to the client in its server's name, with the consent of whoever installed our authority,
//! and to the server as any client does, believing nobody whom it would not believe.

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
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Sessions with servers that are kept to be resumed.
const SESSIONS_MAX: usize = 4096;

/// See the module: what all connections of a listener share.
pub struct Tap {
    settings: Arc<config::Tap>,
    /// Without the certificate of a host.
    clients: ServerConfig,
    servers: ClientConfig,
    /// By host and whether HTTP/1.1 alone is offered: rustls resumes a session only with the very configuration that
    /// made it.
    towards: Mutex<HashMap<(Host, bool), Arc<Towards>>>,
    learnt: Mutex<Learnt>,
    har: Option<Arc<Har>>,
}

/// How TLS is spoken with one server.
struct Towards {
    config: Arc<ClientConfig>,
    /// It has asked for a certificate of ours.
    wants: Arc<AtomicBool>,
}

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tap")
    }
}

impl Tap {
    /// Makes what a configuration says ready.
    ///
    /// # Errors
    /// The file for secrets cannot be written, or the system has no authorities.
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

    /// Whether connections to this server may be opened, as far as can be said before the client has spoken.
    ///
    /// # Errors
    /// Why it passes untouched.
    pub fn consider(&self, to: &Destination) -> Result<(), Untouched> {
        self.settings.rules.consider(Some(&to.host), to.port)
    }

    /// The host a connection is opened for, with what we show the client.
    ///
    /// # Errors
    /// Why it passes untouched.
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

    /// Remembers how a client's handshake went; what the record says of one that failed.
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

    /// Where requests are written down, if they are.
    pub const fn har(&self) -> Option<&Arc<Har>> {
        self.har.as_ref()
    }

    /// How TLS is spoken with a server.
    fn towards(&self, host: &Host, is_alone: bool) -> Arc<Towards> {
        let mut known = self.towards.lock().unwrap_or_else(PoisonError::into_inner);
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
        self.learnt.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is spoken inside, the better first.
fn protocols() -> Vec<Vec<u8>> {
    vec![b"h2".to_vec(), b"http/1.1".to_vec()]
}

/// What leads from a connection to a server to TLS with it.
#[derive(Clone, Debug)]
pub struct Secure {
    /// Whom we believe.
    pub tap: Arc<Tap>,
    /// The host that has to prove who it is.
    pub host: Host,
    /// The connection is for one request that changes its protocol: HTTP/1.1 alone.
    pub is_alone: bool,
}

impl Secure {
    /// TLS with the server.
    ///
    /// # Errors
    /// `certificate`: the server does not prove who it is; `tls_failed`: it speaks otherwise than we do.
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
        // Another connection to the same host may be told of it first: what is learnt is the same.
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

/// The certificate of one host.
#[derive(Debug)]
struct Leaf(Arc<CertifiedKey>);

impl ResolvesServerCert for Leaf {
    fn resolve(&self, _: Shown<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

/// What stands where [`Leaf`] is put for each connection.
#[derive(Debug)]
struct NoLeaf;

impl ResolvesServerCert for NoLeaf {
    fn resolve(&self, _: Shown<'_>) -> Option<Arc<CertifiedKey>> {
        None
    }
}

/// Has no certificate, and notes that one was asked for.
#[derive(Debug)]
struct NoCertificate(Arc<AtomicBool>);

impl ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.store(true, Relaxed);
        None
    }

    fn has_certs(&self) -> bool {
        // Else nobody would ask.
        true
    }
}

/// Whether a handshake failed because the client did not like our certificate: it says so, or leaves without a word
/// when it has seen it.
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

/// Why TLS with a server failed, for the record and in words for whoever sees the page.
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
        // A foreign key under the name of a trusted authority signs for nothing.
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
