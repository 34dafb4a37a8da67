//! What proves who a peer is: the authorities of this system, as every TLS client has them, and files that a person names.

mod own;

use super::{TlsError, certificates, provider};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::CertificateDer;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, RootCertStore};
use sidetrack_core::flow::Host;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Where distributions keep the bundle of all authorities, in PEM.
pub const BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The certificates of a text in PEM; none where there is none.
pub fn certificates_in(pem: &str) -> Vec<CertificateDer<'static>> {
    certificates(pem).unwrap_or_default()
}

/// The file with the authorities of this system: what `SSL_CERT_FILE` names, else that of the distribution.
pub fn system_bundle() -> Option<PathBuf> {
    let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    named.into_iter().chain(BUNDLES.map(PathBuf::from)).find(|path| path.is_file())
}

/// What proves who a peer is: authorities that sign for others, certificates that count for themselves only, and hosts
/// whose certificates are not verified.
#[derive(Clone)]
pub struct Roots {
    authorities: Arc<RootCertStore>,
    /// The certificates of a file that a person named: a peer may show one of them itself.
    named: Arc<[CertificateDer<'static>]>,
    /// Any certificate is accepted from these servers.
    unverified: Arc<[Host]>,
}

impl Roots {
    /// Those of this system, and those of another text in PEM.
    ///
    /// # Errors
    /// The text has no certificate.
    pub fn of_system_and(more_pem: Option<&str>) -> Result<Self, TlsError> {
        let mut authorities = RootCertStore::empty();
        if let Some(pem) = system_bundle().and_then(|path| std::fs::read_to_string(path).ok()) {
            // A bundle may hold one that rustls cannot read; the others count.
            authorities.add_parsable_certificates(certificates(&pem).unwrap_or_default());
        }
        Self::with_named(authorities, more_pem)
    }

    /// Those of a text in PEM alone.
    ///
    /// # Errors
    /// The text has no certificate.
    pub fn of(pem: &str) -> Result<Self, TlsError> {
        Self::with_named(RootCertStore::empty(), Some(pem))
    }

    fn with_named(mut authorities: RootCertStore, pem: Option<&str>) -> Result<Self, TlsError> {
        let named = pem.map(certificates).transpose().map_err(TlsError::Authority)?.unwrap_or_default();
        for certificate in &named {
            // rustls would take any certificate as an authority for all names, also one that may not sign.
            let mut one = RootCertStore::empty();
            one.add(certificate.clone())?;
            if own::may_sign(certificate) {
                authorities.add(certificate.clone())?;
            }
        }
        Ok(Self { authorities: Arc::new(authorities), named: named.into(), unverified: Arc::default() })
    }

    /// Accepts any certificate from these servers, too.
    #[must_use]
    pub fn without_verifying(mut self, hosts: impl IntoIterator<Item = Host>) -> Self {
        self.unverified = self.unverified.iter().cloned().chain(hosts).collect();
        self
    }

    /// For connections to servers, by TLS 1.2 and 1.3.
    ///
    /// # Errors
    /// There is no certificate: every server would be rejected.
    pub fn client(&self) -> Result<ClientConfig, TlsError> {
        let verifier = self.verifier()?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_no_client_auth();
        Ok(config)
    }

    /// Returns what checks the certificates of servers.
    pub(super) fn verifier(&self) -> Result<Arc<dyn ServerCertVerifier>, TlsError> {
        let of_authorities = WebPkiServerVerifier::builder_with_provider(self.anchors()?, provider()).build();
        let of_authorities = of_authorities.map_err(|error| useless(&error))?;
        Ok(Arc::new(own::Servers { of_authorities, named: self.own(), unverified: self.unverified.clone() }))
    }

    /// Returns what checks the certificates of clients.
    pub(super) fn client_verifier(&self) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
        let of_authorities = WebPkiClientVerifier::builder_with_provider(self.anchors()?, provider()).build();
        let of_authorities = of_authorities.map_err(|error| useless(&error))?;
        Ok(Arc::new(own::Clients { of_authorities, named: self.own() }))
    }

    /// The authorities; rustls asks for one where there is none, but it is not asked then.
    fn anchors(&self) -> Result<Arc<RootCertStore>, TlsError> {
        let mut anchors = self.authorities.clone();
        if anchors.is_empty() {
            let first = self.named.first().ok_or_else(|| useless(&"there is no authority"))?;
            Arc::make_mut(&mut anchors).add(first.clone())?;
        }
        Ok(anchors)
    }

    fn own(&self) -> own::Named {
        own::Named { certificates: self.named.clone(), alone: self.authorities.is_empty() }
    }
}

fn useless(error: &dyn fmt::Display) -> TlsError {
    TlsError::Authority(format!(
        "{error}: install the package ca-certificates, or name a file of authorities"
    ))
}

impl fmt::Debug for Roots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Roots({}, {} named, {} unverified)",
            self.authorities.len(),
            self.named.len(),
            self.unverified.len()
        )
    }
}
