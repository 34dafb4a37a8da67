//! The messages between orchestrators, domains and applications: JSON over HTTP/2, described by `openapi.json`.

use super::name;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidetrack_core::agreement::{Access, Surplus};
use std::fmt;

/// What an application needs: data sets of other parties, at its clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Application {
    /// Its name, 1 to 48 letters, digits and `- _ .`, but not `.` or `..`; unique at an orchestrator.
    pub name: String,
    /// The purpose of the data flow: one of the purposes in the agreement.
    pub purpose: String,
    /// Whether the clients receive the data or send it.
    #[serde(default)]
    #[schemars(with = "AccessWord")]
    pub access: Access,
    /// Which data at which nodes; at least one.
    pub flows: Vec<Wanted>,
}

impl Application {
    /// Reads an application that is written in TOML.
    ///
    /// # Errors
    /// Says what is wrong with the text, and where.
    pub fn from_toml(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text)
    }
}

/// The schema of an access.
#[derive(JsonSchema)]
#[serde(rename_all = "lowercase")]
#[allow(dead_code, reason = "stands in the schema for a type of core, which knows no schemas")]
enum AccessWord {
    Read,
    Write,
}

/// The schema of what an agreement says about surpluses.
#[derive(JsonSchema)]
#[serde(rename_all = "lowercase")]
#[allow(dead_code, reason = "stands in the schema for a type of core, which knows no schemas")]
enum SurplusWord {
    Deny,
    Allow,
}

/// A data set at a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// The node whose programs open the connections.
    pub client: String,
    /// The data set.
    pub data: String,
}

/// The eight steps of Fig. 1 of the EPI framework, as one request goes through them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// 1. The application was submitted, and the agreement allows what it asks for.
    Submit,
    /// 2. Each domain that it touches was asked for access.
    RequestAccess,
    /// 3. The domains have granted it.
    Grants,
    /// 4. The domains have said which nodes and functions they offer.
    RequestNodes,
    /// 5. The area logic has planned which bridging functions run where.
    Plan,
    /// 6. The functions are at the proxies and run.
    Ship,
    /// 7. Redirectors and proxies are configured.
    Configure,
    /// 8. The application may begin.
    Ready,
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Self; 8] = [
        Self::Submit,
        Self::RequestAccess,
        Self::Grants,
        Self::RequestNodes,
        Self::Plan,
        Self::Ship,
        Self::Configure,
        Self::Ready,
    ];

    /// Its number, 1 to 8.
    pub const fn number(self) -> u8 {
        self as u8 + 1
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words =
            ["submit", "request access", "grants", "request nodes", "plan", "ship", "configure", "ready"];
        f.write_str(words[usize::from(self.number() - 1)])
    }
}

/// One line of the progress of a set-up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Progress {
    /// A step is done.
    Done {
        /// The step.
        step: Step,
        /// Its number, 1 to 8.
        number: u8,
        /// Time since the application was submitted.
        seconds: f64,
        /// The result in words.
        detail: String,
    },
    /// A step takes time: an image is being sent to a domain.
    Underway {
        /// The step.
        step: Step,
        /// The domain that gets it.
        domain: String,
        /// The image's name.
        image: String,
        /// Bytes of its archive sent so far.
        bytes: u64,
        /// All bytes of its archive.
        bytes_total: u64,
    },
    /// The application is not set up. Everything that was done for it is taken back.
    Failed {
        /// The step that failed.
        step: Step,
        /// The domain that caused the failure, if one did.
        domain: Option<String>,
        /// The reason.
        error: String,
    },
}

/// What the set-up of an application has reported.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// The application's name.
    pub name: String,
    /// The identity of the submission.
    pub id: String,
    /// The member that submitted it.
    pub owner: Option<String>,
    /// The steps that are done, in order; at the end the reason, if one has failed.
    pub lines: Vec<Progress>,
}

/// The phase of an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// It is being set up.
    Preparing,
    /// It runs.
    Ready,
    /// It is being taken back.
    Ending,
}

/// An application as the orchestrator stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ApplicationStatus {
    /// The application as it was submitted.
    pub application: Application,
    /// The identity of this submission. A later application of the same name has another one.
    #[serde(default)]
    pub id: String,
    /// The member that submitted it: the name in its certificate, or its pin if peers are trusted by pins. Null:
    /// it was submitted before owners were stored, and belongs to the operators.
    #[serde(default)]
    pub owner: Option<String>,
    /// Its phase.
    pub phase: Phase,
    /// The domains that it touches.
    pub domains: Vec<String>,
    /// The allowed movements with their functions. Empty before step 5.
    pub movements: Vec<Agreed>,
    /// The identity of the orchestrator that sets it up, if several share their state. Null: it is not being set up, or there is
    /// only one.
    #[serde(default)]
    pub by: Option<String>,
    /// Where the containers of its functions were placed. Empty before step 5, and without capacities and demands.
    #[serde(default)]
    pub placed: Vec<Placed>,
}

/// Room for a container of a function, on a node of a domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Placed {
    /// The party that the node belongs to.
    pub party: String,
    /// The node.
    pub node: String,
    /// The function.
    pub function: String,
    /// The container. Several applications may add to one.
    pub container: String,
    /// CPU time that this application adds to it, thousandths of a core.
    pub cpu_milli: u64,
    /// Memory that this application adds to it, bytes. 0: the container is another application's.
    pub memory_bytes: u64,
}

/// What would be done for an application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Planned {
    /// The allowed movements with their functions.
    pub movements: Vec<Agreed>,
    /// The placements of functions that have a demand.
    pub placements: Vec<Placement>,
}

/// The placement of one function at one party.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Placement {
    /// The party.
    pub party: String,
    /// The function.
    pub function: String,
    /// The steps in words, in their order.
    pub steps: Vec<String>,
    /// The sum of the costs, thousandths of the unit of the offers.
    pub cost_milli: u64,
    /// CPU time that no node has left, thousandths of a core.
    pub missing_cpu_milli: u64,
    /// All that was looked at: for each step each possibility, with its cost or why it is not possible.
    pub why: Vec<String>,
    /// The rooms that the steps take.
    pub placed: Vec<Placed>,
}

impl ApplicationStatus {
    /// Returns how requests to domains name this submission.
    pub fn submission(&self) -> Submission {
        Submission { name: self.application.name.clone(), id: self.id.clone() }
    }
}

/// One submission of an application. Requests to a domain's agent name it, so that a late request for an ended
/// application does not reach a later one of the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submission {
    /// The name of the application.
    pub name: String,
    /// The identity of the submission.
    pub id: String,
}

impl Submission {
    /// Returns the path of a request about it: `end` is empty or begins with `/`.
    pub fn path(&self, end: &str) -> String {
        format!("/v1/applications/{}{end}?id={}", self.name, self.id)
    }
}

/// A movement of data that is allowed for an application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Agreed {
    /// The client and the data.
    #[serde(flatten)]
    pub wanted: Wanted,
    /// The agreements that allow it.
    pub by: Vec<String>,
    /// The attributes that the data must carry, besides those that the area logic asks for.
    pub requires: Vec<String>,
    /// "allow": the data moves to a node that has fewer attributes, and an agreement allows that.
    #[serde(default)]
    #[schemars(with = "SurplusWord")]
    pub surplus: Surplus,
    /// The functions at the client's end.
    pub functions_client: Vec<String>,
    /// The functions at the end of the data.
    pub functions_server: Vec<String>,
}

/// A request for access to a domain's nodes and data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AccessRequest {
    /// The application, with only those flows that touch the domain.
    pub application: Application,
    /// The identity of the submission. Later requests about it carry it in their query.
    #[serde(default)]
    pub id: String,
    /// Without a sign of readiness within this number of seconds, the domain forgets it and takes back what it
    /// did.
    pub lease_seconds: u32,
}

/// What a domain offers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Offer {
    /// The domain's party.
    pub party: String,
    /// The names of its nodes that may take part.
    pub nodes: Vec<String>,
    /// The functions that its proxies have.
    pub functions: Vec<String>,
    /// The room of its nodes for containers. A node without room here takes part, and no container is placed on it.
    #[serde(default)]
    pub rooms: Vec<Room>,
}

/// The room of a node for containers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Room {
    /// The node.
    pub node: String,
    /// CPU time, thousandths of a core.
    pub cpu_milli: u64,
    /// Memory, bytes.
    pub memory_bytes: u64,
    /// The cost of all of it, thousandths of a unit that all domains share.
    pub cost_milli: u64,
    /// Words that functions may ask for.
    pub labels: Vec<String>,
}

/// The functions that a domain's proxies need for an application.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Shipment {
    /// Their names.
    pub functions: Vec<String>,
}

/// The result of a shipment. With no image in it, the functions run; otherwise these images must be sent first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Shipped {
    /// The images of these functions that the domain accepts and that its container engine lacks.
    #[serde(default)]
    pub wanted: Vec<WantedImage>,
}

/// An image that a domain accepts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct WantedImage {
    /// Its name, the same as in `[function.NAME]` of the proxy.
    pub name: String,
    /// The digest of its configuration: `sha256:` and 64 digits.
    pub id: String,
}

/// What a domain's redirectors and proxies must let through for an application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Configuration {
    /// The agreement's facts (`docs/control.md`) in TOML, without the agreements.
    pub facts: String,
    /// The allowed movements. Empty: nothing may move any more.
    pub movements: Vec<Agreed>,
}

/// The result of a configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Configured {
    /// Running flows that ended with `policy_revoked`.
    pub revoked: u64,
}

/// Whether the people that the data is about agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Consent {
    /// They agree.
    Given,
    /// They no longer agree: the data may not move.
    Withdrawn,
}

/// A change of consent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConsentChange {
    /// The new consent.
    pub consent: Consent,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Refusal {
    /// What is wrong.
    pub error: String,
    /// What to do.
    pub help: String,
}

impl Application {
    /// Checks the application itself, without the agreement.
    ///
    /// # Errors
    /// Says what is wrong.
    pub fn check(&self) -> Result<(), String> {
        name::check(&self.name)?;
        if self.flows.is_empty() {
            return Err("the application asks for no data: list `flows` of a client and data".to_owned());
        }
        Ok(())
    }
}
