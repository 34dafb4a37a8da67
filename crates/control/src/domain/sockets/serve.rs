//! That process itself.

use super::{Ask, Begin, Told};
use crate::image::{self, stream};
use crate::name;
use crate::settings::{Images, is_digest, is_image_name};
use anyhow::Context;
use hyper::Method;
use serde::Deserialize;
use sidetrack_common::admin::{Client, ClientError, Functions};
use sidetrack_common::containers::Engine;
use sidetrack_common::rights::{TO_BECOME, become_or_stay, restrict};
use sidetrack_common::wire;
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::confine;
use sidetrack_sys::landlock::{Allowed, May};
use sidetrack_sys::process;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// Sockets and folders that belong to root.
const NEEDED: CapabilitySet = CapabilitySet::DAC_OVERRIDE;

/// What `ps` and `top` call this process.
const NAME: &std::ffi::CStr = c"sidetrack-sock";

/// Requests at a time; the agent waits for the others.
const BUSY_MAX: usize = 64;

/// Is this process, until the other end closes.
///
/// # Errors
/// What breaks it.
pub fn serve(end: OwnedFd) -> anyhow::Result<()> {
    process::ignore_stop_signals();
    // Only `ps` misses the name.
    let _ = process::set_name(NAME);
    let held = caps::capabilities().context("capabilities")?.permitted;
    caps::keep_only(held & (NEEDED | TO_BECOME)).context("cannot give up capabilities")?;
    let Some((begin, _)) = wire::receive::<Begin>(&end)? else { return Ok(()) };
    if let Err(error) = confine(&begin) {
        return Ok(wire::send(&end, &Told::Failed(format!("{error:#}")), &[])?);
    }
    wire::send(&end, &Told::Begun, &[])?;
    let begin = Arc::new(begin);
    // A request takes part in the count as long as it holds one of these.
    let busy = Arc::new(());
    while let Some((ask, mut fds)) = wire::receive::<Ask>(&end)? {
        let Some(answer) = fds.pop() else { continue };
        if Arc::strong_count(&busy) > BUSY_MAX {
            // The agent may have gone.
            let _ = wire::send(&answer, &Told::Failed("too many requests at a time".into()), &[]);
            continue;
        }
        let (begin, place) = (begin.clone(), busy.clone());
        std::thread::spawn(move || {
            let _place = place;
            let (told, file) = match begin.answer(ask, fds.pop().map(File::from)) {
                Ok(told) => told,
                Err(why) => (Told::Failed(why), None),
            };
            let fds: Vec<_> = file.iter().map(AsFd::as_fd).collect();
            let _ = wire::send(&answer, &told, &fds);
        });
    }
    Ok(())
}

/// What the agent reads of a node's answer to a new agreement.
#[derive(Deserialize)]
struct Revoked {
    /// The numbers of the flows that it ended.
    revoked: Vec<u64>,
}

fn confine(begin: &Begin) -> anyhow::Result<()> {
    become_or_stay(begin.user.as_ref(), NEEDED)?;
    // Connecting to a socket opens no file.
    let folder = begin.images.engine.as_ref().map(|_| begin.images.folder.clone());
    restrict(&folder.map(|path| Allowed { path, may: May::Append }).into_iter().collect::<Vec<_>>());
    if let Err(error) = confine::confine_process(confine::Kind::Control) {
        tracing::warn!("the system calls of the process for sockets are not confined: {error}");
    }
    Ok(())
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

/// Waits for a proxy.
fn wait<T>(asked: impl Future<Output = Result<T, ClientError>>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(text)?;
    runtime.block_on(asked).map_err(text)
}

impl Begin {
    fn proxy(&self, index: usize) -> Result<Client, String> {
        self.proxies.get(index).map(Client::new).ok_or_else(|| "there is no such proxy".to_owned())
    }

    fn engine(&self) -> Result<Engine, String> {
        let socket = self.images.engine.as_ref().ok_or("the file of the domain names no `engine`")?;
        Engine::find(Some(socket)).map_err(text)
    }

    fn answer(&self, ask: Ask, file: Option<File>) -> Result<(Told, Option<File>), String> {
        let told = match ask {
            Ask::Functions(proxy) => {
                let proxy = self.proxy(proxy)?;
                let asked = wait(proxy.ask::<Functions>(Method::GET, "/v1/functions", &[]));
                Told::Functions(asked?.functions)
            }
            Ask::Apply(proxy, agreement, peer) => {
                let proxy = self.proxy(proxy)?;
                let query: Vec<_> = peer.iter().map(|peer| ("peer", peer.as_str())).collect();
                let asked = wait(proxy.send::<Revoked>(Method::PUT, "/v1/policy", &query, agreement));
                Told::Applied(asked?.revoked.len() as u64)
            }
            Ask::Start(proxy, function) => {
                let (proxy, function) = (self.proxy(proxy)?, name::segment(&function)?);
                wait(proxy.ask::<()>(Method::POST, &format!("/v1/functions/{function}/start"), &[]))?;
                Told::Done
            }
            Ask::Image(name) => {
                if !is_image_name(&name) && !is_digest(&name) {
                    return Err(format!("'{}' is not the name of an image", name.escape_debug()));
                }
                Told::Image(self.engine()?.image(&name).map_err(text)?)
            }
            Ask::File => {
                let folder = &self.images.folder;
                let file = stream::nameless(folder)
                    .map_err(|error| format!("no file for the archive in {}: {error}", folder.display()))?;
                return Ok((Told::Done, Some(file)));
            }
            Ask::Load(id) => {
                let Images { taken, folder, .. } = &self.images;
                let named = taken.iter().find(|(_, taken)| **taken == id);
                let (name, id) = named.ok_or_else(|| format!("the image {id} is not taken"))?;
                load(file.ok_or("no archive came along")?, folder, name, id, &self.engine()?)?;
                Told::Done
            }
        };
        Ok((told, None))
    }
}

/// Gives the engine a new archive of what was checked, and looks whether it has the image then. If it has not, what it loaded
/// is removed.
fn load(mut file: File, folder: &Path, name: &str, id: &str, engine: &Engine) -> Result<(), String> {
    let checked = image::check(&file, name, id).map_err(text)?;
    let mut fresh = stream::nameless(folder).map_err(text)?;
    checked.write(&mut file, BufWriter::new(&fresh)).map_err(text)?;
    drop(file);
    fresh.seek(SeekFrom::Start(0)).map_err(text)?;
    // If the engine had the image before, a failure must not remove it.
    let was_there = engine.image(id).map_err(text)?.is_some();
    let loaded = load_and_name(engine, fresh, name, id);
    if loaded.is_err()
        && !was_there
        && let Ok(Some(left)) = engine.image(id)
        && let Err(error) = engine.remove_image(&left)
    {
        tracing::warn!(image = %name, %id, %error, "the image was refused after it was loaded, and cannot be removed");
    }
    loaded
}

fn load_and_name(engine: &Engine, archive: File, name: &str, id: &str) -> Result<(), String> {
    engine.load(|| stream::body(archive, Arc::default())).map_err(text)?;
    if engine.image(name).map_err(text)?.is_none() {
        // The archive does not name its image; the file of this domain does.
        engine.name_image(id, name).map_err(text)?;
    }
    match engine.image(name).map_err(text)? {
        Some(found) if found == id => Ok(()),
        found => Err(format!(
            "the container engine has {} under '{name}' after it took {id}",
            found.as_deref().unwrap_or("nothing")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::net::UnixListener;
    use std::sync::Mutex;

    /// A container engine that takes the image and then has another one under its name: what it is asked goes to `asked`.
    fn engine_that_takes_it_for_another(socket: &Path, id: String, asked: Arc<Mutex<Vec<String>>>) {
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
                    // Its body is chunked, and ends with an empty chunk.
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
        let engine = Engine::find(Some(&socket)).expect("an engine");
        let error = load(file, folder.path(), image::tests::NAME, &id, &engine).expect_err("another image");
        assert!(error.contains("555"), "{error}");
        let asked = asked.lock().expect("no panic");
        let removed = format!("DELETE /v1.40/images/{id}?force=true HTTP/1.1");
        assert_eq!(asked.last(), Some(&removed), "{asked:?}");
    }
}
