//! What a proof of the source costs: the source signs batches of packets, and each node on their way checks every packet. The code
//! is the program's own, with the same keys and hashes, on one core.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use ring::digest::{SHA256, digest};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use serde::Serialize;
use sidetrack_core::overlay::frame::{HASH_BYTES, Hash, LinkKind, Protocol, Subgraph, Vouched};
use sidetrack_core::overlay::service::Service;
use sidetrack_core::overlay::spread::Source;
use sidetrack_core::overlay::tolerant::Vouch;
use sidetrack_core::overlay::tolerant::batch::{self, Unsigned};
use sidetrack_core::overlay::{Keys, NodeId, Signature};

use crate::statistics::median;

/// Bytes of a packet: voice, and a full one.
const BYTES: [usize; 2] = [200, 1200];
/// Packets that one signature covers: they were alone, or waited together.
const BATCHES: [usize; 3] = [1, 8, 32];
/// Rounds of each row; the median counts.
const ROUNDS: usize = 7;
/// Measured time of a round.
const ROUND: Duration = Duration::from_millis(60);

/// The source and its keys.
struct Signer(Ed25519KeyPair);

const OWN: NodeId = NodeId(1);

impl Keys for Signer {
    fn sign(&self, bytes: &[u8]) -> Signature {
        let mut signature = [0; 64];
        signature.copy_from_slice(self.0.sign(bytes).as_ref());
        Signature(signature)
    }

    fn verify(&self, _: NodeId, bytes: &[u8], signature: &Signature) -> bool {
        UnparsedPublicKey::new(&ED25519, self.0.public_key()).verify(bytes, &signature.0).is_ok()
    }
}

impl Vouch for Signer {
    fn digest(&self, bytes: &[u8]) -> Hash {
        let mut hash = [0; HASH_BYTES];
        hash.copy_from_slice(&digest(&SHA256, bytes).as_ref()[..HASH_BYTES]);
        hash
    }
}

/// The cost for each packet of batches of one size.
#[derive(Debug, Clone, Serialize)]
pub(super) struct ProofRow {
    /// Bytes of a packet.
    pub bytes: usize,
    /// Packets in a batch.
    pub batch: usize,
    /// To sign, µs for each packet.
    pub sign_us: f64,
    /// To check, µs for each packet.
    pub check_us: f64,
}

/// Measures all rows.
pub(super) fn measure() -> Result<Vec<ProofRow>> {
    let pair = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).ok().context("a key")?;
    let keys = Signer(pair);
    let sizes = BYTES.iter().flat_map(|bytes| BATCHES.map(|batch| (*bytes, batch)));
    sizes.map(|(bytes, batch)| row(&keys, bytes, batch)).collect()
}

fn row(keys: &Signer, bytes: usize, count: usize) -> Result<ProofRow> {
    let mut source = Source::new(1);
    let service = Service::new(LinkKind::BestEffort);
    let mut packet = || {
        let subgraph = Subgraph::new(OWN, NodeId(3), [(OWN, NodeId(2)), (NodeId(2), NodeId(3))]);
        let packet = source.packet(&service, subgraph?, Protocol::Ip, vec![7; bytes]);
        Some(Unsigned { priority: 5, target: 1, packet })
    };
    let unsigned: Option<Vec<_>> = (0..count).map(|_| packet()).collect();
    let unsigned = unsigned.context("a path")?;
    let signed = batch::sign(OWN, unsigned.clone(), keys);
    anyhow::ensure!(is_proven(&signed, keys), "a proof is wrong");
    // Copying the packets is part of the round, and of what the program does.
    let sign_us = each(count, || drop(black_box(batch::sign(OWN, unsigned.clone(), keys))));
    let check_us = each(count, || assert!(black_box(is_proven(black_box(&signed), keys))));
    Ok(ProofRow { bytes, batch: count, sign_us, check_us })
}

/// Checks packets as a relay does: each by the way to its root, and a root once.
fn is_proven(packets: &[Vouched], keys: &Signer) -> bool {
    let mut known: Option<Hash> = None;
    packets.iter().all(|packet| {
        let root = batch::root(packet, keys);
        let is_known = known == Some(root);
        known = Some(root);
        is_known || batch::is_signed(OWN, &root, &packet.proof.signature, keys)
    })
}

/// Returns the time for each of `count` packets, µs: the median of the rounds.
fn each(count: usize, mut act: impl FnMut()) -> f64 {
    let round = |_| {
        let (began, mut done) = (Instant::now(), 0_u32);
        while began.elapsed() < ROUND {
            act();
            done += 1;
        }
        began.elapsed().as_secs_f64() * 1e6 / f64::from(done) / count as f64
    };
    let rounds: Vec<f64> = (0..ROUNDS).map(round).collect();
    median(&rounds).unwrap_or(f64::NAN)
}
