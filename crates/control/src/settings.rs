//! The configuration files of orchestrators and domains.

mod etcd;
mod rooms;

pub use etcd::{Endpoint, EtcdAt, StateAt};

use super::api::Room;
use super::link::ALPN;
use serde::{Deserialize, Serialize};
use sidetrack_common::file::{At, ConfigError, List, Problem, parse};
use sidetrack_common::rights::RunAs;
use sidetrack_common::tls::{Mutual, Pin, Trust};
use sidetrack_core::placement::Demand;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Where the keys are documented, for messages.
const KEYS: &str = "docs/control.md";
/// Default of the largest archive of an image that is accepted, bytes.
const IMAGE_BYTES_MAX: u64 = 2 << 30;

/// Our identity and the peers to trust, as written in the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawTls {
    /// The file with our certificate and key.
    pub identity: Option<At<String>>,
    /// The certificate of the authority that signed the peers' certificates.
    pub ca: Option<At<String>>,
    /// Alternatively, the peers' keys.
    pub pins: Option<List<String>>,
}

/// A peer, as written in the file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawEnd {
    /// `host:port`. Of several, the first that answers is taken.
    pub address: Option<List<String>>,
    /// The name in its certificate, the same at all addresses. Default: the host of the first address.
    pub name: Option<At<String>>,
}

/// A peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// `host:port`. Of several, the first that answers is taken.
    pub addresses: Vec<String>,
    /// The name in its certificate.
    pub name: String,
}

/// The file of an orchestrator, as written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawOrchestrator {
    version: Option<At<u32>>,
    /// The user that it becomes when root starts it.
    user: Option<At<String>>,
    listen: Option<At<String>>,
    agreement: Option<At<String>>,
    state: Option<At<String>>,
    /// etcd, instead of `state`.
    etcd: Option<At<etcd::RawEtcd>>,
    #[serde(default)]
    tls: RawTls,
    /// Peers that may submit applications, by name.
    applications: Option<List<String>>,
    /// Peers that may list and end all applications, by name.
    operators: Option<List<String>>,
    /// The domains, by party.
    #[serde(default)]
    domain: BTreeMap<String, At<RawEnd>>,
    /// Images to ship, by name.
    #[serde(default)]
    image: BTreeMap<String, At<RawArchive>>,
    /// What functions need, by name.
    #[serde(default)]
    function: BTreeMap<String, At<rooms::RawDemand>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawArchive {
    archive: Option<At<String>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTaken {
    id: Option<At<String>>,
}

/// The file of a domain, as written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDomain {
    version: Option<At<u32>>,
    /// The user that it becomes when root starts it.
    user: Option<At<String>>,
    party: Option<At<String>>,
    listen: Option<At<String>>,
    state: Option<At<String>>,
    #[serde(default)]
    tls: RawTls,
    orchestrator: Option<At<RawEnd>>,
    operators: Option<List<String>>,
    nodes: Option<List<String>>,
    proxies: Option<List<String>>,
    #[serde(default)]
    grant: Vec<At<RawGrant>>,
    reasoner: Option<At<RawReasoner>>,
    /// The socket of its container engine.
    engine: Option<At<String>>,
    /// Images that it accepts, by name.
    #[serde(default)]
    image: BTreeMap<String, At<RawTaken>>,
    image_bytes_max: Option<At<u64>>,
    /// The room of its nodes, by name.
    #[serde(default)]
    node: BTreeMap<String, At<rooms::RawRoom>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawGrant {
    purpose: Option<List<String>>,
    data: Option<List<String>>,
    client: Option<List<String>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawReasoner {
    address: Option<At<String>>,
    use_case: Option<At<String>>,
    token_file: Option<At<String>>,
}

/// The settings of an orchestrator.
#[derive(Clone, Debug)]
pub struct OrchestratorSettings {
    /// The user that it switches to when root starts it.
    pub user: RunAs,
    /// The address to listen on.
    pub listen: String,
    /// The file of the agreement.
    pub agreement: PathBuf,
    /// Where its state is.
    pub state: StateAt,
    /// Its identity, and the peers that it trusts.
    pub mutual: Mutual,
    /// Peers that may submit applications, and list and end their own.
    pub applications: Vec<String>,
    /// Peers that may list and end all applications.
    pub operators: Vec<String>,
    /// The agents of the domains, by party.
    pub domains: BTreeMap<String, End>,
    /// The archives of the images that it ships, by name.
    pub images: BTreeMap<String, PathBuf>,
    /// What functions need, by name.
    pub demands: BTreeMap<String, Demand>,
}

/// The settings of a domain's agent.
#[derive(Clone, Debug)]
pub struct DomainSettings {
    /// The user that it switches to when root starts it.
    pub user: RunAs,
    /// The party that it belongs to.
    pub party: String,
    /// The address to listen on.
    pub listen: String,
    /// The file of its state.
    pub state: PathBuf,
    /// Its identity, and the peers that it trusts.
    pub mutual: Mutual,
    /// The orchestrator that it serves, and reports consent to.
    pub orchestrator: End,
    /// Peers that may change consent.
    pub operators: Vec<String>,
    /// The nodes it offers.
    pub nodes: Vec<String>,
    /// The room of these nodes for containers.
    pub rooms: Vec<Room>,
    /// The admin sockets of its proxies and redirectors.
    pub proxies: Vec<PathBuf>,
    /// What it grants. Everything else is refused.
    pub grants: Vec<Grant>,
    /// A policy reasoner that must also agree.
    pub reasoner: Option<ReasonerAt>,
    /// Which images it accepts.
    pub images: Images,
}

/// Which images a domain accepts from its orchestrator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Images {
    /// The socket of the container engine that gets them. `None`: no image is accepted.
    pub engine: Option<PathBuf>,
    /// The digests of their configurations, by name.
    pub taken: BTreeMap<String, String>,
    /// Largest archive, bytes.
    pub bytes_max: u64,
    /// The folder for an archive until it is checked.
    pub folder: PathBuf,
}

/// What a domain grants. Empty lists do not restrict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Purposes.
    pub purpose: Vec<String>,
    /// Data sets.
    pub data: Vec<String>,
    /// Clients.
    pub client: Vec<String>,
}

/// A policy reasoner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReasonerAt {
    /// `host:port`, HTTP.
    pub address: String,
    /// The use case in its requests.
    pub use_case: String,
    /// The bearer token.
    pub token: Option<String>,
}

/// Whether this names one image, with a tag, in characters that need no escape in a path.
pub(super) fn is_image_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_./:".contains(c);
    let tag = name.rsplit('/').next().and_then(|last| last.split_once(':'));
    name.chars().all(fits)
        && name.split('/').all(super::name::is_segment)
        && tag.is_some_and(|(base, tag)| !base.is_empty() && !tag.is_empty() && !tag.contains(':'))
}

/// Whether this is a digest in the form that images use.
pub(super) fn is_digest(id: &str) -> bool {
    id.strip_prefix("sha256:")
        .is_some_and(|hex| hex.len() == 64 && hex.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f')))
}

struct Check<'a> {
    folder: &'a Path,
    problems: Vec<Problem>,
}

impl Check<'_> {
    fn error(&mut self, span: Range<usize>, message: impl Into<String>, help: &str) {
        self.problems.push(Problem::error(span, message, help));
    }

    fn version(&mut self, at: Option<&At<u32>>) {
        if at.is_none_or(|at| **at != 1) {
            self.error(
                at.map_or(0..0, At::span),
                "the version of the format is missing or unknown",
                "write `version = 1`",
            );
        }
    }

    fn user(&mut self, at: Option<&At<String>>) -> RunAs {
        let Some(at) = at else { return RunAs::Default };
        if !nix::unistd::User::from_name(at).is_ok_and(|user| user.is_some()) {
            let help = "name a system user, \"root\" included, or leave `user` out";
            self.error(at.span(), format!("there is no user '{}' on this machine", at.as_str()), help);
        }
        RunAs::Named(at.as_str().into())
    }

    fn needed(&mut self, at: Option<&At<String>>, key: &str, what: &str) -> String {
        match at {
            Some(at) => at.to_string(),
            None => {
                self.error(0..0, format!("`{key}` is missing: {what}"), &format!("write `{key} = \"…\"`"));
                String::new()
            }
        }
    }

    fn path(&mut self, at: Option<&At<String>>, key: &str, what: &str) -> PathBuf {
        self.folder.join(self.needed(at, key, what))
    }

    fn text(&mut self, at: &At<String>) -> Option<String> {
        let path = self.folder.join(at.as_str());
        match std::fs::read_to_string(&path) {
            Ok(text) => Some(text),
            Err(error) => {
                let help = "a relative path starts from the folder of this file";
                self.error(at.span(), format!("cannot read {}: {error}", path.display()), help);
                None
            }
        }
    }

    fn mutual(&mut self, raw: &RawTls) -> Option<Mutual> {
        let Some(identity) = &raw.identity else {
            let help = "[tls] needs `identity = \"NAME.pem\"`: `sidetrack tunnel key --name NAME` makes one";
            self.error(0..0, "nothing says who this is", help);
            return None;
        };
        let pem = self.text(identity)?;
        let trust = match (&raw.ca, &raw.pins) {
            (Some(ca), None) => Trust::Authority(self.text(ca)?.into()),
            (None, Some(pins)) => Trust::Pins(self.pins(pins)),
            _ => {
                let help = "[tls] needs either `ca = \"ca.pem\"` or `pins = [\"sha256//…\"]`";
                self.error(identity.span(), "nothing says which peers to trust", help);
                return None;
            }
        };
        Mutual::new(&pem, trust, ALPN)
            .map_err(|error| self.error(identity.span(), error.to_string(), "see docs/tunnel.md"))
            .ok()
    }

    fn pins(&mut self, list: &List<String>) -> Vec<Pin> {
        let mut pins = Vec::new();
        for at in list.items() {
            match at.parse() {
                Ok(pin) => pins.push(pin),
                Err(error) => {
                    let error: sidetrack_common::tls::PinError = error;
                    self.error(at.span(), error.to_string(), "`sidetrack tunnel pin FILE` prints it");
                }
            }
        }
        pins
    }

    fn image_name<T>(&mut self, name: &str, at: &At<T>) {
        if !is_image_name(name) {
            let help = "write the name as [function.NAME] has it: [image.\"localhost/audit:1\"]";
            self.error(at.span(), format!("'{name}' is not the name of an image with a tag"), help);
        }
    }

    fn archives(&mut self, raw: &BTreeMap<String, At<RawArchive>>) -> BTreeMap<String, PathBuf> {
        let mut images = BTreeMap::new();
        for (name, at) in raw {
            self.image_name(name, at);
            let Some(archive) = &at.archive else {
                let help = "write `archive = \"audit.tar\"`: `podman save --output audit.tar NAME` makes it";
                self.error(at.span(), "nothing says where the image is", help);
                continue;
            };
            let path = self.folder.join(archive.as_str());
            if let Err(error) = std::fs::File::open(&path) {
                let help = "a relative path starts from the folder of this file";
                self.error(archive.span(), format!("cannot read {}: {error}", path.display()), help);
            }
            images.insert(name.clone(), path);
        }
        images
    }

    fn images(&mut self, raw: &RawDomain, state: &Path) -> Images {
        let mut taken = BTreeMap::new();
        for (name, at) in &raw.image {
            self.image_name(name, at);
            let help =
                "write `id = \"sha256:…\"`: `podman image inspect --format '{{.Id}}' NAME` prints the digits";
            match &at.id {
                Some(id) if is_digest(id) => drop(taken.insert(name.clone(), id.to_string())),
                Some(id) => self.error(id.span(), "this is not the digest of an image", help),
                None => self.error(at.span(), "nothing says which image is taken under this name", help),
            }
        }
        let engine = raw.engine.as_ref().map(|at| self.folder.join(at.as_str()));
        if engine.is_none()
            && let Some((_, at)) = raw.image.first_key_value()
        {
            let help = "write `engine = \"/run/podman/podman.sock\"`";
            self.error(at.span(), "nothing says which container engine gets the image", help);
        }
        let bytes_max = raw.image_bytes_max.as_ref().map_or(IMAGE_BYTES_MAX, |at| **at);
        let folder = state.parent().filter(|folder| !folder.as_os_str().is_empty());
        Images { engine, taken, bytes_max, folder: folder.unwrap_or(Path::new(".")).to_owned() }
    }

    fn end(&mut self, raw: &At<RawEnd>) -> Option<End> {
        let Some(address) = &raw.address else {
            self.error(raw.span(), "nothing says where it listens", "write `address = \"host:port\"`");
            return None;
        };
        let mut first = None;
        for at in address.items() {
            let Some((host, _)) = at.rsplit_once(':') else {
                self.error(at.span(), format!("'{}' lacks a port", at.as_str()), "write host:port");
                return None;
            };
            first.get_or_insert(host.trim_start_matches('[').trim_end_matches(']'));
        }
        let Some(host) = first else {
            self.error(raw.span(), "`address` is an empty list", "write `address = \"host:port\"`");
            return None;
        };
        let name = raw.name.as_ref().map_or_else(|| host.to_owned(), |name| name.to_string());
        Some(End { addresses: address.items().iter().map(|at| at.to_string()).collect(), name })
    }
}

fn texts(list: &Option<List<String>>) -> Vec<String> {
    list.iter().flat_map(List::items).map(|at| at.to_string()).collect()
}

fn read<F: serde::de::DeserializeOwned, T>(
    path: &Path,
    check: impl FnOnce(&F, &mut Check<'_>) -> Option<T>,
) -> Result<T, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|error| ConfigError::unreadable(path, &error))?;
    let name = path.display().to_string();
    let refused = |problems| ConfigError::new(&name, &text, problems);
    let raw: F = parse(&text, KEYS).map_err(refused)?;
    let mut checking = Check { folder: path.parent().unwrap_or(Path::new("")), problems: Vec::new() };
    let checked = check(&raw, &mut checking);
    match checked {
        Some(checked) if checking.problems.is_empty() => Ok(checked),
        _ => Err(refused(checking.problems)),
    }
}

impl OrchestratorSettings {
    /// Reads the file of an orchestrator.
    ///
    /// # Errors
    /// Lists all errors in the file with their places.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        read(path, |raw: &RawOrchestrator, check| {
            check.version(raw.version.as_ref());
            let listen =
                check.needed(raw.listen.as_ref(), "listen", "where domains and applications reach it");
            let agreement = check.path(raw.agreement.as_ref(), "agreement", "the file of the agreement");
            let state = check.state(raw);
            let mutual = check.mutual(&raw.tls);
            let mut domains = BTreeMap::new();
            for (party, end) in &raw.domain {
                domains.extend(check.end(end).map(|end| (party.clone(), end)));
            }
            if domains.is_empty() {
                check.error(0..0, "there is no domain", "add [domain.PARTY] with `address`");
            }
            Some(Self {
                user: check.user(raw.user.as_ref()),
                listen,
                agreement,
                state: state?,
                mutual: mutual?,
                applications: texts(&raw.applications),
                operators: texts(&raw.operators),
                domains,
                images: check.archives(&raw.image),
                demands: check.demands(&raw.function),
            })
        })
    }
}

impl DomainSettings {
    /// Reads the file of a domain.
    ///
    /// # Errors
    /// Lists all errors in the file with their places.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        read(path, |raw: &RawDomain, check| {
            check.version(raw.version.as_ref());
            let party = check.needed(raw.party.as_ref(), "party", "whose agent this is");
            let listen = check.needed(raw.listen.as_ref(), "listen", "where the orchestrator reaches it");
            let state = check.path(raw.state.as_ref(), "state", "the file that keeps its state");
            let mutual = check.mutual(&raw.tls);
            let orchestrator = raw.orchestrator.as_ref().and_then(|end| check.end(end));
            if raw.orchestrator.is_none() {
                check.error(
                    0..0,
                    "nothing says which orchestrator it serves",
                    "add [orchestrator] with `address`",
                );
            }
            let reasoner = raw.reasoner.as_ref().map(|raw| ReasonerAt {
                address: check.needed(raw.address.as_ref(), "address", "where the reasoner listens"),
                use_case: check.needed(raw.use_case.as_ref(), "use_case", "what the reasoner is asked about"),
                token: raw
                    .token_file
                    .as_ref()
                    .and_then(|at| check.text(at))
                    .map(|text| text.trim().to_owned()),
            });
            let grant = |raw: &At<RawGrant>| Grant {
                purpose: texts(&raw.purpose),
                data: texts(&raw.data),
                client: texts(&raw.client),
            };
            let images = check.images(raw, &state);
            Some(Self {
                user: check.user(raw.user.as_ref()),
                party,
                listen,
                state,
                mutual: mutual?,
                orchestrator: orchestrator?,
                operators: texts(&raw.operators),
                rooms: check.rooms(&raw.node, &texts(&raw.nodes)),
                nodes: texts(&raw.nodes),
                proxies: texts(&raw.proxies).iter().map(|path| check.folder.join(path)).collect(),
                grants: raw.grant.iter().map(grant).collect(),
                reasoner,
                images,
            })
        })
    }
}
