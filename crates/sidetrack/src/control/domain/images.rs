//! Images that a domain accepts from its orchestrator (step 6). They must be in the domain's own file, with
//! their digest, and a granted application must need them. An archive is checked before the container engine
//! sees it.

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
use std::io::{BufWriter, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::task::spawn_blocking;

/// Gives up an archive of which nothing arrives for this time.
const STALLED: Duration = Duration::from_secs(20);
/// How often an application's lease is renewed while one of its images is received.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The error for an image that is rejected.
fn not_taken(why: impl ToString) -> DomainError {
    DomainError::Image(why.to_string())
}

/// Runs work that waits for files or for the engine.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DomainError> + Send + 'static,
) -> Result<T, DomainError> {
    spawn_blocking(work).await.unwrap_or_else(|error| Err(not_taken(error)))
}

impl Domain {
    /// Returns the images of these functions that the orchestrator must send.
    ///
    /// # Errors
    /// Fails if an image is missing and not accepted, or differs from the one in the file.
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
        // Wait for an image that is being received: then it is there.
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

    /// Receives the archive of an image for an application. Functions that wait for the image start.
    ///
    /// # Errors
    /// Fails if the application was not granted, the image is not needed, the archive is wrong, or the engine
    /// rejects it. Then nothing of the image is left.
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
        let folder = images.folder.clone();
        blocking(move || load(file, &folder, &name, &id, &socket)).await
    }

    /// Starts the containers that wait for this image.
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

/// Gives the engine a new archive of the checked parts, and checks that it then has the image. If not, removes
/// what the engine loaded.
fn load(
    mut file: File,
    folder: &std::path::Path,
    name: &str,
    id: &str,
    socket: &std::path::Path,
) -> Result<(), DomainError> {
    let checked = image::check(&file, name, id).map_err(not_taken)?;
    let mut fresh = stream::nameless(folder).map_err(not_taken)?;
    checked.write(&mut file, BufWriter::new(&fresh)).map_err(not_taken)?;
    drop(file);
    fresh.seek(SeekFrom::Start(0)).map_err(not_taken)?;
    let engine = Engine::find(Some(socket)).map_err(not_taken)?;
    // If the engine had the image before, a failure must not remove it.
    let was_there = engine.image(id).map_err(not_taken)?.is_some();
    let loaded = load_and_name(&engine, fresh, name, id);
    if loaded.is_err()
        && !was_there
        && let Ok(Some(left)) = engine.image(id)
        && let Err(error) = engine.remove_image(&left)
    {
        tracing::warn!(image = %name, %id, %error, "the image was refused after it was loaded, and cannot be removed");
    }
    loaded
}

fn load_and_name(engine: &Engine, archive: File, name: &str, id: &str) -> Result<(), DomainError> {
    engine.load(|| stream::body(archive, Arc::default())).map_err(not_taken)?;
    if engine.image(name).map_err(not_taken)?.is_none() {
        // The archive does not name its image, so use the name in the domain's file.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::net::UnixListener;
    use std::sync::Mutex;

    /// A container engine that loads the image and then has a different one under its name. Requests go to
    /// `asked`.
    fn engine_that_takes_it_for_another(
        socket: &std::path::Path,
        id: String,
        asked: Arc<Mutex<Vec<String>>>,
    ) {
        let listener = UnixListener::bind(socket).expect("a socket");
        std::thread::spawn(move || {
            let mut loaded = false;
            for stream in listener.incoming().map_while(Result::ok) {
                let mut reader = BufReader::new(stream);
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") && reader.read_until(b'\n', &mut head).is_ok_and(|n| n > 0)
                {
                }
                let head = String::from_utf8_lossy(&head).into_owned();
                let Some(request) = head.lines().next() else { continue };
                if request.starts_with("POST /v1.40/images/load") {
                    loaded = true;
                    // The body is chunked, and ends with an empty chunk.
                    let mut body = Vec::new();
                    while !body.ends_with(b"\r\n0\r\n\r\n")
                        && reader.by_ref().take(1).read_to_end(&mut body).is_ok()
                    {}
                }
                let answer = match request {
                    _ if !loaded => "HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}".to_owned(),
                    get if get.starts_with("GET") => {
                        let has =
                            if get.contains(&id) { id.clone() } else { format!("sha256:{}", "5".repeat(64)) };
                        let body = format!(r#"{{"Id":"{has}"}}"#);
                        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
                    }
                    _ => "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}".to_owned(),
                };
                asked.lock().expect("no panic").push(request.to_owned());
                let _ = reader.get_mut().write_all(answer.as_bytes());
            }
        });
    }

    #[test]
    fn what_was_loaded_is_removed_when_it_turns_out_to_be_another() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("engine.sock");
        let (archive, id) = image::tests::whole();
        let file = stream::nameless(folder.path()).expect("a file");
        (&file).write_all(&archive).expect("written");
        let asked = Arc::default();
        engine_that_takes_it_for_another(&socket, id.clone(), Arc::clone(&asked));
        let error = load(file, folder.path(), image::tests::NAME, &id, &socket).expect_err("another image");
        assert!(error.to_string().contains("555"), "{error}");
        let asked = asked.lock().expect("no panic");
        let removed = format!("DELETE /v1.40/images/{id}?force=true HTTP/1.1");
        assert_eq!(asked.last(), Some(&removed), "{asked:?}");
    }
}
