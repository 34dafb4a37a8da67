//! The agent of a party (EPI framework, Sec. II-A.3). Its authoriser grants or refuses applications; its
//! provisioner offers nodes and configures the party's proxies. It never configures what was not granted.

mod authoriser;
mod images;
mod routes;
pub mod sockets;

pub use routes::router;

use super::api::{
    AccessRequest, Agreed, Application, Configuration, Configured, Consent, ConsentChange, Offer, Shipped,
    Submission,
};
use super::facts;
use super::link::{Link, LinkError};
use super::name;
use super::settings::DomainSettings;
use super::store::{If, LeaseId, Revision, Store, StoreError};
use hyper::Method;
use serde::{Deserialize, Serialize};
use sidetrack_common::admin::FunctionCounts;
use sockets::Sockets;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

/// Time between two rounds: failed requests are tried again, and leases are checked.
const AGAIN: Duration = Duration::from_secs(1);
/// How long the orchestrator may take to answer about consent.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long containers may take to become healthy before a shipment fails. The orchestrator waits longer than
/// this.
const WELL_WITHIN: Duration = Duration::from_secs(5);
/// How often their health is checked meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
const APPLICATIONS: &str = "application/";
const CONSENT: &str = "consent/";
/// Changes of consent that the orchestrator does not know yet.
const UNTOLD: &str = "untold/";

/// The state of a granted application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// What was granted.
    pub application: Application,
    /// The identity of the submission that it was granted to.
    #[serde(default)]
    pub id: String,
    /// Its lease, until it is ready.
    pub lease: Option<LeaseId>,
    /// What the proxies let through for it.
    pub configuration: Option<Configuration>,
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum DomainError {
    /// The authoriser refused it.
    #[error("{0}")]
    Refused(String),
    /// It was not granted, or its lease has expired.
    #[error("access for '{0}' was not granted, or not made use of in time: ask for it again")]
    NotGranted(String),
    /// The proxies lack a function.
    #[error("{0}")]
    Lacking(String),
    /// A function exists but does not work.
    #[error("{0}")]
    Down(String),
    /// An image is wrong, or cannot be accepted.
    #[error("{0}")]
    Image(String),
    /// A proxy rejected the agreement, or cannot be reached.
    #[error("{0}")]
    Proxy(String),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// State of a domain's agent.
pub struct Domain {
    settings: DomainSettings,
    store: Arc<dyn Store>,
    /// The proxies and the container engine.
    sockets: Arc<Sockets>,
    orchestrator: Link,
    /// Held while the proxies are being changed, so that changes do not overlap.
    applying: tokio::sync::Mutex<()>,
    /// Held while an image is being received. A second request for it then finds it there.
    receiving: tokio::sync::Mutex<()>,
    /// Whether the proxies may lack the latest agreement.
    behind: AtomicBool,
}

impl Domain {
    /// Creates an agent with this state.
    pub fn new(settings: DomainSettings, store: Arc<dyn Store>, sockets: Arc<Sockets>) -> Self {
        let end = &settings.orchestrator;
        let orchestrator = Link::new("the orchestrator", &end.addresses, &end.name, settings.mutual.clone());
        Self {
            settings,
            store,
            sockets,
            orchestrator,
            applying: tokio::sync::Mutex::default(),
            receiving: tokio::sync::Mutex::default(),
            behind: AtomicBool::new(true),
        }
    }

    /// The settings of this agent.
    pub const fn settings(&self) -> &DomainSettings {
        &self.settings
    }

    /// Returns the granted applications.
    ///
    /// # Errors
    /// The store fails.
    pub fn held(&self) -> Result<Vec<Held>, StoreError> {
        self.store.list(APPLICATIONS)?.into_iter().map(|(_, entry)| parse(&entry.value)).collect()
    }

    /// Returns what was granted to this submission, with its revision. To a later submission of the same name
    /// other things may have been granted: those are not returned.
    fn find(&self, submission: &Submission) -> Result<(Revision, Held), DomainError> {
        let not_granted = || DomainError::NotGranted(submission.name.clone());
        let entry = self.store.get(&key(&submission.name))?.ok_or_else(not_granted)?;
        let held: Held = parse(&entry.value)?;
        if held.id == submission.id { Ok((entry.revision, held)) } else { Err(not_granted()) }
    }

    fn keep(&self, held: &Held, when: If) -> Result<Revision, StoreError> {
        let value = serde_json::to_vec(held).map_err(|error| StoreError::Failed(error.to_string()))?;
        self.store.put(&key(&held.application.name), &value, when, held.lease)
    }

    /// Step 3: grants access or refuses it.
    ///
    /// # Errors
    /// Fails if the authoriser refuses; the text says why. Fails if another request for the same name was decided
    /// meanwhile.
    pub async fn grant(&self, request: AccessRequest) -> Result<(), DomainError> {
        let AccessRequest { application, id, lease_seconds } = request;
        application.check().map_err(DomainError::Refused)?;
        // The authoriser may take longer than the orchestrator waits. Then a grant that comes late must not
        // replace one that a later submission has by now.
        let before = self.store.get(&key(&application.name))?;
        let when = before.map_or(If::Absent, |before| If::Revision(before.revision));
        authoriser::decide(&self.settings, &application).await.map_err(DomainError::Refused)?;
        let ttl = Duration::from_secs(lease_seconds.into());
        let lease = self.store.grant(ttl, SystemTime::now())?;
        tracing::info!(application = %application.name, purpose = %application.purpose, "granted");
        self.keep(&Held { application, id, lease: Some(lease), configuration: None }, when)?;
        Ok(())
    }

    /// Returns the functions of all proxies, each with its proxy.
    async fn functions(&self) -> Result<Vec<(usize, FunctionCounts)>, DomainError> {
        let mut all = Vec::new();
        for proxy in 0..self.settings.proxies.len() {
            let functions = self.sockets.functions(proxy).await.map_err(DomainError::Proxy)?;
            all.extend(functions.into_iter().map(|function| (proxy, function)));
        }
        Ok(all)
    }

    /// Step 4: returns the nodes and functions on offer.
    ///
    /// # Errors
    /// A proxy cannot be asked.
    pub async fn offer(&self) -> Result<Offer, DomainError> {
        let functions: BTreeSet<_> =
            self.functions().await?.into_iter().map(|(_, function)| function.name).collect();
        let (party, nodes) = (self.settings.party.clone(), self.settings.nodes.clone());
        let (functions, rooms) = (functions.into_iter().collect(), self.settings.rooms.clone());
        Ok(Offer { party, nodes, functions, rooms })
    }

    /// Step 6: makes sure that the functions exist and work, or returns the images that must be sent first.
    /// Waits for containers that are being replaced.
    ///
    /// # Errors
    /// Says which function does not work, and why.
    pub async fn ship(&self, submission: &Submission, functions: &[String]) -> Result<Shipped, DomainError> {
        self.find(submission)?;
        let wanted = self.wanted(functions).await?;
        if !wanted.is_empty() {
            return Ok(Shipped { wanted });
        }
        let until = Instant::now() + WELL_WITHIN;
        loop {
            let Some(why) = self.down(functions).await? else { return Ok(Shipped::default()) };
            if Instant::now() >= until {
                return Err(DomainError::Down(why));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Returns why one of these functions would not pass flows now.
    async fn down(&self, functions: &[String]) -> Result<Option<String>, DomainError> {
        let party = &self.settings.party;
        let mut lacking: BTreeSet<&String> = functions.iter().collect();
        let mut down = None;
        for (_, found) in self.functions().await? {
            if !functions.contains(&found.name) {
                continue;
            }
            lacking.remove(&found.name);
            if let Some(health) = found.containers.filter(|health| health.well == 0) {
                let why = health.trouble.unwrap_or_else(|| "it is being started".to_owned());
                down = Some(format!("the function '{}' of '{party}' is down: {why}", found.name));
            }
        }
        match lacking.first() {
            Some(function) => {
                Err(DomainError::Lacking(format!("no proxy of '{party}' has the function '{function}'")))
            }
            None => Ok(down),
        }
    }

    /// Step 7: tells the proxies what to let through for an application. Only granted movements are accepted.
    ///
    /// # Errors
    /// Fails if a movement was not granted, or if a proxy rejects the agreement.
    pub async fn configure(
        &self,
        peer: &str,
        submission: &Submission,
        configuration: Configuration,
    ) -> Result<Configured, DomainError> {
        let (revision, held) = self.find(submission)?;
        let granted = |agreed: &Agreed| held.application.flows.contains(&agreed.wanted);
        if let Some(stray) = configuration.movements.iter().find(|agreed| !granted(agreed)) {
            let Agreed { wanted, .. } = stray;
            return Err(DomainError::Refused(format!(
                "'{}' at '{}' was not granted",
                wanted.data, wanted.client
            )));
        }
        let before = held.clone();
        let revision =
            self.keep(&Held { configuration: Some(configuration), ..held }, If::Revision(revision))?;
        match self.apply(Some(peer)).await {
            Ok(configured) => Ok(configured),
            Err(error) if before.lease.is_some() => {
                // During the set-up: forget what the proxies rejected, unless it was ended meanwhile.
                match self.keep(&before, If::Revision(revision)) {
                    Err(failed @ StoreError::Failed(_)) => Err(failed.into()),
                    Ok(_) | Err(_) => Err(error),
                }
            }
            // A ready application: the proxies must get the change, now or later.
            Err(error) => Err(error),
        }
    }

    /// Step 8: the application stays until it is ended.
    ///
    /// # Errors
    /// Fails if it was not granted, or if its lease has expired.
    pub fn ready(&self, submission: &Submission) -> Result<(), DomainError> {
        let (revision, held) = self.find(submission)?;
        self.keep(&Held { lease: None, ..held }, If::Revision(revision))?;
        tracing::info!(application = %submission.name, "ready");
        Ok(())
    }

    /// Takes back everything that was done for a submission. Does nothing if it is not known, and leaves a later
    /// submission of the same name alone.
    ///
    /// # Errors
    /// Fails if a proxy cannot be reached; it is tried again later.
    pub async fn end(&self, peer: &str, submission: &Submission) -> Result<Configured, DomainError> {
        let configured = self.forget(submission)?;
        // `behind`: an earlier call may have deleted the entry here and then failed.
        if configured || self.behind.load(Relaxed) {
            self.apply(Some(peer)).await
        } else {
            Ok(Configured::default())
        }
    }

    /// Deletes a submission from the store. Returns whether the proxies were configured for it.
    fn forget(&self, submission: &Submission) -> Result<bool, DomainError> {
        loop {
            let (revision, held) = match self.find(submission) {
                Ok(found) => found,
                Err(DomainError::NotGranted(_)) => return Ok(false),
                Err(error) => return Err(error),
            };
            match self.store.delete(&key(&submission.name), If::Revision(revision)) {
                Ok(_) => {
                    tracing::info!(application = %submission.name, "ended");
                    return Ok(held.configuration.is_some());
                }
                // It was configured, or granted again, between the two calls: look again.
                Err(StoreError::Conflict(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Stores a change of consent. Flows that need withdrawn consent end now.
    ///
    /// # Errors
    /// Fails if a proxy cannot be reached; it is tried again later.
    pub async fn consent(
        self: Arc<Self>,
        peer: &str,
        data: &str,
        consent: Consent,
    ) -> Result<Configured, DomainError> {
        let value = serde_json::to_vec(&consent).map_err(|error| StoreError::Failed(error.to_string()))?;
        self.store.put(&format!("{CONSENT}{data}"), &value, If::Always, None)?;
        self.store.put(&format!("{UNTOLD}{data}"), &value, If::Always, None)?;
        tracing::info!(data, ?consent, "consent changed");
        // Tell the orchestrator while our own proxies are updated.
        let domain = self.clone();
        tokio::spawn(async move { domain.tell().await });
        self.apply(Some(peer)).await
    }

    /// Tells the orchestrator about changes of consent that it does not know yet.
    async fn tell(&self) {
        for (key, entry) in self.store.list(UNTOLD).unwrap_or_default() {
            let data = key.trim_start_matches(UNTOLD);
            let Ok(consent) = parse::<Consent>(&entry.value) else { continue };
            let Ok(segment) = name::segment(data) else { continue };
            let path = format!("/v1/consent/{segment}");
            let told =
                self.orchestrator.ask::<()>(Method::PUT, &path, &ConsentChange { consent }, PATIENCE).await;
            match told {
                // A change that came meanwhile stays, and is told next.
                Ok(()) => drop(self.store.delete(&key, If::Revision(entry.revision))),
                Err(LinkError::Refused { error, .. }) => {
                    tracing::warn!(data, %error, "the orchestrator rejects the change of consent");
                    drop(self.store.delete(&key, If::Revision(entry.revision)));
                }
                Err(error) => {
                    tracing::warn!(data, %error, "cannot send the change of consent; trying again")
                }
            }
        }
    }

    /// Returns the agreement for the proxies.
    fn text(&self) -> anyhow::Result<String> {
        let consent = self.store.list(CONSENT)?.into_iter();
        let consent = consent
            .map(|(key, entry)| Ok((key.trim_start_matches(CONSENT).to_owned(), parse(&entry.value)?)));
        let consent = consent.collect::<Result<BTreeMap<_, Consent>, StoreError>>()?;
        let entries = self.store.list(APPLICATIONS)?;
        // The entry with the highest revision has the latest agreement's facts.
        let latest = entries.iter().max_by_key(|(_, entry)| entry.revision);
        let mut told = None;
        let mut movements = Vec::new();
        for (key, entry) in &entries {
            let held: Held = parse(&entry.value)?;
            let Some(configuration) = held.configuration else { continue };
            if told.is_none() || latest.is_some_and(|(latest, _)| latest == key) {
                told = Some(configuration.facts.clone());
            }
            movements.push((held.application, configuration.movements));
        }
        let Some(told) = told else { return Ok(facts::NOTHING.to_owned()) };
        facts::agreement(facts::with_consent(&told, &consent)?, &movements)
    }

    /// Makes each proxy let through exactly what may move now. `peer`: the name of the peer that caused the change, for the
    /// proxies' history.
    async fn apply(&self, peer: Option<&str>) -> Result<Configured, DomainError> {
        let _one_at_a_time = self.applying.lock().await;
        // Set first: if a proxy fails below, the flag stays and the next round tries again.
        self.behind.store(true, Relaxed);
        let text = self.text().map_err(|error| DomainError::Proxy(format!("{error:#}")))?;
        let mut revoked = 0;
        for proxy in 0..self.settings.proxies.len() {
            revoked += self.sockets.apply(proxy, text.clone(), peer).await.map_err(DomainError::Proxy)?;
        }
        self.behind.store(false, Relaxed);
        Ok(Configured { revoked })
    }

    /// Runs one round: checks leases, updates proxies and reports consent.
    pub async fn work(&self) {
        match self.store.expire(SystemTime::now()) {
            Ok(over) if over.is_empty() => {}
            Ok(over) => {
                tracing::warn!(applications = ?over, "not ready before the lease expired: taken back");
                self.behind.store(true, Relaxed);
            }
            Err(error) => tracing::error!(%error, "cannot check leases"),
        }
        if self.behind.load(Relaxed)
            && let Err(error) = self.apply(None).await
        {
            tracing::warn!(%error, "a proxy does not have the latest agreement; trying again");
        }
        self.tell().await;
    }

    /// Works until the process ends.
    pub async fn follow(self: Arc<Self>) {
        loop {
            self.work().await;
            tokio::time::sleep(AGAIN).await;
        }
    }
}

/// The key of an application in the store.
fn key(name: &str) -> String {
    format!("{APPLICATIONS}{name}")
}

fn parse<T: serde::de::DeserializeOwned>(value: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(value).map_err(|error| StoreError::Failed(error.to_string()))
}
