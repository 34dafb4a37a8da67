//! Connections between two hosts that know nothing of each other but a pin: TLS 1.3 with raw public keys (RFC 7250). Names and
//! dates play no part.

use super::{Believe, Believing, Pin, TlsError, provider};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, DigitallySignedStruct, ServerConfig, SignatureScheme};
use std::fmt;
use std::sync::Arc;

/// The PKCS #8 form of an Ed25519 secret key without its last 32 bytes (RFC 8410 Sec. 7).
const ED25519_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// A key of our own, shown without a certificate.
#[derive(Clone)]
pub struct RawKey {
    key: Arc<CertifiedKey>,
    pin: Pin,
}

impl fmt::Debug for RawKey {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RawKey").field(&self.pin).finish()
    }
}

impl RawKey {
    /// Reads the private key in a PEM text, such as the `identity` of a tunnel.
    ///
    /// # Errors
    /// There is none, or rustls cannot sign with it.
    pub fn of_pem(pem: &str) -> Result<Self, TlsError> {
        let key = PrivateKeyDer::from_pem_slice(pem.as_bytes());
        Self::new(key.map_err(|error| TlsError::Identity(error.to_string()))?)
    }

    /// Takes the seed of an Ed25519 key (RFC 8032 Sec. 5.1.5), such as the key of a node of the overlay.
    ///
    /// # Errors
    /// rustls cannot sign with it.
    pub fn of_ed25519(seed: &[u8; 32]) -> Result<Self, TlsError> {
        let pkcs8 = [&ED25519_PREFIX[..], seed].concat();
        Self::new(PrivateKeyDer::from(PrivatePkcs8KeyDer::from(pkcs8)))
    }

    fn new(key: PrivateKeyDer<'static>) -> Result<Self, TlsError> {
        let key = provider().key_provider.load_private_key(key)?;
        let public = key.public_key().ok_or_else(|| TlsError::Identity("it has no public key".to_owned()))?;
        let public = CertificateDer::from(public.to_vec());
        let pin = Pin::of_key(&public);
        Ok(Self { key: Arc::new(CertifiedKey::new(vec![public], key)), pin })
    }

    /// The pin of the public key.
    pub const fn pin(&self) -> Pin {
        self.pin
    }

    /// The configuration of the end that accepts connections from any key. Who may go on is decided afterwards.
    ///
    /// # Errors
    /// rustls rejects it.
    pub fn server(&self, alpn: &[u8]) -> Result<ServerConfig, TlsError> {
        let anyone = Arc::new(Believing(Keys { pin: None, algorithms: algorithms() }));
        let mut server = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(anyone)
            .with_cert_resolver(Arc::new(rustls::server::AlwaysResolvesServerRawPublicKeys::new(
                self.key.clone(),
            )));
        server.alpn_protocols = vec![alpn.to_vec()];
        server.send_tls13_tickets = 0;
        Ok(server)
    }

    /// The configuration of the end that opens a connection to the owner of this pin.
    ///
    /// # Errors
    /// rustls rejects it.
    pub fn client(&self, pin: Pin, alpn: &[u8]) -> Result<ClientConfig, TlsError> {
        let pinned = Arc::new(Believing(Keys { pin: Some(pin), algorithms: algorithms() }));
        let mut client = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(pinned)
            .with_client_cert_resolver(Arc::new(rustls::client::AlwaysResolvesClientRawPublicKeys::new(
                self.key.clone(),
            )));
        client.alpn_protocols = vec![alpn.to_vec()];
        client.enable_sni = false;
        client.resumption = rustls::client::Resumption::disabled();
        Ok(client)
    }
}

fn algorithms() -> WebPkiSupportedAlgorithms {
    provider().signature_verification_algorithms
}

/// Trusts the owner of one key, or of any.
#[derive(Debug)]
struct Keys {
    pin: Option<Pin>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Believe for Keys {
    const RAW_KEYS: bool = true;

    fn check(&self, key: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        match self.pin {
            Some(pin) if pin != Pin::of_key(key) => {
                Err(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer))
            }
            _ => Ok(()),
        }
    }

    fn verify(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        rustls::crypto::verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
