//! Trust by key: both ends of a connection are checked in the same way, in TLS 1.3 only.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, SignatureScheme};
use std::fmt::Debug;

/// Decides which keys are trusted.
pub trait Believe: Debug + Send + Sync + 'static {
    /// Whether the ends show raw public keys (RFC 7250) instead of certificates.
    const RAW_KEYS: bool;

    /// Checks whether the owner of this key is trusted.
    ///
    /// # Errors
    /// The key is not trusted.
    fn check(&self, shown: &CertificateDer<'_>) -> Result<(), rustls::Error>;

    /// Checks that the signature proves ownership of the key.
    ///
    /// # Errors
    /// It does not.
    fn verify(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error>;

    /// The supported signature schemes.
    fn schemes(&self) -> Vec<SignatureScheme>;
}

/// Uses one check of keys for the certificates of servers and of clients.
#[derive(Debug)]
pub struct Believing<B>(pub B);

/// TLS 1.2 is not offered, so its signatures never need to be verified.
fn tls12() -> rustls::Error {
    rustls::Error::General("TLS 1.2 is not spoken here".to_owned())
}

/// The methods that are the same in both of rustls' traits: signatures, their schemes, and raw keys.
macro_rules! proofs_of_keys {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Err(tls12())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            shown: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            self.0.verify(message, shown, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.0.schemes()
        }

        fn requires_raw_public_keys(&self) -> bool {
            B::RAW_KEYS
        }
    };
}

impl<B: Believe> ServerCertVerifier for Believing<B> {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.0.check(shown).map(|()| ServerCertVerified::assertion())
    }

    proofs_of_keys!();
}

impl<B: Believe> ClientCertVerifier for Believing<B> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.0.check(shown).map(|()| ClientCertVerified::assertion())
    }

    proofs_of_keys!();
}
