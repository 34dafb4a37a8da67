//! Which questions about names the command's resolver may ask, if the lists of the command line decide.

use super::failures::Telling;
use crate::config::Config;
use crate::dns::{Admission, Admits, Asker};
use crate::process::Owners;
use arc_swap::ArcSwap;
use sidetrack_core::flow::{HostName, Intercept};
use sidetrack_core::jail::NameBudget;
use sidetrack_core::placeholder::Secrets;
use sidetrack_core::time::Instant;
use sidetrack_sys::sync::lock;
use std::sync::{Arc, Mutex};

/// Lets only those names be asked that the rules let pass, and bounds what they can carry.
pub(super) struct JailedNames {
    config: Arc<ArcSwap<Config>>,
    budget: Mutex<NameBudget>,
    telling: Arc<Telling>,
    owners: Owners,
}

impl JailedNames {
    /// For the command with this process id.
    pub(super) fn new(config: Arc<ArcSwap<Config>>, telling: Arc<Telling>, pid: u32) -> Self {
        Self { config, budget: Mutex::new(NameBudget::new()), telling, owners: Owners::Within(pid, None) }
    }
}

impl Admits for JailedNames {
    fn admit(&self, name: &HostName, now: Instant) -> Admission {
        let how = self.config.load().policy.lets_name_pass(name, Intercept::Run);
        match lock(&self.budget).ask(now, name, how) {
            Ok(true) => Admission::Fully,
            Ok(false) => Admission::AddressesOnly,
            Err(refusal) => Admission::Refused(refusal.why()),
        }
    }

    fn refused(&self, name: &HostName, why: &'static str, asker: Option<Asker>) {
        // To find the program takes long: once for each name.
        let asker = asker.filter(|_| self.telling.is_new(name));
        let program = asker.and_then(|(client, asked)| self.owners.of_datagram(client, asked).name);
        self.telling.refused_name(name, program, why);
    }
}

/// Lets no name be asked that has the placeholder of a secret, whatever the lists say.
pub(super) struct NamesWithoutSecrets {
    pub secrets: Arc<Secrets>,
    /// What decides about the other names, if lists do.
    pub next: Option<JailedNames>,
    pub telling: Arc<Telling>,
    pub owners: Owners,
}

impl NamesWithoutSecrets {
    /// Whether a placeholder is in the name, also in several labels.
    fn has_placeholder(&self, name: &HostName) -> bool {
        self.secrets.find(name.as_str().replace('.', "").as_bytes()).is_err()
    }
}

impl Admits for NamesWithoutSecrets {
    fn admit(&self, name: &HostName, now: Instant) -> Admission {
        if self.has_placeholder(name) {
            return Admission::Refused("a name carries no secret");
        }
        self.next.as_ref().map_or(Admission::Fully, |next| next.admit(name, now))
    }

    fn refused(&self, name: &HostName, why: &'static str, asker: Option<Asker>) {
        if !self.has_placeholder(name) {
            return self.next.iter().for_each(|next| next.refused(name, why, asker));
        }
        let program = asker.and_then(|(client, asked)| self.owners.of_datagram(client, asked).name);
        self.telling.refused_secret(name, program, why);
    }
}
