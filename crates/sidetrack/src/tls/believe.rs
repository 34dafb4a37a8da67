//! Belief by key: both ends of a connection ask the same of each other, in TLS 1.3 alone.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, SignatureScheme};
use std::fmt::Debug;

/// Who is believed.
pub trait Believe: Debug + Send + Sync + 'static {
    /// Whether ends show raw public keys (RFC 7250) in place of certificates.
    const RAW_KEYS: bool;

    /// Whether whoever proves to have this key is believed.
    ///
    /// # Errors
    /// It is not.
    fn check(&self, shown: &CertificateDer<'_>) -> Result<(), rustls::Error>;

    /// Whether the signature proves that the other end has the key.
    ///
    /// # Errors
    /// It does not.
    fn verify(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error>;

    /// The signatures that are understood.
    fn schemes(&self) -> Vec<SignatureScheme>;
}

/// Makes a verifier of servers and of clients of a [`Believe`].
#[derive(Debug)]
pub struct Believing<B>(pub B);

/// TLS 1.2 is not offered, so its signatures are never asked for.
fn tls12() -> rustls::Error {
    rustls::Error::General("TLS 1.2 is not spoken here".to_owned())
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
}
