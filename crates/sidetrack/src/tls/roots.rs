//! Whom the world believes: the authorities of this system, as every TLS client has them.

use super::{TlsError, certificates, provider};
use rustls::client::WebPkiServerVerifier;
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
pub fn certificates_in(pem: &str) -> Vec<rustls::pki_types::CertificateDer<'static>> {
    certificates(pem).unwrap_or_default()
}

/// The file with the authorities of this system: what `SSL_CERT_FILE` names, else that of the distribution.
pub fn system_bundle() -> Option<PathBuf> {
    let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    named.into_iter().chain(BUNDLES.map(PathBuf::from)).find(|path| path.is_file())
}

/// Authorities whose servers are believed.
#[derive(Clone)]
pub struct Roots(Arc<RootCertStore>);

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
        if let Some(pem) = more_pem {
            for certificate in certificates(pem).map_err(TlsError::Authority)? {
                roots.add(certificate)?;
            }
        }
        Ok(Self(Arc::new(roots)))
    }

    /// For connections to servers that one of them signed for, by TLS 1.2 and 1.3.
    ///
    /// # Errors
    /// There is none: no server would be believed.
    pub fn client(&self) -> Result<ClientConfig, TlsError> {
        let verifier = WebPkiServerVerifier::builder_with_provider(self.0.clone(), provider()).build();
        let verifier = verifier.map_err(|error| {
            let name = "ca-certificates";
            TlsError::Authority(format!("{error}: install the package {name}, or name a file of authorities"))
        })?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_webpki_verifier(verifier)
            .with_no_client_auth();
        Ok(config)
    }
}

impl fmt::Debug for Roots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Roots({})", self.0.len())
    }
}
