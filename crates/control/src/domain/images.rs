//! Images that a domain accepts from its orchestrator (step 6). They must be in the domain's own file, with
//! their digest, and a granted application must need them. An archive is checked before the container engine
//! sees it.

use super::{Domain, DomainError};
use crate::api::{Submission, WantedImage};
use crate::image::stream;
use crate::store::LeaseId;
use axum::body::Body;
use sidetrack_common::admin::FunctionCounts;
use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

/// Gives up an archive of which nothing arrives for this time.
const STALLED: Duration = Duration::from_secs(20);
/// How often an application's lease is renewed while one of its images is received.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The error for an image that is rejected.
fn not_taken(why: impl ToString) -> DomainError {
    DomainError::Image(why.to_string())
}

impl Domain {
    /// Returns the images of these functions that the orchestrator must send.
    ///
    /// # Errors
    /// Fails if an image is missing and not accepted, or differs from the one in the file.
    pub(super) async fn wanted(&self, functions: &[String]) -> Result<Vec<WantedImage>, DomainError> {
        if self.settings.images.engine.is_none() {
            return Ok(Vec::new());
        }
        let mut images = BTreeSet::new();
        for (_, found) in self.functions().await? {
            let down = found.containers.filter(|health| health.well == 0 && functions.contains(&found.name));
            images.extend(down.map(|health| (health.image, found.name)));
        }
        if images.is_empty() {
            return Ok(Vec::new());
        }
        // Wait for an image that is being received: then it is there.
        let _one_at_a_time = self.receiving.lock().await;
        let (party, taken) = (&self.settings.party, &self.settings.images.taken);
        let mut wanted = BTreeSet::new();
        for (name, function) in images {
            match (self.sockets.image(&name).await.map_err(not_taken)?, taken.get(&name)) {
                (None, Some(id)) => drop(wanted.insert(WantedImage { name, id: id.clone() })),
                (None, None) => {
                    return Err(DomainError::Refused(format!(
                        "'{party}' has no image '{name}' for the function '{function}', and takes none: its file has no \
                         [image.\"{name}\"]"
                    )));
                }
                (Some(found), Some(id)) if found != *id => {
                    return Err(not_taken(format!(
                        "the image '{name}' of '{party}' is {found}, and its file says {id}: remove it, or correct the file"
                    )));
                }
                (Some(_), _) => {}
            }
        }
        Ok(wanted.into_iter().collect())
    }

    /// Receives the archive of an image for an application. Functions that wait for the image start.
    ///
    /// # Errors
    /// Fails if the application was not granted, the image is not needed, the archive is wrong, or the engine
    /// rejects it. Then nothing of the image is left.
    pub async fn receive(&self, submission: &Submission, id: &str, archive: Body) -> Result<(), DomainError> {
        let lease = self.find(submission)?.1.lease;
        let images = &self.settings.images;
        let named = images.taken.iter().find(|(_, taken)| *taken == id);
        let (Some((name, _)), Some(_)) = (named, &images.engine) else {
            let party = &self.settings.party;
            return Err(DomainError::Refused(format!("'{party}' takes no image {id}")));
        };
        let _one_at_a_time = self.receiving.lock().await;
        let work = self.take_in(name, id, archive);
        tokio::select! {
            taken = work => taken?,
            never = self.keep_alive(lease) => match never {},
        }
        tracing::info!(image = %name, %id, application = %submission.name, "taken");
        self.start(name).await
    }

    /// Renews a lease without end.
    async fn keep_alive(&self, lease: Option<LeaseId>) -> std::convert::Infallible {
        loop {
            if let Some(lease) = lease
                && let Err(error) = self.store.keep_alive(lease, SystemTime::now())
            {
                tracing::warn!(%error, "the lease of an application cannot be renewed");
            }
            tokio::time::sleep(KEEP_ALIVE).await;
        }
    }

    async fn take_in(&self, name: &str, id: &str, archive: Body) -> Result<(), DomainError> {
        if self.sockets.image(name).await.map_err(not_taken)?.is_some_and(|found| found == id) {
            return Ok(());
        }
        let file = self.sockets.file().await.map_err(not_taken)?;
        let most = self.settings.images.bytes_max;
        let file = stream::receive(archive, file, most, STALLED).await.map_err(not_taken)?;
        self.sockets.load(id, file).await.map_err(not_taken)
    }

    /// Starts the containers that wait for this image.
    async fn start(&self, image: &str) -> Result<(), DomainError> {
        let waits = |found: &FunctionCounts| {
            found.containers.as_ref().is_some_and(|health| health.well == 0 && health.image == image)
        };
        for (proxy, found) in self.functions().await?.into_iter().filter(|(_, found)| waits(found)) {
            self.sockets.start_function(proxy, found.name).await.map_err(DomainError::Proxy)?;
        }
        Ok(())
    }
}
