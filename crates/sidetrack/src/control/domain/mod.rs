//! A party's agent (EPI framework, Sec. II-A.3): its authoriser grants or refuses, its provisioner offers nodes and configures the
//! party's proxies. What was not granted is never configured, whoever asks.

mod authoriser;
mod images;
mod routes;

pub use routes::router;

use super::api::{
    AccessRequest, Agreed, Application, Configuration, Configured, Consent, ConsentChange, Offer, Shipped,
};
use super::facts;
use super::link::{Link, LinkError};
use super::name;
use super::settings::DomainSettings;
use super::store::{If, LeaseId, Store, StoreError};
use crate::admin::{Applied, Client, FunctionCounts, Functions};
use hyper::Method;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

/// What could not be done is tried again, and leases are looked at, after so long.
const AGAIN: Duration = Duration::from_secs(1);
/// How long the orchestrator may take to hear of consent.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long containers may take to get well before a shipment fails; whoever orders it waits longer than that.
const WELL_WITHIN: Duration = Duration::from_secs(5);
/// How often it is looked whether they are.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
const APPLICATIONS: &str = "application/";
const CONSENT: &str = "consent/";
/// Consent that the orchestrator has not heard of.
const UNTOLD: &str = "untold/";

/// An application as a domain knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// What was granted.
    pub application: Application,
    /// Until it is ready: the lease that it goes with.
    pub lease: Option<LeaseId>,
    /// What the proxies let through for it.
    pub configuration: Option<Configuration>,
}

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum DomainError {
    /// The authoriser says no.
    #[error("{0}")]
    Refused(String),
    /// It was not granted, or its lease is over.
    #[error("access for '{0}' was not granted, or not made use of in time: ask for it again")]
    NotGranted(String),
    /// The proxies lack something.
    #[error("{0}")]
    Lacking(String),
    /// A function is there and does not work.
    #[error("{0}")]
    Down(String),
    /// An image is not what it should be, or cannot be taken.
    #[error("{0}")]
    Image(String),
    /// A proxy does not take it.
    #[error("{0}")]
    Proxy(String),
    /// The store fails.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// See the module.
pub struct Domain {
    settings: DomainSettings,
    store: Arc<dyn Store>,
    orchestrator: Link,
    /// One change of the proxies at a time.
    applying: tokio::sync::Mutex<()>,
    /// One image at a time: whoever wants the same finds it there.
    receiving: tokio::sync::Mutex<()>,
    /// The proxies do not have what they should.
    behind: AtomicBool,
}

impl Domain {
    /// An agent with this state.
    pub fn new(settings: DomainSettings, store: Arc<dyn Store>) -> Self {
        let end = &settings.orchestrator;
        let orchestrator = Link::new("the orchestrator", &end.address, &end.name, settings.mutual.clone());
        Self {
            settings,
            store,
            orchestrator,
            applying: tokio::sync::Mutex::default(),
            receiving: tokio::sync::Mutex::default(),
            behind: AtomicBool::new(true),
        }
    }

    /// What it was told.
    pub const fn settings(&self) -> &DomainSettings {
        &self.settings
    }

    /// The applications it knows.
    ///
    /// # Errors
    /// The store fails.
    pub fn held(&self) -> Result<Vec<Held>, StoreError> {
        self.store.list(APPLICATIONS)?.into_iter().map(|(_, entry)| parse(&entry.value)).collect()
    }

    fn find(&self, name: &str) -> Result<Held, DomainError> {
        let entry = self.store.get(&format!("{APPLICATIONS}{name}"))?;
        entry
            .map(|entry| parse(&entry.value))
            .transpose()?
            .ok_or_else(|| DomainError::NotGranted(name.to_owned()))
    }

    fn keep(&self, held: &Held) -> Result<(), StoreError> {
        let value = serde_json::to_vec(held).map_err(|error| StoreError::Failed(error.to_string()))?;
        let key = format!("{APPLICATIONS}{}", held.application.name);
        self.store.put(&key, &value, If::Always, held.lease).map(drop)
    }

    /// Step 3: grants access or refuses it.
    ///
    /// # Errors
    /// The authoriser says no, and why.
    pub async fn grant(&self, request: AccessRequest) -> Result<(), DomainError> {
        request.application.check().map_err(DomainError::Refused)?;
        authoriser::decide(&self.settings, &request.application).await.map_err(DomainError::Refused)?;
        let ttl = Duration::from_secs(request.lease_seconds.into());
        let lease = self.store.grant(ttl, SystemTime::now())?;
        tracing::info!(application = %request.application.name, purpose = %request.application.purpose, "granted");
        self.keep(&Held { application: request.application, lease: Some(lease), configuration: None })?;
        Ok(())
    }

    /// Step 4: which nodes and functions there are.
    ///
    /// # Errors
    /// A proxy cannot be asked.
    pub async fn offer(&self) -> Result<Offer, DomainError> {
        let mut functions = BTreeSet::new();
        for proxy in &self.settings.proxies {
            functions.extend(functions_of(proxy).await?.into_iter().map(|function| function.name));
        }
        let (party, nodes) = (self.settings.party.clone(), self.settings.nodes.clone());
        Ok(Offer { party, nodes, functions: functions.into_iter().collect() })
    }

    /// Step 6: sees to it that the functions are there, and at work, or says which images have to be sent first. Containers that
    /// are being replaced are waited for.
    ///
    /// # Errors
    /// One is not, which, and why.
    pub async fn ship(&self, name: &str, functions: &[String]) -> Result<Shipped, DomainError> {
        self.find(name)?;
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

    /// Which of these functions flows would not get through just now, and why, in words.
    async fn down(&self, functions: &[String]) -> Result<Option<String>, DomainError> {
        let party = &self.settings.party;
        let mut lacking: BTreeSet<&String> = functions.iter().collect();
        let mut down = None;
        for proxy in &self.settings.proxies {
            for found in functions_of(proxy).await?.into_iter().filter(|one| functions.contains(&one.name)) {
                lacking.remove(&found.name);
                if let Some(health) = found.containers.filter(|health| health.well == 0) {
                    let why = health.trouble.unwrap_or_else(|| "it is being started".to_owned());
                    down = Some(format!("the function '{}' of '{party}' is down: {why}", found.name));
                }
            }
        }
        match lacking.first() {
            Some(function) => {
                Err(DomainError::Lacking(format!("no proxy of '{party}' has the function '{function}'")))
            }
            None => Ok(down),
        }
    }

    /// Step 7: what the proxies let through for an application. Of what is asked for only what was granted.
    ///
    /// # Errors
    /// It was not granted, or a proxy does not take it.
    pub async fn configure(
        &self,
        name: &str,
        configuration: Configuration,
    ) -> Result<Configured, DomainError> {
        let held = self.find(name)?;
        let granted = |agreed: &Agreed| held.application.flows.contains(&agreed.wanted);
        if let Some(stray) = configuration.movements.iter().find(|agreed| !granted(agreed)) {
            let Agreed { wanted, .. } = stray;
            return Err(DomainError::Refused(format!(
                "'{}' at '{}' was not granted",
                wanted.data, wanted.client
            )));
        }
        let before = held.clone();
        self.keep(&Held { configuration: Some(configuration), ..held })?;
        match self.apply().await {
            Ok(configured) => Ok(configured),
            Err(error) if before.lease.is_some() => {
                // A set-up: what the proxies do not take is not kept.
                self.keep(&before)?;
                Err(error)
            }
            // It is ready: the proxies have to hear of it sooner or later.
            Err(error) => Err(error),
        }
    }

    /// Step 8: it stays until it is ended.
    ///
    /// # Errors
    /// It was not granted, or its lease is over.
    pub fn ready(&self, name: &str) -> Result<(), DomainError> {
        let held = self.find(name)?;
        self.keep(&Held { lease: None, ..held })?;
        tracing::info!(application = name, "ready");
        Ok(())
    }

    /// Takes back whatever was done for an application; nothing if it is not known.
    ///
    /// # Errors
    /// A proxy cannot be reached; it is tried again.
    pub async fn end(&self, name: &str) -> Result<Configured, DomainError> {
        let key = format!("{APPLICATIONS}{name}");
        let configured = self.find(name).is_ok_and(|held| held.configuration.is_some());
        if self.store.delete(&key)? {
            tracing::info!(application = name, "ended");
        }
        // Also where an earlier try took it away here and then failed.
        if configured || self.behind.load(Relaxed) { self.apply().await } else { Ok(Configured::default()) }
    }

    /// Notes consent; what runs without it ends now.
    ///
    /// # Errors
    /// A proxy cannot be reached; it is tried again.
    pub async fn consent(self: Arc<Self>, data: &str, consent: Consent) -> Result<Configured, DomainError> {
        let value = serde_json::to_vec(&consent).map_err(|error| StoreError::Failed(error.to_string()))?;
        self.store.put(&format!("{CONSENT}{data}"), &value, If::Always, None)?;
        self.store.put(&format!("{UNTOLD}{data}"), &value, If::Always, None)?;
        tracing::info!(data, ?consent, "consent changed");
        // The others hear of it while our own proxies do.
        let domain = self.clone();
        tokio::spawn(async move { domain.tell().await });
        self.apply().await
    }

    /// Tells the orchestrator of consent it has not heard of.
    async fn tell(&self) {
        for (key, entry) in self.store.list(UNTOLD).unwrap_or_default() {
            let data = key.trim_start_matches(UNTOLD);
            let Ok(consent) = parse::<Consent>(&entry.value) else { continue };
            let Ok(segment) = name::segment(data) else { continue };
            let path = format!("/v1/consent/{segment}");
            let told =
                self.orchestrator.ask::<()>(Method::PUT, &path, &ConsentChange { consent }, PATIENCE).await;
            match told {
                Ok(()) => drop(self.store.delete(&key)),
                Err(LinkError::Refused { error, .. }) => {
                    tracing::warn!(data, %error, "the orchestrator does not want to hear of consent");
                    drop(self.store.delete(&key));
                }
                Err(error) => {
                    tracing::warn!(data, %error, "the orchestrator has not heard of consent; trying again")
                }
            }
        }
    }

    /// The text that the proxies get.
    fn text(&self) -> anyhow::Result<String> {
        let consent = self.store.list(CONSENT)?.into_iter();
        let consent = consent
            .map(|(key, entry)| Ok((key.trim_start_matches(CONSENT).to_owned(), parse(&entry.value)?)));
        let consent = consent.collect::<Result<BTreeMap<_, Consent>, StoreError>>()?;
        let entries = self.store.list(APPLICATIONS)?;
        // The facts told last are those of the latest agreement.
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

    /// Has every proxy let through what may move now, and nothing else.
    async fn apply(&self) -> Result<Configured, DomainError> {
        let _one_at_a_time = self.applying.lock().await;
        // Until it is done.
        self.behind.store(true, Relaxed);
        let text = self.text().map_err(|error| DomainError::Proxy(format!("{error:#}")))?;
        let mut revoked = 0;
        for proxy in &self.settings.proxies {
            let asked =
                Client::new(proxy).send::<Applied>(Method::PUT, "/v1/policy", &[], text.clone()).await;
            revoked += asked.map_err(|error| DomainError::Proxy(error.to_string()))?.revoked.len() as u64;
        }
        self.behind.store(false, Relaxed);
        Ok(Configured { revoked })
    }

    /// Looks after leases, proxies and consent, once.
    pub async fn work(&self) {
        match self.store.expire(SystemTime::now()) {
            Ok(over) if over.is_empty() => {}
            Ok(over) => {
                tracing::warn!(applications = ?over, "never became ready: taken back");
                self.behind.store(true, Relaxed);
            }
            Err(error) => tracing::error!(%error, "leases cannot be looked at"),
        }
        if self.behind.load(Relaxed)
            && let Err(error) = self.apply().await
        {
            tracing::warn!(%error, "a proxy is behind; trying again");
        }
        self.tell().await;
    }

    /// Works for ever.
    pub async fn follow(self: Arc<Self>) {
        loop {
            self.work().await;
            tokio::time::sleep(AGAIN).await;
        }
    }
}

/// The functions that a proxy has.
async fn functions_of(proxy: &std::path::Path) -> Result<Vec<FunctionCounts>, DomainError> {
    let asked = Client::new(proxy).ask::<Functions>(Method::GET, "/v1/functions", &[]).await;
    Ok(asked.map_err(|error| DomainError::Proxy(error.to_string()))?.functions)
}

fn parse<T: serde::de::DeserializeOwned>(value: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(value).map_err(|error| StoreError::Failed(error.to_string()))
}
