//! Streams of archives: from a file into a body in pieces, and from a body into a file without a name.

use axum::body::{Body, Bytes};
use hyper::body::{Body as _, Frame};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Bytes of one piece.
const PIECE: usize = 128 << 10;
/// Most pieces that are queued for sending.
const WAITING: usize = 4;

/// A file's pieces.
struct Pieces(mpsc::Receiver<io::Result<Bytes>>);

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0.poll_recv(cx).map(|piece| Some(piece?.map(Frame::data)))
    }
}

/// Returns the rest of a file as a body; only a few pieces are in memory at a time. `gone` counts the bytes that
/// were read. Must be called in a Tokio runtime.
pub fn body(mut file: File, gone: Arc<AtomicU64>) -> Body {
    let (send, pieces) = mpsc::channel(WAITING);
    tokio::task::spawn_blocking(move || {
        loop {
            let mut piece = vec![0; PIECE];
            match file.read(&mut piece) {
                Ok(0) => return,
                Ok(read) => {
                    piece.truncate(read);
                    if send.blocking_send(Ok(piece.into())).is_err() {
                        return;
                    }
                    gone.fetch_add(read as u64, Relaxed);
                }
                // The receiver may be gone.
                Err(error) => return drop(send.blocking_send(Err(error))),
            }
        }
    });
    Body::new(Pieces(pieces))
}

/// Creates a file without a name in this folder. The kernel removes it with its descriptor, also if the process
/// is killed.
///
/// # Errors
/// Fails if open(2) does.
pub fn nameless(folder: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// Why a body was not received.
#[derive(Debug, thiserror::Error)]
pub enum NotReceived {
    /// It is larger than allowed.
    #[error("the archive has more than the {0} bytes that `image_bytes_max` allows")]
    TooLarge(u64),
    /// Nothing arrived for this time.
    #[error("nothing of the archive came for {0:?}")]
    Stalled(Duration),
    /// The sender disconnected.
    #[error("the archive ended early: {0}")]
    Cut(String),
    /// It cannot be stored.
    #[error("the archive cannot be kept: {0}")]
    Full(#[from] io::Error),
}

/// Writes a body of at most `most` bytes into a file. Each piece must arrive within `patience`.
///
/// # Errors
/// Says why the body was not received.
pub async fn receive(
    mut body: Body,
    mut file: File,
    most: u64,
    patience: Duration,
) -> Result<File, NotReceived> {
    let mut received = 0;
    loop {
        let next = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
        let next = timeout(patience, next).await.map_err(|_| NotReceived::Stalled(patience))?;
        let Some(frame) = next else { return Ok(file) };
        let frame = frame.map_err(|error| NotReceived::Cut(error.to_string()))?;
        let Ok(piece) = frame.into_data() else { continue };
        received += piece.len() as u64;
        if received > most {
            return Err(NotReceived::TooLarge(most));
        }
        // The disk may be slow. Other requests must not wait for it.
        let written = tokio::task::spawn_blocking(move || file.write_all(&piece).map(|()| file)).await;
        file = written.map_err(io::Error::other)??;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom};

    const PATIENCE: Duration = Duration::from_secs(30);

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a folder")
    }

    fn file_of(folder: &Path, bytes: &[u8]) -> File {
        let mut file = nameless(folder).expect("a file");
        file.write_all(bytes).expect("written");
        file.seek(SeekFrom::Start(0)).expect("a file");
        file
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
            .block_on(future)
    }

    #[test]
    fn what_goes_out_of_one_file_comes_into_another_and_neither_has_a_name() {
        let folder = folder();
        for len in [0, 1, PIECE - 1, PIECE, PIECE * WAITING * 3 + 17] {
            let bytes: Vec<u8> = (0..len).map(|at| (at / 7 % 251) as u8).collect();
            let gone = Arc::new(AtomicU64::new(0));
            let source = file_of(folder.path(), &bytes);
            let mut file = run(async {
                receive(body(source, gone.clone()), nameless(folder.path()).unwrap(), len as u64, PATIENCE)
                    .await
            })
            .expect("received");
            file.seek(SeekFrom::Start(0)).unwrap();
            let mut came = Vec::new();
            file.read_to_end(&mut came).unwrap();
            assert!(came == bytes && gone.load(Relaxed) == len as u64, "{len}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_is_too_large_or_stops_is_not_taken() {
        let folder = folder();
        let source = file_of(folder.path(), &[7; 1000]);
        let said = run(async {
            receive(body(source, Arc::default()), nameless(folder.path()).unwrap(), 999, PATIENCE).await
        });
        assert!(matches!(said, Err(NotReceived::TooLarge(999))));
        let (send, pieces) = mpsc::channel(1);
        send.try_send(Ok(Bytes::from_static(b"begun"))).unwrap();
        let said = run(async {
            tokio::time::pause();
            receive(Body::new(Pieces(pieces)), nameless(folder.path()).unwrap(), 999, PATIENCE).await
        });
        assert!(matches!(said, Err(NotReceived::Stalled(_))));
        drop(send);
        let (send, pieces) = mpsc::channel(1);
        send.try_send(Err(io::ErrorKind::ConnectionReset.into())).unwrap();
        let said = run(async {
            receive(Body::new(Pieces(pieces)), nameless(folder.path()).unwrap(), 999, PATIENCE).await
        });
        assert!(matches!(said, Err(NotReceived::Cut(_))));
    }
}
