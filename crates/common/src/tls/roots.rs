//! Trusted certificates: the system's authorities, as every TLS client uses them, and files that the user names.

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

/// The paths where distributions keep the PEM bundle of all authorities.
pub const BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Returns the certificates in a PEM text; empty if there are none.
pub fn certificates_in(pem: &str) -> Vec<CertificateDer<'static>> {
    certificates(pem).unwrap_or_default()
}

/// The file with the system's authorities: `SSL_CERT_FILE` if set, otherwise the distribution's.
pub fn system_bundle() -> Option<PathBuf> {
    let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    named.into_iter().chain(BUNDLES.map(PathBuf::from)).find(|path| path.is_file())
}

/// The trusted certificates: authorities that sign for others, certificates that are valid only for themselves, and hosts
/// whose certificates are not verified.
#[derive(Clone)]
pub struct Roots {
    authorities: Arc<RootCertStore>,
    /// The certificates of a file that the user named. A peer may show one of them itself.
    named: Arc<[CertificateDer<'static>]>,
    /// Servers from which any certificate is accepted.
    unverified: Arc<[Host]>,
}

impl Roots {
    /// The authorities of this system, and the certificates of another PEM text.
    ///
    /// # Errors
    /// The text has no certificate.
    pub fn of_system_and(more_pem: Option<&str>) -> Result<Self, TlsError> {
        let mut authorities = RootCertStore::empty();
        if let Some(pem) = system_bundle().and_then(|path| std::fs::read_to_string(path).ok()) {
            // If rustls cannot read one certificate of the bundle, the others are still used.
            authorities.add_parsable_certificates(certificates(&pem).unwrap_or_default());
        }
        Self::with_named(authorities, more_pem)
    }

    /// Only the certificates of a PEM text.
    ///
    /// # Errors
    /// The text has no certificate.
    pub fn of(pem: &str) -> Result<Self, TlsError> {
        Self::with_named(RootCertStore::empty(), Some(pem))
    }

    fn with_named(mut authorities: RootCertStore, pem: Option<&str>) -> Result<Self, TlsError> {
        let named = pem.map(certificates).transpose().map_err(TlsError::Authority)?.unwrap_or_default();
        for certificate in &named {
            // rustls would accept any certificate as an authority for all names, even one that may not sign.
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

    /// The configuration for connections to servers, by TLS 1.2 and 1.3.
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

    /// Returns the verifier of servers' certificates.
    pub(super) fn verifier(&self) -> Result<Arc<dyn ServerCertVerifier>, TlsError> {
        let of_authorities = WebPkiServerVerifier::builder_with_provider(self.anchors()?, provider()).build();
        let of_authorities = of_authorities.map_err(|error| useless(&error))?;
        Ok(Arc::new(own::Servers { of_authorities, named: self.own(), unverified: self.unverified.clone() }))
    }

    /// Returns the verifier of clients' certificates.
    pub(super) fn client_verifier(&self) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
        let of_authorities = WebPkiClientVerifier::builder_with_provider(self.anchors()?, provider()).build();
        let of_authorities = of_authorities.map_err(|error| useless(&error))?;
        Ok(Arc::new(own::Clients { of_authorities, named: self.own() }))
    }

    /// The authorities. If there are none, rustls still requires one: a named certificate, which is then never consulted.
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
