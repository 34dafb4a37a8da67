//! Images that an orchestrator ships: each is read from its archive for every domain that needs it, and sent
//! unchanged.

use crate::api::{Progress, Step, Submission, WantedImage};
use crate::image::{self, stream};
use crate::link::{Link, LinkError};
use hyper::Method;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::Instant;

/// Time between two progress lines about an image.
const TOLD_EVERY: Duration = Duration::from_secs(1);
/// Gives up a domain that takes no byte for this time.
const STALLED: Duration = Duration::from_secs(30);
/// How long the domain's container engine may take to unpack the image.
const UNPACKED_WITHIN: Duration = Duration::from_secs(300);
/// Attempts to send an image. If the connection breaks, it is sent once more.
const TRIES: u32 = 2;

/// Sends the image that a domain needs for an application, and reports progress. Returns the bytes of the
/// archive.
///
/// # Errors
/// Fails if the archive is not that image, or if the domain rejects it. The text says why.
pub(super) async fn send(
    link: &Link,
    (domain, submission): (&str, &Submission),
    image: &WantedImage,
    archive: &Path,
    told: &mpsc::Sender<Progress>,
) -> Result<u64, String> {
    let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", archive.display());
    let open = || File::open(archive).map_err(|error| wrong(&error));
    let (file, WantedImage { name, id }) = (open()?, image.clone());
    let checked = spawn_blocking(move || image::check(&file, &name, &id)).await;
    drop(checked.map_err(|error| wrong(&error))?.map_err(|error| wrong(&error))?);
    let path = submission.path(&format!("/images/{}", image.id));
    for _ in 1..TRIES {
        match try_once(link, domain, &path, image, open()?, told).await {
            Err(LinkError::Unreachable(whom, why)) => {
                tracing::warn!(image = %image.name, %whom, %why, "the connection broke; sending the image once more");
            }
            sent => return sent.map_err(|error| error.to_string()),
        }
    }
    try_once(link, domain, &path, image, open()?, told).await.map_err(|error| error.to_string())
}

async fn try_once(
    link: &Link,
    domain: &str,
    path: &str,
    image: &WantedImage,
    mut file: File,
    told: &mpsc::Sender<Progress>,
) -> Result<u64, LinkError> {
    let broken = |error: std::io::Error| LinkError::Broken(image.name.clone(), error.to_string());
    let total = file.seek(SeekFrom::End(0)).map_err(broken)?;
    file.seek(SeekFrom::Start(0)).map_err(broken)?;
    let gone = Arc::new(AtomicU64::new(0));
    let body = stream::body(file, gone.clone());
    let mut sent = pin!(link.stream(Method::PUT, path, "application/x-tar", body));
    let (mut before, mut since) = (0, Instant::now());
    loop {
        let bytes = gone.load(Relaxed);
        if bytes > before {
            (before, since) = (bytes, Instant::now());
        }
        let patience = if bytes < total { STALLED } else { UNPACKED_WITHIN };
        if since.elapsed() > patience {
            let why = format!("nothing moves for {} s", patience.as_secs());
            return Err(LinkError::Broken(link.name().to_owned(), why));
        }
        let (domain, image) = (domain.to_owned(), image.name.clone());
        let underway = Progress::Underway { step: Step::Ship, domain, image, bytes, bytes_total: total };
        // The client may be gone, or read slowly. The next line replaces this one.
        let _ = told.try_send(underway);
        tokio::select! {
            sent = &mut sent => return sent.map(|_| total),
            () = tokio::time::sleep(TOLD_EVERY) => {}
        }
    }
}
