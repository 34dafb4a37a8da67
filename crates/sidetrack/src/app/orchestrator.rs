//! The orchestrator whose applications the page shows.

use crate::admin::Applications;
use crate::config::OrchestratorAt;

#[cfg(feature = "control")]
mod asked {
    use super::{Applications, OrchestratorAt};
    use crate::control::link::{ALPN, Link, LinkError};
    use crate::tls::{Mutual, Trust};
    use anyhow::Context;
    use hyper::Method;
    use std::path::Path;
    use std::time::Duration;

    /// How long an answer may take.
    const PATIENCE: Duration = Duration::from_secs(5);

    /// An orchestrator to ask.
    pub(in crate::app) struct Orchestrator(Link);

    impl Orchestrator {
        /// Reads the files of the settings.
        ///
        /// # Errors
        /// A file cannot be read, or has the wrong content.
        pub(in crate::app) fn new(at: &OrchestratorAt) -> anyhow::Result<Self> {
            let read = |path: &Path| {
                std::fs::read_to_string(path)
                    .with_context(|| format!("[admin.orchestrator]: cannot read {}", path.display()))
            };
            let trust = Trust::Authority(read(&at.ca)?.into());
            let mutual = Mutual::new(&read(&at.identity)?, trust, ALPN).context("[admin.orchestrator]")?;
            Ok(Self(Link::new("the orchestrator", &at.addresses, &at.name, mutual)))
        }

        /// Asks for the applications and their steps.
        ///
        /// # Errors
        /// Says why there is no answer.
        pub(in crate::app) async fn applications(&self) -> Result<Applications, String> {
            let asked = self.0.ask(Method::GET, "/v1/applications", &(), PATIENCE).await;
            let applications = asked.map_err(|error| error.to_string())?;
            let progress = match self.0.ask(Method::GET, "/v1/progress", &(), PATIENCE).await {
                // An orchestrator of an earlier version does not tell the steps.
                Err(LinkError::Refused { status: 404, .. }) => Vec::new(),
                told => told.map_err(|error| error.to_string())?,
            };
            Ok(Applications { applications, progress })
        }
    }
}

#[cfg(not(feature = "control"))]
mod asked {
    use super::{Applications, OrchestratorAt};

    /// A program that was built without the feature `control` asks no orchestrator.
    pub(in crate::app) struct Orchestrator;

    impl Orchestrator {
        /// Refuses the settings.
        ///
        /// # Errors
        /// Always.
        pub(in crate::app) fn new(_: &OrchestratorAt) -> anyhow::Result<Self> {
            anyhow::bail!(
                "[admin.orchestrator]: this program was built without the feature `control`; remove the table"
            )
        }

        /// Is never called.
        ///
        /// # Errors
        /// Never.
        #[expect(clippy::unused_async, reason = "as the other one")]
        pub(in crate::app) async fn applications(&self) -> Result<Applications, String> {
            Ok(Applications::default())
        }
    }
}

pub(super) use asked::Orchestrator;
