//! Images that a domain takes from its orchestrator (step 6): those that its own file names, by digest, and only while an
//! application that was granted needs them. An archive is looked at before the container engine sees any of it.

use super::{Domain, DomainError, functions_of};
use crate::admin::{Client, FunctionCounts};
use crate::control::api::WantedImage;
use crate::control::image::{self, stream};
use crate::control::store::LeaseId;
use crate::function::container::Engine;
use axum::body::Body;
use hyper::Method;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::task::spawn_blocking;

/// Nothing of an archive may come for so long.
const STALLED: Duration = Duration::from_secs(20);
/// How often the lease of an application is renewed while an image of it is received.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// What keeps an image from being taken.
fn not_taken(why: impl ToString) -> DomainError {
    DomainError::Image(why.to_string())
}

/// Work that waits for files or the engine.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DomainError> + Send + 'static,
) -> Result<T, DomainError> {
    spawn_blocking(work).await.unwrap_or_else(|error| Err(not_taken(error)))
}

impl Domain {
    /// The images of these functions that have to be sent.
    ///
    /// # Errors
    /// One is not there and is not taken, or is another one than the file says.
    pub(super) async fn wanted(&self, functions: &[String]) -> Result<Vec<WantedImage>, DomainError> {
        let Some(socket) = self.settings.images.engine.clone() else { return Ok(Vec::new()) };
        let mut images = BTreeSet::new();
        for proxy in &self.settings.proxies {
            for found in functions_of(proxy).await? {
                let down =
                    found.containers.filter(|health| health.well == 0 && functions.contains(&found.name));
                images.extend(down.map(|health| (health.image, found.name)));
            }
        }
        if images.is_empty() {
            return Ok(Vec::new());
        }
        // One that is on its way has arrived then.
        let _one_at_a_time = self.receiving.lock().await;
        let (party, taken) = (self.settings.party.clone(), self.settings.images.taken.clone());
        blocking(move || {
            let engine = Engine::find(Some(&socket)).map_err(not_taken)?;
            let mut wanted = BTreeSet::new();
            for (name, function) in images {
                let id = taken.get(&name);
                match (engine.image(&name).map_err(not_taken)?, id) {
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
        })
        .await
    }

    /// Takes the archive of an image for an application; functions that wait for it start.
    ///
    /// # Errors
    /// The application was not granted, nobody wants the image, the archive is not what it should be, or the engine does not
    /// take it. Nothing of it is left then.
    pub async fn receive(&self, application: &str, id: &str, archive: Body) -> Result<(), DomainError> {
        let lease = self.find(application)?.lease;
        let images = &self.settings.images;
        let named = images.taken.iter().find(|(_, taken)| *taken == id);
        let (Some((name, _)), Some(socket)) = (named, &images.engine) else {
            let party = &self.settings.party;
            return Err(DomainError::Refused(format!("'{party}' takes no image {id}")));
        };
        let _one_at_a_time = self.receiving.lock().await;
        let work = self.take_in(name.clone(), id.to_owned(), socket.clone(), archive);
        tokio::select! {
            taken = work => taken?,
            never = self.keep_alive(lease) => match never {},
        }
        tracing::info!(image = %name, %id, application, "taken");
        self.start(name).await
    }

    /// Renews a lease for ever.
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

    async fn take_in(
        &self,
        name: String,
        id: String,
        socket: PathBuf,
        archive: Body,
    ) -> Result<(), DomainError> {
        let (known, expected, at) = (name.clone(), id.clone(), socket.clone());
        let is_there = blocking(move || {
            let engine = Engine::find(Some(&at)).map_err(not_taken)?;
            Ok(engine.image(&known).map_err(not_taken)?.is_some_and(|found| found == expected))
        });
        if is_there.await? {
            return Ok(());
        }
        let images = &self.settings.images;
        let file = stream::nameless(&images.folder).map_err(|error| {
            not_taken(format!("no file for the archive in {}: {error}", images.folder.display()))
        })?;
        let file = stream::receive(archive, file, images.bytes_max, STALLED).await.map_err(not_taken)?;
        blocking(move || load(file, &name, &id, &socket)).await
    }

    /// Containers of this image that wait are started now.
    async fn start(&self, image: &str) -> Result<(), DomainError> {
        for proxy in &self.settings.proxies {
            let waits = |found: &FunctionCounts| {
                found.containers.as_ref().is_some_and(|health| health.well == 0 && health.image == image)
            };
            for found in functions_of(proxy).await?.into_iter().filter(waits) {
                let path = format!("/v1/functions/{}/start", found.name);
                let asked = Client::new(proxy).ask::<()>(Method::POST, &path, &[]).await;
                asked.map_err(|error| DomainError::Proxy(error.to_string()))?;
            }
        }
        Ok(())
    }
}

/// Gives the engine an archive that is what it should be, and looks whether it has the image then.
fn load(mut file: File, name: &str, id: &str, socket: &std::path::Path) -> Result<(), DomainError> {
    image::check(&file, name, id).map_err(not_taken)?;
    file.seek(SeekFrom::Start(0)).map_err(not_taken)?;
    let engine = Engine::find(Some(socket)).map_err(not_taken)?;
    engine.load(|| stream::body(file, Arc::default())).map_err(not_taken)?;
    if engine.image(name).map_err(not_taken)?.is_none() {
        // The archive names no image: the file of this domain does.
        engine.name_image(id, name).map_err(not_taken)?;
    }
    match engine.image(name).map_err(not_taken)? {
        Some(found) if found == id => Ok(()),
        found => Err(not_taken(format!(
            "the container engine has {} under '{name}' after it took {id}",
            found.as_deref().unwrap_or("nothing")
        ))),
    }
}
