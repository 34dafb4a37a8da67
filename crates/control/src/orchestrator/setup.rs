//! The eight steps of Fig. 1 (EPI framework), one after the other. If a step fails, everything done so far is
//! taken back.

use super::{LEASE_SECONDS, Orchestrator, PATIENCE, images};
use crate::api::{
    AccessRequest, Agreed, Application, ApplicationStatus, Offer, Phase, Progress, Shipment, Shipped, Step,
    WantedImage,
};
use crate::link::{Link, LinkError};
use crate::store::{If, Revision, StoreError};
use hyper::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How long a domain may take until its functions run. Another image may be on its way to it.
const SHIPPED_WITHIN: Duration = Duration::from_secs(600);

/// Why a step failed.
struct Stop {
    domain: Option<String>,
    error: String,
}

impl From<StoreError> for Stop {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Conflict(_) => stop("it was ended while it was set up"),
            other => stop(other.to_string()),
        }
    }
}

fn taken(error: StoreError) -> Stop {
    match error {
        StoreError::Conflict(_) => stop(
            "there is an application of this name already: choose another name, or end it if it is yours",
        ),
        other => stop(other.to_string()),
    }
}

fn stop(error: impl Into<String>) -> Stop {
    Stop { domain: None, error: error.into() }
}

fn at(domain: &str, error: impl ToString) -> Stop {
    Stop { domain: Some(domain.to_owned()), error: error.to_string() }
}

/// State of a set-up in progress.
struct Setup<'a> {
    orchestrator: &'a Orchestrator,
    status: ApplicationStatus,
    /// The revision of the stored status. If it differs, the application was ended meanwhile.
    revision: Revision,
    /// The identity of this orchestrator among several, at the beginning.
    by: Option<String>,
    /// Domains that refuse access, and their reasons.
    refusals: Vec<(String, String)>,
    /// What the domains offer, by party.
    offers: BTreeMap<String, Offer>,
    began: Instant,
    told: &'a mpsc::Sender<Progress>,
}

impl Orchestrator {
    /// Sets an application up and reports each step. Returns whether it is ready. If not, all that was done is
    /// taken back, at once or as soon as the domains can be reached.
    pub async fn submit(
        &self,
        application: Application,
        owner: String,
        told: mpsc::Sender<Progress>,
    ) -> bool {
        let name = application.name.clone();
        let id = format!("{:016x}", u64::from_be_bytes(sidetrack_sys::random::bytes()));
        let status = ApplicationStatus {
            application,
            id: id.clone(),
            owner: Some(owner),
            phase: Phase::Preparing,
            domains: Vec::new(),
            movements: Vec::new(),
            by: self.member.id(),
            placed: Vec::new(),
        };
        self.reports.begin(&status);
        let mut setup = Setup {
            by: status.by.clone(),
            orchestrator: self,
            status,
            revision: 0,
            refusals: Vec::new(),
            offers: BTreeMap::new(),
            began: Instant::now(),
            told: &told,
        };
        let (mut entered, mut failed) = (false, None);
        for step in Step::ALL {
            match setup.take(step).await {
                Ok(detail) => setup.done(step, detail).await,
                Err(stop) => {
                    failed = Some((step, stop));
                    break;
                }
            }
            // Only after the first step is there something to take back.
            entered = true;
        }
        let Some((step, Stop { domain, error })) = failed else {
            tracing::info!(application = %name, seconds = setup.began.elapsed().as_secs_f64(), "ready");
            return true;
        };
        tracing::warn!(application = %name, %step, ?domain, %error, "not set up");
        // If the owner has ended it meanwhile, a later submission may use the name by now.
        let is_ours = |status: &ApplicationStatus| status.id == id;
        if entered && let Err(error) = self.end(&name, is_ours).await {
            tracing::error!(%error, "cannot take back what was done; trying again at the next start");
        }
        let failed = Progress::Failed { step, domain, error };
        self.reports.add(&id, &failed);
        // The client may be gone.
        let _ = told.send(failed).await;
        false
    }
}

impl Setup<'_> {
    async fn done(&self, step: Step, detail: String) {
        let seconds = self.began.elapsed().as_secs_f64();
        let done = Progress::Done { step, number: step.number(), seconds, detail };
        self.orchestrator.reports.add(&self.status.id, &done);
        let _ = self.told.send(done).await;
    }

    /// Stops if the other orchestrators may count this one as dead: they take the set-up back then, and a late request of this one
    /// must not reach a domain after that.
    fn check_lease(&self) -> Result<(), Stop> {
        let orchestrator = self.orchestrator;
        if !orchestrator.store.is_shared() || (self.by.is_some() && self.by == orchestrator.member.id()) {
            return Ok(());
        }
        Err(stop(
            "this orchestrator has lost its connection to etcd: submit it again, or to another orchestrator",
        ))
    }

    async fn take(&mut self, step: Step) -> Result<String, Stop> {
        self.check_lease()?;
        match step {
            Step::Submit => self.enter(),
            Step::RequestAccess => self.request_access().await,
            Step::Grants => self.grants(),
            Step::RequestNodes => self.request_nodes().await,
            Step::Plan => self.plan(),
            Step::Ship => self.ship().await,
            Step::Configure => self.configure().await,
            Step::Ready => self.ready().await,
        }
    }

    /// Step 1. From here on the application is stored, and its name is taken.
    fn enter(&mut self) -> Result<String, Stop> {
        let application = &self.status.application;
        application.check().map_err(stop)?;
        let master = self.orchestrator.master();
        let mut domains = BTreeSet::new();
        for wanted in &application.flows {
            master.agreed(application, wanted).map_err(stop)?;
            let (client, data) = master.parties(wanted).ok_or_else(|| stop("a party is not known"))?;
            for party in [client, data] {
                self.orchestrator.link(&party).map_err(|error| at(&party, error))?;
                domains.insert(party);
            }
        }
        self.status.domains = domains.into_iter().collect();
        self.revision = self.orchestrator.put(&self.status, If::Absent).map_err(taken)?;
        Ok(format!("agreed on; touches {}", self.status.domains.join(", ")))
    }

    async fn request_access(&mut self) -> Result<String, Stop> {
        for party in &self.status.domains {
            let master = self.orchestrator.master();
            let mut application = self.status.application.clone();
            application.flows.retain(|wanted| master.touches(wanted, party));
            let request =
                AccessRequest { application, id: self.status.id.clone(), lease_seconds: LEASE_SECONDS };
            self.check_lease()?;
            let link = self.orchestrator.link(party).map_err(|error| at(party, error))?;
            match link.ask::<Value>(Method::POST, "/v1/applications", &request, PATIENCE).await {
                Ok(_) => {}
                Err(LinkError::Refused { error, .. }) => self.refusals.push((party.clone(), error)),
                Err(error) => return Err(at(party, error)),
            }
        }
        Ok(format!("asked {}", self.status.domains.join(", ")))
    }

    fn grants(&self) -> Result<String, Stop> {
        match self.refusals.first() {
            Some((party, error)) => Err(at(party, error)),
            None => Ok(format!("granted by {}", self.status.domains.join(", "))),
        }
    }

    async fn request_nodes(&mut self) -> Result<String, Stop> {
        for party in &self.status.domains {
            let offer: Offer = self.ask(party, Method::GET, "/v1/nodes", &()).await?;
            self.offers.insert(party.clone(), offer);
        }
        let mut nodes = BTreeSet::new();
        let master = self.orchestrator.master();
        for wanted in &self.status.application.flows {
            let (Some(parties), Some(ends)) = (master.parties(wanted), master.nodes(wanted)) else {
                return Err(stop("the agreement has changed meanwhile; try again"));
            };
            for (party, node) in [(parties.0, ends.0), (parties.1, ends.1)] {
                if !self.offers.get(&party).is_some_and(|offer| offer.nodes.contains(&node)) {
                    return Err(at(&party, format!("it does not offer the node '{node}'")));
                }
                nodes.insert(node);
            }
        }
        Ok(format!("offered {}", nodes.into_iter().collect::<Vec<_>>().join(", ")))
    }

    /// Step 5: the area logic, run again because the agreement may have changed since the submission.
    fn plan(&mut self) -> Result<String, Stop> {
        let (master, application) = (self.orchestrator.master(), &self.status.application);
        let plan = |wanted| master.agreed(application, wanted).map_err(stop);
        let movements = application.flows.iter().map(plan).collect::<Result<Vec<_>, _>>()?;
        let mut words = Vec::new();
        for agreed in &movements {
            let all: Vec<_> =
                agreed.functions_client.iter().chain(&agreed.functions_server).map(String::as_str).collect();
            let through =
                if all.is_empty() { "as it is".to_owned() } else { format!("through {}", all.join(" -> ")) };
            words.push(format!("{} at {} {through}", agreed.wanted.data, agreed.wanted.client));
        }
        let placements = self.orchestrator.placements(&movements, &self.offers, &self.status.id)?;
        for placement in placements {
            if placement.missing_cpu_milli > 0 {
                let why = placement
                    .why
                    .iter()
                    .rev()
                    .take_while(|line| line.contains(": no: "))
                    .cloned()
                    .collect::<Vec<_>>();
                let (function, missing) = (&placement.function, placement.missing_cpu_milli);
                let error = format!(
                    "there is no room for '{function}': {missing} thousandths of a core are missing; {}",
                    why.join("; ")
                );
                return Err(at(&placement.party, error));
            }
            words.extend(placement.steps);
            self.status.placed.extend(placement.placed);
        }
        self.status.movements = movements;
        self.note()?;
        Ok(words.join("; "))
    }

    /// Returns the functions that a party's proxies need.
    fn functions_of(&self, party: &str) -> Vec<String> {
        let master = self.orchestrator.master();
        let mut functions = BTreeSet::new();
        for Agreed { wanted, functions_client, functions_server, .. } in &self.status.movements {
            let Some((client, data)) = master.parties(wanted) else { continue };
            functions.extend(functions_client.iter().filter(|_| client == party).cloned());
            functions.extend(functions_server.iter().filter(|_| data == party).cloned());
        }
        functions.into_iter().collect()
    }

    async fn ship(&self) -> Result<String, Stop> {
        let mut shipped = Vec::new();
        for party in &self.status.domains {
            let functions = self.functions_of(party);
            if functions.is_empty() {
                continue;
            }
            let what = format!("{} at {party}", functions.join(", "));
            let sent = self.ship_to(party, &Shipment { functions }).await?;
            shipped.push(if sent.is_empty() { what } else { format!("{what} ({} sent)", sent.join(", ")) });
        }
        Ok(if shipped.is_empty() { "no function is needed".to_owned() } else { shipped.join("; ") })
    }

    /// Makes a party's functions run, and sends the images that they lack. Returns descriptions of what was
    /// sent.
    async fn ship_to(&self, party: &str, shipment: &Shipment) -> Result<Vec<String>, Stop> {
        let link = self.orchestrator.link(party).map_err(|error| at(party, error))?;
        let (path, mut sent) = (self.path("/functions"), BTreeMap::new());
        loop {
            let asked = link.ask(Method::PUT, &path, shipment, SHIPPED_WITHIN).await;
            let Shipped { wanted } = asked.map_err(|error| at(party, error))?;
            if wanted.is_empty() {
                return Ok(sent.into_values().collect());
            }
            for image in wanted {
                if sent.contains_key(&image) {
                    return Err(at(party, format!("it lacks the image '{}' after it was sent", image.name)));
                }
                let bytes = self.send(party, link, &image).await?;
                let words = format!("{}, {:.1} MB,", image.name, bytes as f64 / 1e6);
                sent.insert(image, words);
            }
        }
    }

    async fn send(&self, party: &str, link: &Link, image: &WantedImage) -> Result<u64, Stop> {
        let WantedImage { name, id } = image;
        let Some(archive) = self.orchestrator.settings.images.get(name) else {
            let help = format!("the orchestrator's file has no [image.\"{name}\"]");
            return Err(at(party, format!("it lacks the image '{name}' ({id}), and {help}")));
        };
        let submission = self.status.submission();
        let sent = images::send(link, (party, &submission), image, archive, self.told).await;
        sent.map_err(|error| at(party, format!("the image '{name}' was not shipped: {error}")))
    }

    /// Step 7. The domains with the data come first, then those of the clients. Otherwise a client could connect
    /// while the other end still denies it.
    async fn configure(&self) -> Result<String, Stop> {
        let master = self.orchestrator.master();
        let has_data = |party: &&String| {
            let parties = self.status.movements.iter().filter_map(|agreed| master.parties(&agreed.wanted));
            parties.into_iter().any(|(_, data)| data == **party)
        };
        let (data, clients): (Vec<_>, Vec<_>) = self.status.domains.iter().partition(has_data);
        for party in data.iter().chain(&clients) {
            let told = self.orchestrator.tell(&self.status, party).await;
            told.map_err(|error| at(party, error))?;
        }
        Ok(format!("configured {}", self.status.domains.join(", ")))
    }

    async fn ready(&mut self) -> Result<String, Stop> {
        for party in &self.status.domains {
            self.ask::<Value>(party, Method::POST, &self.path("/ready"), &()).await?;
        }
        // The agreement may have changed since the plan. Store what it allows now.
        let master = self.orchestrator.master();
        let movements = master.allowed(&self.status.application);
        let changed = movements != self.status.movements;
        (self.status.phase, self.status.movements, self.status.by) = (Phase::Ready, movements, None);
        self.note()?;
        // An agreement that came between the two lines above passed over this application: it was not ready.
        if changed || !Arc::ptr_eq(&master, &self.orchestrator.master()) {
            self.orchestrator.update(&self.status.application.name)?;
        }
        Ok("the application may begin".to_owned())
    }

    fn note(&mut self) -> Result<(), Stop> {
        self.revision = self.orchestrator.put(&self.status, If::Revision(self.revision))?;
        Ok(())
    }

    fn path(&self, end: &str) -> String {
        self.status.submission().path(end)
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        party: &str,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, Stop> {
        let link = self.orchestrator.link(party).map_err(|error| at(party, error))?;
        link.ask(method, path, body, PATIENCE).await.map_err(|error: LinkError| at(party, error))
    }
}
