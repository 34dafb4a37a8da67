//! Where an orchestrator keeps its state: in a file, or in etcd.

use super::{Check, RawOrchestrator};
use serde::Deserialize;
use sidetrack_common::file::{At, List};
use sidetrack_common::tls::{Mutual, Trust};
use std::path::PathBuf;
use std::time::Duration;

/// Default of an orchestrator's lease, seconds.
const LEASE_S: u32 = 10;
/// What a lease may be. etcd's election of a leader takes 1 to 2 s.
const LEASE_RANGE_S: std::ops::RangeInclusive<u32> = 2..=600;
/// The application protocol of etcd's JSON gateway in TLS.
const ETCD_ALPN: &[u8] = b"http/1.1";

/// Where the state of an orchestrator is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateAt {
    /// In this file: it is the only orchestrator.
    File(PathBuf),
    /// In etcd, which several orchestrators share.
    Etcd(EtcdAt),
}

/// Where etcd is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdAt {
    /// Its members, in the order in which they are tried.
    pub endpoints: Vec<Endpoint>,
    /// Our identity and the authority of its members. `None`: without TLS.
    pub mutual: Option<Mutual>,
    /// What our keys begin with.
    pub prefix: String,
    /// An orchestrator that does not renew its lease for this time counts as dead.
    pub lease: Duration,
}

/// A member of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// `host:port`.
    pub address: String,
    /// The name in its certificate.
    pub name: String,
}

/// Where etcd is, as written in the file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawEtcd {
    endpoints: Option<List<String>>,
    name: Option<At<String>>,
    identity: Option<At<String>>,
    ca: Option<At<String>>,
    prefix: Option<At<String>>,
    lease_s: Option<At<u32>>,
}

impl Check<'_> {
    /// Where the state of an orchestrator is.
    pub(super) fn state(&mut self, raw: &RawOrchestrator) -> Option<StateAt> {
        match (&raw.state, &raw.etcd) {
            (_, None) => {
                Some(StateAt::File(self.path(raw.state.as_ref(), "state", "the file that keeps its state")))
            }
            (None, Some(etcd)) => self.etcd(etcd).map(StateAt::Etcd),
            (Some(state), Some(_)) => {
                let help = "take one of them out: with [etcd], several orchestrators share their state";
                self.error(state.span(), "both `state` and [etcd] say where its state is", help);
                None
            }
        }
    }

    fn etcd(&mut self, raw: &At<RawEtcd>) -> Option<EtcdAt> {
        let (mut endpoints, mut secure) = (Vec::new(), 0);
        let given = raw.endpoints.iter().flat_map(List::items).collect::<Vec<_>>();
        for at in &given {
            let address =
                at.strip_prefix("https://").inspect(|_| secure += 1).or_else(|| at.strip_prefix("http://"));
            let split = address.and_then(|address| address.trim_end_matches('/').rsplit_once(':'));
            match split.filter(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) {
                Some((host, port)) => {
                    let bare = host.trim_start_matches('[').trim_end_matches(']');
                    let name = raw.name.as_ref().map_or(bare, |name| name.as_str());
                    endpoints.push(Endpoint { address: format!("{host}:{port}"), name: name.to_owned() });
                }
                None => {
                    let help = "write `https://host:2379`, or `http://host:2379` for a network of your own";
                    self.error(
                        at.span(),
                        format!("'{}' is not the address of a member of etcd", at.as_str()),
                        help,
                    );
                }
            }
        }
        if given.is_empty() {
            let help =
                "write `endpoints = [\"https://one:2379\", \"https://two:2379\", \"https://three:2379\"]`";
            self.error(raw.span(), "nothing says where etcd is", help);
            return None;
        }
        if secure != 0 && secure != given.len() {
            let help = "write https:// for all of them, or http:// for all";
            self.error(raw.span(), "some members of etcd are reached with TLS and some without", help);
            return None;
        }
        let mutual = if secure == 0 { None } else { Some(self.etcd_tls(raw)?) };
        let prefix = raw.prefix.as_ref().map_or_else(|| "sidetrack/".to_owned(), |at| at.to_string());
        let lease = raw.lease_s.as_ref().map_or(LEASE_S, |at| **at);
        if let Some(at) = raw.lease_s.as_ref().filter(|_| !LEASE_RANGE_S.contains(&lease)) {
            self.error(at.span(), format!("a lease of {lease} s is not possible"), "write 2 to 600");
        }
        Some(EtcdAt { endpoints, mutual, prefix, lease: Duration::from_secs(lease.into()) })
    }

    fn etcd_tls(&mut self, raw: &At<RawEtcd>) -> Option<Mutual> {
        let (Some(identity), Some(ca)) = (&raw.identity, &raw.ca) else {
            let help = "[etcd] needs `identity = \"NAME.pem\"`, our certificate and key, and `ca = \"ca.pem\"`, the authority of its members";
            self.error(raw.span(), "https:// needs a certificate at both ends", help);
            return None;
        };
        let (pem, authority) = (self.text(identity)?, self.text(ca)?);
        Mutual::new(&pem, Trust::Authority(authority.into()), ETCD_ALPN)
            .map_err(|error| self.error(identity.span(), error.to_string(), "see docs/control.md"))
            .ok()
    }
}
