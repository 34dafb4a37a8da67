//! Connections between neighbours: TLS 1.3 over kernel TCP. Both ends authenticate with pinned keys (raw public keys, RFC
//! 7250).

use super::identity::Identity;
use crate::tls::{Believe, Believing};
use anyhow::Context as _;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring as provider};
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer,
};
use rustls::sign::CertifiedKey;
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, ServerConfig, ServerConnection,
    SignatureScheme,
};
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::key::PublicKey;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The protocol inside TLS; a peer that offers another one is rejected (ALPN, RFC 7301).
const ALPN: &[u8] = b"sidetrack-overlay/1";

/// The SubjectPublicKeyInfo of an Ed25519 key without its last 32 bytes (RFC 8410 Sec. 4).
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// The PKCS #8 form of an Ed25519 secret key without its last 32 bytes (RFC 8410 Sec. 7).
const PKCS8_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// Makes both ends of connections.
pub(super) struct Tls {
    server: Arc<ServerConfig>,
    clients: BTreeMap<NodeId, Arc<ClientConfig>>,
}

impl Tls {
    /// Returns the TLS settings for our own key and the members' keys.
    ///
    /// # Errors
    /// Fails if rustls cannot sign with the key.
    pub(super) fn new(identity: &Identity) -> anyhow::Result<Self> {
        let provider = Arc::new(provider::default_provider());
        let certified = certified(identity, &provider)?;
        let algorithms = provider.signature_verification_algorithms;
        let members = identity.members().map(|(node, key)| (spki(key), node)).collect();
        let pinned = Arc::new(Believing(Pinned { members, algorithms }));
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(pinned)
            .with_cert_resolver(Arc::new(rustls::server::AlwaysResolvesServerRawPublicKeys::new(
                certified.clone(),
            )));
        server.alpn_protocols = vec![ALPN.to_vec()];
        server.send_tls13_tickets = 0;
        let client = |key: &PublicKey| -> anyhow::Result<Arc<ClientConfig>> {
            let members = BTreeMap::from([(spki(key), key.node_id())]);
            let pinned = Believing(Pinned { members, algorithms });
            let mut client = ClientConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(&[&rustls::version::TLS13])?
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(pinned))
                .with_client_cert_resolver(Arc::new(rustls::client::AlwaysResolvesClientRawPublicKeys::new(
                    certified.clone(),
                )));
            client.alpn_protocols = vec![ALPN.to_vec()];
            client.enable_sni = false;
            client.resumption = rustls::client::Resumption::disabled();
            Ok(Arc::new(client))
        };
        let clients =
            identity.members().map(|(node, key)| Ok((node, client(key)?))).collect::<anyhow::Result<_>>()?;
        Ok(Self { server: Arc::new(server), clients })
    }

    /// Returns the end that dials this neighbour.
    ///
    /// # Errors
    /// Fails if it is not a member.
    pub(super) fn dial(&self, to: NodeId) -> anyhow::Result<Connection> {
        let config = self.clients.get(&to).with_context(|| format!("{to} is not a member of the overlay"))?;
        let name = ServerName::try_from("overlay.invalid").context("a name for the other end")?;
        Ok(ClientConnection::new(config.clone(), name)?.into())
    }

    /// Returns the end that was dialled.
    ///
    /// # Errors
    /// Returns the error of rustls.
    pub(super) fn accept(&self) -> anyhow::Result<Connection> {
        Ok(ServerConnection::new(self.server.clone())?.into())
    }
}

/// Returns the peer of a connection whose handshake is over.
pub(super) fn peer(connection: &Connection) -> Option<NodeId> {
    let [key] = connection.peer_certificates()? else { return None };
    let key: &[u8; 32] = key.as_ref().strip_prefix(&SPKI_PREFIX)?.try_into().ok()?;
    Some(PublicKey(*key).node_id())
}

fn spki(key: &PublicKey) -> Vec<u8> {
    [&SPKI_PREFIX[..], &key.0].concat()
}

fn certified(identity: &Identity, provider: &CryptoProvider) -> anyhow::Result<Arc<CertifiedKey>> {
    let pkcs8 = [&PKCS8_PREFIX[..], identity.secret()].concat();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(pkcs8));
    let key = provider.key_provider.load_private_key(key)?;
    let public = CertificateDer::from(spki(identity.public()));
    Ok(Arc::new(CertifiedKey::new(vec![public], key)))
}

/// Accepts only pinned keys.
#[derive(Debug)]
struct Pinned {
    members: BTreeMap<Vec<u8>, NodeId>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Believe for Pinned {
    const RAW_KEYS: bool = true;

    fn check(&self, key: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let known = self.members.contains_key(key.as_ref());
        known.then_some(()).ok_or(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer))
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
        vec![SignatureScheme::ED25519]
    }
}
