//! What orchestrators, domains and applications say to each other: JSON over HTTP/2, as `openapi.json` describes.

use super::name;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidetrack_core::agreement::{Access, Surplus};
use std::fmt;

/// What an application needs: data of others, at its clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Application {
    /// Its name, 1 to 48 letters, digits and `- _ .`, but not `.` or `..`; unique at an orchestrator.
    pub name: String,
    /// What the data is wanted for: a purpose of the agreement.
    pub purpose: String,
    /// Whether the clients get the data or give it.
    #[serde(default)]
    #[schemars(with = "AccessWord")]
    pub access: Access,
    /// Which data, at which nodes; at least one.
    pub flows: Vec<Wanted>,
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

/// Data at a node.
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
    /// 1. The application was submitted, and what it asks for is known and agreed on.
    Submit,
    /// 2. Every domain it touches is asked for access.
    RequestAccess,
    /// 3. They have granted it.
    Grants,
    /// 4. They have said which nodes and functions they offer.
    RequestNodes,
    /// 5. The area logic has said which bridging functions stand where.
    Plan,
    /// 6. The functions are at their proxies, and started.
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
        /// Which.
        step: Step,
        /// Its number, 1 to 8.
        number: u8,
        /// Since the application was submitted.
        seconds: f64,
        /// What came of it, in words.
        detail: String,
    },
    /// A step takes its time: an image is on its way to a domain.
    Underway {
        /// Which.
        step: Step,
        /// Where it goes.
        domain: String,
        /// Its name.
        image: String,
        /// How much of its archive is sent.
        bytes: u64,
        /// And how much there is.
        bytes_total: u64,
    },
    /// The application is not set up; whatever was done for it is taken back.
    Failed {
        /// The step that could not be done.
        step: Step,
        /// The domain that stands in the way, if one does.
        domain: Option<String>,
        /// Why.
        error: String,
    },
}

/// How an application stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// It is being set up.
    Preparing,
    /// It runs.
    Ready,
    /// What was done for it is being taken back.
    Ending,
}

/// An application as an orchestrator knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ApplicationStatus {
    /// What it asked for.
    pub application: Application,
    /// The member that submitted it: the name in its certificate, or its pin where peers are trusted by pins. Null: it was
    /// submitted before owners were stored, and belongs to the operators.
    #[serde(default)]
    pub owner: Option<String>,
    /// How it stands.
    pub phase: Phase,
    /// The domains it touches.
    pub domains: Vec<String>,
    /// What may move, and what it passes; empty before step 5.
    pub movements: Vec<Agreed>,
}

/// What may move for an application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Agreed {
    /// The client and the data.
    #[serde(flatten)]
    pub wanted: Wanted,
    /// The agreements that allow it.
    pub by: Vec<String>,
    /// The attributes that the data has to carry, beside those that the area logic asks for.
    pub requires: Vec<String>,
    /// "allow": it moves to a node that has less, which an agreement allows.
    #[serde(default)]
    #[schemars(with = "SurplusWord")]
    pub surplus: Surplus,
    /// The functions at the client's end.
    pub functions_client: Vec<String>,
    /// The functions at the end of the data.
    pub functions_server: Vec<String>,
}

/// An orchestrator asks a domain for access to its nodes and data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AccessRequest {
    /// The application, with those of its flows that touch the domain.
    pub application: Application,
    /// Without a sign of readiness within so many seconds the domain forgets it and takes back what it did.
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
}

/// The functions that a domain's proxy has to have for an application.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Shipment {
    /// Their names.
    pub functions: Vec<String>,
}

/// What a shipment came to: nothing wanted, and the functions are at work; or these images have to be sent first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Shipped {
    /// The images that the functions are made of, that the domain takes and that its container engine lacks.
    #[serde(default)]
    pub wanted: Vec<WantedImage>,
}

/// An image that a domain takes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct WantedImage {
    /// Its name, as `[function.NAME]` of the proxy has it.
    pub name: String,
    /// The digest of its configuration: `sha256:` and 64 digits.
    pub id: String,
}

/// What a domain's redirectors and proxies are to let through for an application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Configuration {
    /// The facts of the agreement (`docs/control.md`) in TOML, without what was agreed.
    pub facts: String,
    /// What may move; none: nothing any more.
    pub movements: Vec<Agreed>,
}

/// What a configuration came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Configured {
    /// Running flows that ended with `policy_revoked`.
    pub revoked: u64,
}

/// Whether those whom data is about agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Consent {
    /// They do.
    Given,
    /// They do not any more: nothing moves.
    Withdrawn,
}

/// A change of consent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConsentChange {
    /// What holds now.
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
    /// What is wrong with it in itself.
    ///
    /// # Errors
    /// In words.
    pub fn check(&self) -> Result<(), String> {
        name::check(&self.name)?;
        if self.flows.is_empty() {
            return Err("the application asks for no data: list `flows` of a client and data".to_owned());
        }
        Ok(())
    }
}
