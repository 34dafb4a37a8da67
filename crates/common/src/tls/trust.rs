//! The two ways to trust a peer, for both ends of a connection.

use super::believe::{Believe, Believing};
use super::{Peer, Pin, Roots, TlsError, Trust, peer_name, provider};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature};
use rustls::pki_types::CertificateDer;
use rustls::server::danger::ClientCertVerifier;
use rustls::{CertificateError, DigitallySignedStruct, SignatureScheme};
use std::sync::{Arc, PoisonError, RwLock};

/// The verifiers of servers' and of clients' certificates.
pub(super) struct Verifiers {
    pub(super) servers: Arc<dyn ServerCertVerifier>,
    pub(super) clients: Arc<dyn ClientCertVerifier>,
}

impl Verifiers {
    /// The verifiers for this trust. They read the pinned peers at each handshake.
    pub(super) fn new(trust: &Trust, peers: &Arc<RwLock<Vec<Peer>>>) -> Result<Self, TlsError> {
        match trust {
            Trust::Authority(pem) => {
                let roots = Roots::of(pem)?;
                Ok(Self { servers: roots.verifier()?, clients: roots.client_verifier()? })
            }
            Trust::Pins(_) | Trust::Peers(_) => {
                let algorithms = provider().signature_verification_algorithms;
                let pinned = Arc::new(Believing(Pinned { peers: peers.clone(), algorithms }));
                Ok(Self { servers: pinned.clone(), clients: pinned })
            }
        }
    }
}

/// Trusts peers that own one of the pinned keys.
#[derive(Debug)]
struct Pinned {
    peers: Arc<RwLock<Vec<Peer>>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Believe for Pinned {
    const RAW_KEYS: bool = false;

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let parsed = webpki::EndEntityCert::try_from(certificate)
            .map_err(|_| rustls::Error::InvalidCertificate(CertificateError::BadEncoding))?;
        let pin = Pin::of_key(&parsed.subject_public_key_info());
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        let mut named = peers.iter().filter(|peer| peer.pin == pin);
        let is_trusted =
            named.any(|peer| peer.name.as_ref().is_none_or(|name| *name == peer_name(certificate)));
        if is_trusted {
            Ok(())
        } else {
            Err(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }

    fn verify(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
