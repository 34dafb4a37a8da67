//! The infrastructure orchestrator (EPI framework, Sec. II-A.1). It accepts applications, asks the domains that
//! they touch, plans the bridging functions and has them configured. It is not on the data path: if it stops,
//! ready applications continue.

mod images;
mod master;
mod member;
mod place;
mod reports;
mod routes;
mod setup;

pub use routes::router;

use super::api::{Agreed, ApplicationStatus, Configuration, Configured, Consent, Phase};
use super::link::{Link, LinkError};
use super::settings::OrchestratorSettings;
use super::store::{If, Revision, Store, StoreError};
use hyper::Method;
use master::Master;
use member::Member;
use reports::Reports;
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::Notify;

/// How long a domain may take for one request.
const PATIENCE: Duration = Duration::from_secs(10);
/// A domain forgets a set-up that is not ready after this time, seconds.
const LEASE_SECONDS: u32 = 60;
/// Time until a failed request to a domain is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// Prefix of applications in the store.
const APPLICATIONS: &str = "application/";
/// Prefix of changed consent in the store.
const CONSENT: &str = "consent/";

/// State of an orchestrator: settings, store, connections to domains and the agreement.
pub struct Orchestrator {
    settings: OrchestratorSettings,
    store: Arc<dyn Store>,
    links: BTreeMap<String, Link>,
    master: Mutex<Arc<Master>>,
    /// Held while the agreement is read, so that an older reading does not replace a newer one.
    reading: Mutex<()>,
    /// Ready applications and the domains that do not yet have the latest agreement for them.
    untold: Mutex<BTreeSet<(String, String)>>,
    /// Domains to which a change is being sent now.
    busy: Mutex<BTreeSet<String>>,
    /// Wakes [`Orchestrator::follow`]: a domain has to be told something.
    changed: Notify,
    is_ending: AtomicBool,
    /// This orchestrator among several on one store.
    member: Member,
    /// What the latest set-ups have reported.
    reports: Reports,
}

impl Orchestrator {
    /// Reads the agreement and the stored state. No domain is asked yet.
    ///
    /// # Errors
    /// Says what is wrong with the agreement, with its place, or with the state.
    pub fn new(settings: OrchestratorSettings, store: Arc<dyn Store>) -> anyhow::Result<Self> {
        let mutual = &settings.mutual;
        let link = |(party, end): (&String, &super::settings::End)| {
            let name = format!("the domain '{party}'");
            (party.clone(), Link::new(&name, &end.addresses, &end.name, mutual.clone()))
        };
        let links = settings.domains.iter().map(link).collect();
        let master = Arc::new(Master::read(&settings.agreement, &withdrawn(&*store)?, None)?);
        let orchestrator = Self {
            settings,
            store,
            links,
            master: Mutex::new(master),
            reading: Mutex::default(),
            untold: Mutex::default(),
            busy: Mutex::default(),
            changed: Notify::new(),
            is_ending: AtomicBool::new(false),
            member: Member::default(),
            reports: Reports::default(),
        };
        for (revision, status) in orchestrator.applications()? {
            match status.phase {
                // Another orchestrator may be setting it up: `belong` looks after it.
                Phase::Preparing if orchestrator.store.is_shared() => {}
                // The set-up was interrupted by a restart, and its client is disconnected. Take back what was
                // done.
                Phase::Preparing => {
                    let status = ApplicationStatus { phase: Phase::Ending, ..status };
                    orchestrator.put(&status, If::Revision(revision))?;
                }
                Phase::Ready => orchestrator.tell_later(&status),
                Phase::Ending => {}
            }
        }
        Ok(orchestrator)
    }

    /// The settings of this orchestrator.
    pub const fn settings(&self) -> &OrchestratorSettings {
        &self.settings
    }

    /// The agreement in force.
    fn master(&self) -> Arc<Master> {
        lock(&self.master).clone()
    }

    /// The applications with the revisions of their state, by name.
    fn applications(&self) -> Result<Vec<(Revision, ApplicationStatus)>, StoreError> {
        let list = self.store.list(APPLICATIONS)?;
        list.into_iter().map(|(_, entry)| Ok((entry.revision, parse(&entry.value)?))).collect()
    }

    /// An application with the revision of its state.
    fn application(&self, name: &str) -> Result<Option<(Revision, ApplicationStatus)>, StoreError> {
        let entry = self.store.get(&key(name))?;
        entry.map(|entry| Ok((entry.revision, parse(&entry.value)?))).transpose()
    }

    fn put(&self, status: &ApplicationStatus, when: If) -> Result<Revision, StoreError> {
        let value = serde_json::to_vec(status).map_err(|error| StoreError::Failed(error.to_string()))?;
        self.store.put(&key(&status.application.name), &value, when, None)
    }

    fn link(&self, party: &str) -> Result<&Link, LinkError> {
        let missing =
            || LinkError::Unreachable(format!("the domain '{party}'"), "it has no [domain] here".to_owned());
        self.links.get(party).ok_or_else(missing)
    }

    /// Takes back everything that was done for an application, if `may_end` allows it. Returns whether such an
    /// application exists. Domains that cannot be reached are asked again until they answer.
    ///
    /// # Errors
    /// The store fails.
    pub async fn end(
        &self,
        name: &str,
        may_end: impl Fn(&ApplicationStatus) -> bool,
    ) -> Result<bool, StoreError> {
        loop {
            let found = self.application(name)?.filter(|(_, status)| may_end(status));
            let Some((revision, status)) = found else { return Ok(false) };
            let is_ending = status.phase == Phase::Ending;
            let status = ApplicationStatus { phase: Phase::Ending, ..status };
            let stored = if is_ending { Ok(revision) } else { self.put(&status, If::Revision(revision)) };
            match stored {
                Ok(revision) => {
                    self.take_back(revision, status).await?;
                    return Ok(true);
                }
                // Its state was changed between the two calls: look again.
                Err(StoreError::Conflict(_)) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes back what was done for an application whose state has this revision. If the state changes meanwhile,
    /// the caller that changed it goes on with it: nothing is stored or deleted here.
    async fn take_back(&self, revision: Revision, mut status: ApplicationStatus) -> Result<(), StoreError> {
        let (name, path) = (status.application.name.clone(), status.submission().path(""));
        let mut left = Vec::new();
        for party in &status.domains {
            let asked: Result<Configured, LinkError> = match self.link(party) {
                Ok(link) => link.ask(Method::DELETE, &path, &(), PATIENCE).await,
                // The domain was removed from the settings, so it cannot be asked.
                Err(_) => Ok(Configured::default()),
            };
            if let Err(error) = asked {
                tracing::warn!(application = %name, domain = %party, %error, "cannot take back; trying again");
                left.push(party.clone());
            }
        }
        let when = If::Revision(revision);
        let stored = if left.is_empty() {
            self.store.delete(&key(&name), when).map(|_| {
                tracing::info!(application = %name, "ended; everything is taken back");
            })
        } else {
            status.domains = left;
            self.put(&status, when).map(drop)
        };
        match stored {
            Err(StoreError::Conflict(_)) => Ok(()),
            stored => stored,
        }
    }

    fn tell_later(&self, status: &ApplicationStatus) {
        let name = &status.application.name;
        lock(&self.untold).extend(status.domains.iter().map(|party| (name.clone(), party.clone())));
        self.changed.notify_one();
    }

    /// Reads the agreement again, and updates the running applications accordingly.
    ///
    /// # Errors
    /// Says what is wrong with the agreement. Then nothing changes.
    pub fn reconsider(&self) -> anyhow::Result<()> {
        let _one_at_a_time = lock(&self.reading);
        let known = self.master();
        let consent = withdrawn(&*self.store)?;
        let master = Arc::new(Master::read(&self.settings.agreement, &consent, Some(&known))?);
        *lock(&self.master) = master;
        for (_, status) in self.applications()? {
            self.update(&status.application.name)?;
        }
        Ok(())
    }

    /// Stores what the agreement in force allows for an application, and has its domains told. Does nothing if it
    /// is not ready.
    fn update(&self, name: &str) -> Result<(), StoreError> {
        loop {
            let found = self.application(name)?.filter(|(_, status)| status.phase == Phase::Ready);
            let Some((revision, status)) = found else { return Ok(()) };
            let movements = self.master().allowed(&status.application);
            if movements != status.movements {
                let (before, now) = (status.movements.len(), movements.len());
                tracing::info!(application = %name, before, now, "movements changed");
            }
            let status = ApplicationStatus { movements, ..status };
            match self.put(&status, If::Revision(revision)) {
                Ok(_) => {
                    self.tell_later(&status);
                    return Ok(());
                }
                // It was ended or updated between the two calls: look again.
                Err(StoreError::Conflict(_)) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Stores a change of consent that a domain reports.
    ///
    /// # Errors
    /// Fails if the data does not belong to this domain, or if the store fails.
    pub fn consent(&self, peer: &str, data: &str, consent: Consent) -> anyhow::Result<()> {
        let owner = self.master().owner(data);
        let owner = owner.ok_or_else(|| anyhow::anyhow!("there is no data set '{data}' in the agreement"))?;
        let name = self.settings.domains.get(&owner).map(|end| end.name.as_str());
        anyhow::ensure!(name == Some(peer), "'{data}' is data of '{owner}', and '{peer}' is not its agent");
        let value = serde_json::to_vec(&consent)?;
        self.store.put(&format!("{CONSENT}{data}"), &value, If::Always, None)?;
        tracing::info!(%data, domain = %owner, ?consent, "consent changed");
        self.reconsider()
    }

    /// Returns what a domain's proxies may let through for an application.
    fn configuration(&self, movements: &[Agreed], party: &str) -> Configuration {
        let master = self.master();
        let movements = movements.iter().filter(|agreed| master.touches(&agreed.wanted, party)).cloned();
        Configuration { facts: master.facts().to_owned(), movements: movements.collect() }
    }

    async fn tell(&self, status: &ApplicationStatus, party: &str) -> Result<Configured, LinkError> {
        let (path, told) =
            (status.submission().path("/policy"), self.configuration(&status.movements, party));
        self.link(party)?.ask(Method::PUT, &path, &told, PATIENCE).await
    }

    /// Sends each domain the changes that it does not have yet, to all at the same time, so that a slow one
    /// delays no other.
    fn tell_due(self: &Arc<Self>) {
        let mut due: BTreeMap<String, Vec<String>> = BTreeMap::new();
        {
            let mut busy = lock(&self.busy);
            lock(&self.untold).retain(|(name, party)| {
                let waits = busy.contains(party);
                if !waits {
                    due.entry(party.clone()).or_default().push(name.clone());
                }
                waits
            });
            busy.extend(due.keys().cloned());
        }
        for (party, names) in due {
            let orchestrator = self.clone();
            tokio::spawn(async move { orchestrator.tell_all(&party, names).await });
        }
    }

    /// Sends one domain the changes for these applications. Failed ones are tried again.
    async fn tell_all(&self, party: &str, names: Vec<String>) {
        let mut failed = false;
        for name in names {
            let Ok(Some((_, status))) = self.application(&name) else { continue };
            if status.phase != Phase::Ready {
                continue;
            }
            if let Err(error) = self.tell(&status, party).await {
                tracing::warn!(application = %name, domain = %party, %error, "cannot send the change; trying again");
                lock(&self.untold).insert((name, party.to_owned()));
                failed = true;
            }
        }
        lock(&self.busy).remove(party);
        if !failed {
            // A change that came meanwhile waited for this one to finish.
            self.changed.notify_one();
        }
    }

    /// Takes back applications that could not be ended so far, in a task of its own.
    fn end_due(self: &Arc<Self>) {
        if self.is_ending.swap(true, Relaxed) {
            return;
        }
        let orchestrator = self.clone();
        tokio::spawn(async move {
            let all = orchestrator.applications().unwrap_or_default();
            for (revision, status) in all.into_iter().filter(|(_, status)| status.phase == Phase::Ending) {
                if let Err(error) = orchestrator.take_back(revision, status).await {
                    tracing::error!(%error, "cannot end an application");
                }
            }
            orchestrator.is_ending.store(false, Relaxed);
        });
    }

    /// Works until the process ends. Domains get changes at once, failed requests are tried again, and the
    /// agreement is read again when its file or a date in it has changed it.
    pub async fn follow(self: Arc<Self>) {
        let mut next_look = Instant::now();
        loop {
            self.tell_due();
            self.end_due();
            tokio::select! {
                () = tokio::time::sleep(AGAIN) => {}
                () = self.changed.notified() => {}
            }
            if next_look <= Instant::now()
                && self.master().is_outdated(&self.settings.agreement, SystemTime::now())
                && let Err(error) = self.reconsider()
            {
                tracing::error!("the agreement is rejected; nothing changes\n{error:#}");
                next_look = Instant::now() + AGAIN * 4;
            }
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

/// Returns the data sets whose consent a domain has changed, with their present consent. It overrides the file.
fn withdrawn(store: &dyn Store) -> Result<BTreeMap<String, Consent>, StoreError> {
    let list = store.list(CONSENT)?;
    let data = |key: String| key.trim_start_matches(CONSENT).to_owned();
    list.into_iter().map(|(key, entry)| Ok((data(key), parse(&entry.value)?))).collect()
}
