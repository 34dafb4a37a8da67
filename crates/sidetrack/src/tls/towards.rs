//! TLS towards servers that a named authority signed for, with or without a certificate of our own.

use super::{TlsError, certificates, provider};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

/// For connections to servers that one of these authorities signed for; by TLS 1.2 and 1.3.
///
/// # Errors
/// What is wrong with the text of the authorities, or with that of our certificate and key.
pub fn towards(authorities_pem: &str, identity_pem: Option<&str>) -> Result<ClientConfig, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(authorities_pem).map_err(TlsError::Authority)? {
        roots.add(certificate)?;
    }
    let builder = ClientConfig::builder_with_provider(provider());
    let builder = builder.with_safe_default_protocol_versions()?.with_root_certificates(roots);
    let Some(pem) = identity_pem else { return Ok(builder.with_no_client_auth()) };
    let chain = certificates(pem).map_err(TlsError::Identity)?;
    let key = PrivateKeyDer::from_pem_slice(pem.as_bytes());
    let key = key.map_err(|error| TlsError::Identity(error.to_string()))?;
    Ok(builder.with_client_auth_cert(chain, key)?)
}
