//! TLS with servers by a file of certificates that the user names, with or without a certificate of our own.

use super::{Roots, TlsError, certificates};
use rustls::ClientConfig;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use std::sync::Arc;

/// Makes the configuration for connections to servers whose certificate one of these authorities signed, or is one of
/// these itself; by TLS 1.2 and 1.3.
///
/// # Errors
/// What is wrong with the authorities' text, or with the text of our certificate and key.
pub fn towards(trusted_pem: &str, identity_pem: Option<&str>) -> Result<ClientConfig, TlsError> {
    let mut config = Roots::of(trusted_pem)?.client()?;
    let Some(pem) = identity_pem else { return Ok(config) };
    let chain = certificates(pem).map_err(TlsError::Identity)?;
    let key = PrivateKeyDer::from_pem_slice(pem.as_bytes());
    let key = key.map_err(|error| TlsError::Identity(error.to_string()))?;
    let own = rustls::sign::CertifiedKey::from_der(chain, key, config.crypto_provider())?;
    config.client_auth_cert_resolver = Arc::new(rustls::sign::SingleCertAndKey::from(own));
    Ok(config)
}
