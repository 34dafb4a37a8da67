//! The identity of this node and of the other members.

use crate::config;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use sidetrack_core::overlay::frame::{HASH_BYTES, Hash};
use sidetrack_core::overlay::key::{PublicKey, SecretKey};
use sidetrack_core::overlay::tolerant::Vouch;
use sidetrack_core::overlay::topology::Topology;
use sidetrack_core::overlay::{Keys, NodeId, Signature};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

/// One member of the overlay, as the configuration names it.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its name.
    pub name: Arc<str>,
    /// Its key.
    pub key: PublicKey,
    /// The addresses that we dial. Empty: it dials us, or it is not a neighbour.
    pub addresses: Vec<SocketAddr>,
}

/// This node's keys, and the members of the overlay.
pub struct Identity {
    own: NodeId,
    secret: SecretKey,
    public: PublicKey,
    pair: Ed25519KeyPair,
    members: BTreeMap<NodeId, Member>,
    topology: Topology,
}

impl Identity {
    /// Returns the node that the configuration describes.
    ///
    /// # Errors
    /// Fails if the secret key does not belong to the configured node.
    pub fn new(overlay: &config::Overlay) -> anyhow::Result<Self> {
        let pair = key_pair(&overlay.key)?;
        let public = public_key(&pair)?;
        let mut members = BTreeMap::new();
        for node in &overlay.nodes {
            let member = Member { name: node.name.clone(), key: node.key, addresses: node.addresses.clone() };
            members.insert(node.key.node_id(), member);
        }
        let own = public.node_id();
        let named = members.get(&own).map(|member| &*member.name);
        anyhow::ensure!(
            named == Some(&*overlay.name),
            "[overlay] name = \"{0}\", but the key file holds the secret of {public}, which is not the key of \
             [overlay.node.{0}]: put the right key there, or name the right file",
            overlay.name
        );
        anyhow::ensure!(
            members.len() == overlay.nodes.len(),
            "[overlay.node]: two nodes have keys that begin alike: make a new one with 'sidetrack overlay key'"
        );
        let node = |name: &str| overlay.nodes.iter().find(|node| *node.name == *name);
        let ends = |link: &config::OverlayEdge| {
            let [one, other] = [node(&link.ends[0])?, node(&link.ends[1])?];
            Some((one.key.node_id(), other.key.node_id(), link.least_us))
        };
        let links: Vec<_> = overlay.edges.iter().filter_map(ends).collect();
        let topology = if links.is_empty() { Topology::default() } else { Topology::new(links) };
        Ok(Self { own, secret: overlay.key.clone(), public, pair, members, topology })
    }

    /// Returns the links that nodes may announce.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Whether this node may have a link to another one.
    pub fn may_have_link(&self, other: NodeId) -> bool {
        self.topology.least_us(self.own, other).is_some()
    }

    /// Returns this node.
    pub fn own(&self) -> NodeId {
        self.own
    }

    /// Returns our public key.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Returns our secret key, for TLS.
    pub fn secret(&self) -> &[u8; 32] {
        &self.secret.0
    }

    /// Returns all members with their keys, including this node.
    pub fn members(&self) -> impl Iterator<Item = (NodeId, &PublicKey)> {
        self.members.iter().map(|(node, member)| (*node, &member.key))
    }

    /// Returns one member.
    pub fn member(&self, node: NodeId) -> Option<&Member> {
        self.members.get(&node)
    }

    /// Returns the neighbours that we dial.
    pub fn dialled(&self) -> impl Iterator<Item = NodeId> {
        let others = self.members.iter().filter(|(node, _)| **node != self.own && self.may_have_link(**node));
        others.filter(|(_, member)| !member.addresses.is_empty()).map(|(node, _)| *node)
    }

    /// Returns the member of this name.
    pub fn node_named(&self, name: &str) -> Option<NodeId> {
        self.members.iter().find(|(_, member)| *member.name == *name).map(|(node, _)| *node)
    }

    /// Returns the name of a node; its number if it is not a member.
    pub fn name(&self, node: NodeId) -> String {
        self.members.get(&node).map_or_else(|| node.to_string(), |member| member.name.to_string())
    }
}

impl Vouch for Identity {
    fn digest(&self, bytes: &[u8]) -> Hash {
        let digest = digest(&SHA256, bytes);
        let mut hash = [0; HASH_BYTES];
        hash.iter_mut().zip(digest.as_ref()).for_each(|(to, from)| *to = *from);
        hash
    }
}

impl Keys for Identity {
    fn sign(&self, bytes: &[u8]) -> Signature {
        let signature = self.pair.sign(bytes);
        signature.as_ref().try_into().map_or(Signature::NONE, Signature)
    }

    fn verify(&self, node: NodeId, bytes: &[u8], signature: &Signature) -> bool {
        let Some(member) = self.members.get(&node) else { return false };
        UnparsedPublicKey::new(&ED25519, &member.key.0).verify(bytes, &signature.0).is_ok()
    }
}

fn key_pair(secret: &SecretKey) -> anyhow::Result<Ed25519KeyPair> {
    Ed25519KeyPair::from_seed_unchecked(&secret.0).map_err(|error| anyhow::anyhow!("the node's key: {error}"))
}

fn public_key(pair: &Ed25519KeyPair) -> anyhow::Result<PublicKey> {
    Ok(PublicKey(pair.public_key().as_ref().try_into()?))
}

/// Makes a new key.
///
/// # Errors
/// Fails if the system provides no random bytes.
pub fn generate() -> anyhow::Result<(SecretKey, PublicKey)> {
    let mut seed = [0; 32];
    random(&mut seed)?;
    let secret = SecretKey(seed);
    let public = public_key(&key_pair(&secret)?)?;
    Ok((secret, public))
}

/// Returns the public key of a secret key.
///
/// # Errors
/// Fails if the bytes are not a secret key.
pub fn public_of(secret: &SecretKey) -> anyhow::Result<PublicKey> {
    public_key(&key_pair(secret)?)
}

/// Fills `bytes` with random bytes.
///
/// # Errors
/// Fails if the system provides none.
pub fn random(bytes: &mut [u8]) -> anyhow::Result<()> {
    SystemRandom::new().fill(bytes).map_err(|_| anyhow::anyhow!("the system gives no random bytes"))
}
