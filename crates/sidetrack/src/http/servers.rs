//! TLS with servers: whom we trust, the configuration for each server, and the sessions that are kept with it.

use super::keylog::KeyLogs;
use super::tap::Tap;
use crate::carry::tls::{Tls, reason};
use crate::carry::{Failure, Stream};
use crate::live::Clock;
use crate::tls::{Roots, TlsError, server_name};
use rustls::client::{ResolvesClientCert, Resumption};
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, ClientConfig, Error, NoKeyLog, SignatureScheme};
use sidetrack_core::carrier::Hop;
use sidetrack_core::flow::{EndReason, Host};
use sidetrack_core::http::h3;
use sidetrack_core::placeholder::Secrets;
use sidetrack_sys::sync::lock;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// Most sessions with servers that are kept for resumption.
const SESSIONS_MAX: usize = 4096;

/// The versions of HTTP that a connection may speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Versions {
    /// HTTP/2 and HTTP/1.1.
    Any,
    /// HTTP/1.1: the connection is for one request that needs it alone.
    Http1,
    /// HTTP/3, over QUIC.
    Http3,
}

/// TLS with servers, shared by the connections of a listener.
pub struct Servers {
    base: ClientConfig,
    /// The key log has no keys of connections to servers that get these.
    secrets: Option<Arc<Secrets>>,
    /// rustls resumes a session only with the configuration that made it, so configurations are kept.
    towards: Mutex<HashMap<(Host, Versions), Arc<Towards>>>,
}

/// The TLS configuration for one server.
struct Towards {
    config: Arc<ClientConfig>,
    /// The server has asked for a client certificate.
    wants: Arc<AtomicBool>,
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Servers")
    }
}

impl Servers {
    /// Makes it from a configuration that says whom to trust.
    pub(super) fn new(mut base: ClientConfig, secrets: Option<Arc<Secrets>>) -> Arc<Self> {
        base.alpn_protocols = protocols();
        base.resumption = Resumption::in_memory_sessions(SESSIONS_MAX);
        Arc::new(Self { base, secrets, towards: Mutex::default() })
    }

    fn towards(&self, host: &Host, versions: Versions) -> Arc<Towards> {
        let mut known = lock(&self.towards);
        let key = (host.clone(), versions);
        if let Some(towards) = known.get(&key) {
            return towards.clone();
        }
        let wants = Arc::new(AtomicBool::new(false));
        let mut config = self.base.clone();
        if self.secrets.as_ref().is_some_and(|secrets| secrets.is_for(host)) {
            config.key_log = Arc::new(NoKeyLog);
        }
        config.client_auth_cert_resolver = Arc::new(NoCertificate(wants.clone()));
        match versions {
            Versions::Any => {}
            Versions::Http1 => config.alpn_protocols.retain(|protocol| protocol != b"h2"),
            Versions::Http3 => config.alpn_protocols = vec![h3::ALPN.to_vec()],
        }
        if known.len() >= SESSIONS_MAX {
            known.clear();
        }
        let towards = Arc::new(Towards { config: Arc::new(config), wants });
        known.insert(key, towards.clone());
        towards
    }
}

/// The protocols that are offered, the preferred one first.
pub(super) fn protocols() -> Vec<Vec<u8>> {
    vec![b"h2".to_vec(), b"http/1.1".to_vec()]
}

/// Parameters of TLS with a server.
#[derive(Clone, Debug)]
pub struct Secure {
    /// The roots to trust, and the kept sessions.
    pub servers: Arc<Servers>,
    /// The interception that it is a part of. `None`: the configuration names the server.
    pub tap: Option<Arc<Tap>>,
    /// The host whose certificate is required.
    pub host: Host,
    /// The connection is for one request that needs it alone: only HTTP/1.1 is offered.
    pub is_alone: bool,
}

impl Secure {
    /// TLS with the server of a reverse proxy.
    ///
    /// # Errors
    /// No certificate can be trusted.
    pub fn to(server: &Hop) -> Result<Self, TlsError> {
        let roots = match &server.ca_pem {
            Some(pem) => Roots::of(pem),
            None => Roots::of_system_and(None),
        };
        let mut client = roots?.client()?;
        client.key_log = Arc::new(KeyLogs::default());
        let servers = Servers::new(client, None);
        Ok(Self { servers, tap: None, host: server.address.host.clone(), is_alone: false })
    }

    /// Makes TLS with the server.
    ///
    /// # Errors
    /// `certificate`: the server's certificate is not valid for the host; `tls_failed`: any other failure.
    pub async fn shake_hands(&self, stream: Stream, early: Vec<u8>, clock: Clock) -> Result<Tls, Failure> {
        let host = &self.host;
        let name = server_name(host).ok_or_else(|| {
            Failure::new(EndReason::Certificate, format!("no certificate can be for {host}"))
        })?;
        let versions = if self.is_alone { Versions::Http1 } else { Versions::Any };
        let towards = self.servers.towards(host, versions);
        let made = Tls::client(stream, towards.config.clone(), name, early);
        let shaken = match made {
            Ok(mut tls) => tls.handshake().await.map(|()| tls),
            Err(error) => Err(error),
        };
        // A concurrent handshake with the host may see this flag first, but learns the same.
        let wants = towards.wants.swap(false, Relaxed);
        if let Some(tap) = self.tap.as_ref().filter(|_| wants) {
            tap.wants_certificate(host, clock);
        }
        shaken.map_err(|error| {
            let (why, what) = explained(&error, self.tap.is_some());
            let next = match (wants, &self.tap) {
                (true, Some(_)) => "; it asks for a client certificate: the next connection passes untouched",
                (true, None) => "; it asks for a client certificate, and there is none",
                (false, _) => "",
            };
            Failure::new(why, format!("TLS with {host}: {what}{next}"))
        })
    }

    /// Returns the configuration for HTTP/3.
    pub fn http3(&self) -> ClientConfig {
        (*self.servers.towards(&self.host, Versions::Http3).config).clone()
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

/// Why TLS with a server failed: the end reason, and the text for the record and the error page.
fn explained(error: &io::Error, is_tapped: bool) -> (EndReason, String) {
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
            let place =
                if is_tapped { "in `trust` of [tap], or with `run --trust`" } else { "after `?ca=` in `to`" };
            format!(
                "its certificate is not trusted: no trusted authority signed it. To accept it, name the certificate in a file \
                 {place}"
            )
        }
        Bad::NotValidForName | Bad::NotValidForNameContext { .. } => {
            format!("its certificate is for others ({bad})")
        }
        other => format!("its certificate is not trusted: {other}"),
    };
    (EndReason::Certificate, what)
}
