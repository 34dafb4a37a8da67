//! Mutual TLS between our own nodes: certificates at both ends of a tunnel, TLS 1.3 only, by rustls with ring. A peer is
//! trusted because an authority signed its certificate, or because its key is pinned.

mod believe;
mod make;
mod own;
mod pin;
mod raw;
mod roots;
mod sign;
mod towards;
mod trust;

pub use believe::{Believe, Believing};
pub use make::{Made, MakeError, authority, self_signed, signed};
pub use own::Own;
pub use pin::{Peer, Pin, PinError};
pub use raw::RawKey;
pub use roots::{BUNDLES, Roots, certificates_in, system_bundle};
pub use sign::{MadeAuthority, Scope, Signer, server_name, tap_authority};
pub use towards::towards;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ServerConfig};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

/// The peers that are trusted.
#[derive(Clone, PartialEq, Eq)]
pub enum Trust {
    /// Peers whose certificate one of these authorities signed, or is one of these itself. The text of a PEM file.
    Authority(Arc<str>),
    /// Peers that own one of these keys. Names and dates in their certificates are ignored.
    Pins(Vec<Pin>),
    /// The same, and a peer with a name must show a certificate with this name.
    Peers(Vec<Peer>),
}

/// An identity and the trusted peers: what either end of a connection between our own nodes needs.
#[derive(Clone)]
pub struct Mutual {
    identity_pem: Arc<str>,
    trust: Trust,
    /// The pinned peers, if `trust` has any. The verifiers of all copies share them.
    peers: Arc<RwLock<Vec<Peer>>>,
    alpn: &'static [u8],
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// Why an identity or its trusted peers cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The PEM text of the identity has no certificate or no private key.
    #[error("the identity needs a certificate and its private key, both in PEM: {0}")]
    Identity(String),
    /// The PEM text of the authority has no certificate.
    #[error("the file of the authority has no certificate in PEM: {0}")]
    Authority(String),
    /// rustls rejects them.
    #[error(transparent)]
    Tls(#[from] rustls::Error),
}

impl Mutual {
    /// Checks an identity (the text of a PEM file with a certificate chain and its private key) and the trusted peers, for
    /// this application protocol.
    ///
    /// # Errors
    /// What is wrong with either.
    pub fn new(identity_pem: &str, trust: Trust, alpn: &'static [u8]) -> Result<Self, TlsError> {
        let identity = |why: String| TlsError::Identity(why);
        let chain = certificates(identity_pem).map_err(identity)?;
        let key = PrivateKeyDer::from_pem_slice(identity_pem.as_bytes())
            .map_err(|error| identity(error.to_string()))?;
        let peers = Arc::new(RwLock::new(trust.peers()));
        let verifier = trust::Verifiers::new(&trust, &peers)?;
        let versions = &[&rustls::version::TLS13];
        let mut client = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(versions)?
            .dangerous()
            .with_custom_certificate_verifier(verifier.servers)
            .with_client_auth_cert(chain.clone(), key.clone_key())?;
        let mut server = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(versions)?
            .with_client_cert_verifier(verifier.clients)
            .with_single_cert(chain, key)?;
        client.alpn_protocols = vec![alpn.to_vec()];
        server.alpn_protocols = vec![alpn.to_vec()];
        let (client, server) = (Arc::new(client), Arc::new(server));
        Ok(Self { identity_pem: identity_pem.into(), trust, peers, alpn, client, server })
    }

    /// The configuration of the end that opens connections.
    pub fn client(&self) -> Arc<ClientConfig> {
        self.client.clone()
    }

    /// Whether an authority signs the peers' certificates, and so vouches for the names in them.
    pub const fn has_authority(&self) -> bool {
        matches!(self.trust, Trust::Authority(_))
    }

    /// The configuration of the end that accepts connections.
    pub fn server(&self) -> Arc<ServerConfig> {
        self.server.clone()
    }

    /// Whether `new` trusts the same pinned peers and more, and nothing else differs.
    pub fn grows_into(&self, new: &Self) -> bool {
        let (ours, theirs) = (read(&self.peers), read(&new.peers));
        !ours.is_empty() && self.is_same_end(new) && ours.iter().all(|peer| theirs.contains(peer))
    }

    /// Trusts the pinned peers of `new` from now on, in all copies. Connections that stand are not touched.
    pub fn grow(&self, new: &Self) {
        *self.peers.write().unwrap_or_else(PoisonError::into_inner) = read(&new.peers);
    }

    fn is_same_end(&self, other: &Self) -> bool {
        self.identity_pem == other.identity_pem && self.alpn == other.alpn
    }
}

/// Returns the pinned peers now.
fn read(peers: &RwLock<Vec<Peer>>) -> Vec<Peer> {
    peers.read().unwrap_or_else(PoisonError::into_inner).clone()
}

impl Trust {
    /// Returns the pinned peers.
    fn peers(&self) -> Vec<Peer> {
        match self {
            Self::Authority(_) => Vec::new(),
            Self::Pins(pins) => pins.iter().copied().map(Peer::from).collect(),
            Self::Peers(peers) => peers.clone(),
        }
    }
}

impl PartialEq for Mutual {
    fn eq(&self, other: &Self) -> bool {
        let is_trust_same = match (&self.trust, &other.trust) {
            (Trust::Authority(ours), Trust::Authority(theirs)) => ours == theirs,
            (Trust::Authority(_), _) | (_, Trust::Authority(_)) => false,
            _ => read(&self.peers) == read(&other.peers),
        };
        is_trust_same && self.is_same_end(other)
    }
}

impl Eq for Mutual {}

impl fmt::Debug for Mutual {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mutual").field("trust", &self.trust).finish_non_exhaustive()
    }
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Authority(_) => f.write_str("Authority"),
            Self::Pins(pins) => f.debug_tuple("Pins").field(pins).finish(),
            Self::Peers(peers) => f.debug_tuple("Peers").field(peers).finish(),
        }
    }
}

/// The cryptographic algorithms of all connections.
pub fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Returns the certificates in a PEM text, at least one.
fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let found = found.map_err(|error| error.to_string())?;
    if found.is_empty() { Err("there is no CERTIFICATE".to_owned()) } else { Ok(found) }
}

/// The name of a peer in rules and records: its certificate's first DNS name, otherwise its pin.
pub fn peer_name(certificate: &CertificateDer<'_>) -> String {
    match webpki::EndEntityCert::try_from(certificate) {
        Ok(parsed) => {
            let name = parsed.valid_dns_names().next().map(str::to_ascii_lowercase);
            name.unwrap_or_else(|| Pin::of_key(&parsed.subject_public_key_info()).to_string())
        }
        // rustls has parsed it before. This is for a future rustls that accepts other certificates.
        Err(_) => "?".to_owned(),
    }
}

/// The pin of a peer's key.
pub fn peer_pin(certificate: &CertificateDer<'_>) -> String {
    match webpki::EndEntityCert::try_from(certificate) {
        Ok(parsed) => Pin::of_key(&parsed.subject_public_key_info()).to_string(),
        // As in `peer_name`.
        Err(_) => "?".to_owned(),
    }
}

#[cfg(test)]
mod tests;
