//! Whom the world believes: the authorities of this system, as every TLS client has them.

mod own;

use super::{TlsError, certificates, provider};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, RootCertStore};
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

/// Authorities whose servers are believed, and certificates that are believed themselves.
#[derive(Clone)]
pub struct Roots {
    authorities: Arc<RootCertStore>,
    /// Those that were named: a server may show one of them as it is.
    named: Arc<[CertificateDer<'static>]>,
}

impl Roots {
    /// Those of this system, and those of another text in PEM.
    ///
    /// # Errors
    /// The text has no certificate.
    pub fn of_system_and(more_pem: Option<&str>) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        if let Some(pem) = system_bundle().and_then(|path| std::fs::read_to_string(path).ok()) {
            // A bundle may hold one that rustls cannot read; the others count.
            roots.add_parsable_certificates(certificates(&pem).unwrap_or_default());
        }
        let named = more_pem.map(certificates).transpose().map_err(TlsError::Authority)?.unwrap_or_default();
        for certificate in &named {
            // As an authority it is checked either way; but one that may not sign is believed for itself alone.
            let mut one = RootCertStore::empty();
            one.add(certificate.clone())?;
            if own::may_sign(certificate) {
                roots.add(certificate.clone())?;
            }
        }
        Ok(Self { authorities: Arc::new(roots), named: named.into() })
    }

    /// For connections to servers that one of them signed for, by TLS 1.2 and 1.3.
    ///
    /// # Errors
    /// There is none: no server would be believed.
    pub fn client(&self) -> Result<ClientConfig, TlsError> {
        let verifier = self.verifier()?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_no_client_auth();
        Ok(config)
    }

    /// What checks the certificates of servers.
    pub(super) fn verifier(&self) -> Result<Arc<dyn ServerCertVerifier>, TlsError> {
        let wrong = |error: &dyn fmt::Display| {
            let name = "ca-certificates";
            TlsError::Authority(format!("{error}: install the package {name}, or name a file of authorities"))
        };
        let mut anchors = self.authorities.clone();
        if anchors.is_empty() {
            // Nothing but certificates that stand for themselves: they are found before any authority is asked.
            let first = self.named.first().ok_or_else(|| wrong(&"there is no authority"))?;
            Arc::make_mut(&mut anchors).add(first.clone())?;
        }
        let of_authorities = WebPkiServerVerifier::builder_with_provider(anchors, provider()).build();
        let of_authorities = of_authorities.map_err(|error| wrong(&error))?;
        if self.named.is_empty() {
            return Ok(of_authorities);
        }
        let only_named = self.authorities.is_empty();
        Ok(Arc::new(own::OrItself { of_authorities, only_named, named: self.named.clone() }))
    }
}

impl fmt::Debug for Roots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Roots({}, {} named)", self.authorities.len(), self.named.len())
    }
}
