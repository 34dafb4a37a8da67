//! TLS with clients of a listener: we show a certificate, and ask for none.

use super::{TlsError, certificates, provider};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use std::fmt;
use std::sync::Arc;

/// A certificate chain with its private key.
#[derive(Clone)]
pub struct Own {
    pem: Arc<str>,
    key: Arc<CertifiedKey>,
}

impl Own {
    /// Reads the text of a PEM file with a certificate chain and its private key.
    ///
    /// # Errors
    /// One of them is missing, or they do not belong together.
    pub fn new(pem: &str) -> Result<Self, TlsError> {
        let chain = certificates(pem).map_err(TlsError::Identity)?;
        let key = PrivateKeyDer::from_pem_slice(pem.as_bytes());
        let key = key.map_err(|error| TlsError::Identity(error.to_string()))?;
        let key = CertifiedKey::from_der(chain, key, &provider())?;
        Ok(Self { pem: pem.into(), key: Arc::new(key) })
    }

    /// Makes the configuration of TLS 1.2 and 1.3 for these application protocols, the preferred one first. Early data (0-RTT)
    /// is off: it may be replayed.
    ///
    /// # Errors
    /// rustls rejects it.
    pub fn server(&self, protocols: &[&[u8]]) -> Result<ServerConfig, TlsError> {
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(self.key.clone())));
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Ok(config)
    }
}

impl PartialEq for Own {
    fn eq(&self, other: &Self) -> bool {
        self.pem == other.pem
    }
}

impl Eq for Own {}

impl fmt::Debug for Own {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Own").finish_non_exhaustive()
    }
}
