//! The container engine's API: the part of Docker's HTTP API (v1.40) that podman serves as well, over its unix socket.
//! Each call opens a connection and blocks: containers are started rarely, and never while a flow waits for the start.

use crate::exchange::{Blocking, Limits, Method, StatusCode};
use axum::body::Body;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sidetrack_core::function::{ContainerSpec, Resources};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The usual sockets of engines, in the order in which they are tried.
const PLACES: [&str; 3] = ["/run/podman/podman.sock", "/run/docker.sock", "/var/run/docker.sock"];

/// How long a request may take: the engine may be starting another container.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long loading an image may take: it must be unpacked.
const LOAD_PATIENCE: Duration = Duration::from_secs(300);

/// Longest answer that is read, bytes.
const ANSWER_MAX: usize = 4 << 20;

/// The label with the owner of a container: process id and start time of the process that holds it.
const OWNER: &str = "sidetrack.owner";

/// The label with the function of a container.
const FUNCTION: &str = "sidetrack.function";

/// How many of its last lines are read to explain why a container ended.
const LAST_LINES: &str = "10";

/// Why the engine did not fulfil a request.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// No engine listens anywhere.
    #[error(
        "no container engine listens at {0}: start one (`systemctl start podman.socket`, `systemctl start docker`), or name \
         its socket with `engine` in [containers]"
    )]
    NotThere(String),
    /// We have no permission to use its socket.
    #[error("no permission to use the container engine's socket {0}: start sidetrack as root")]
    NotAllowed(PathBuf),
    /// The engine returned an error.
    #[error("the container engine says: {0}")]
    Refused(String),
    /// The image is missing.
    #[error(
        "the image '{0}' is not there: get it with `podman pull {0}` (or `docker pull {0}`), then try again"
    )]
    NoImage(String),
    /// The connection broke, or another program answers there.
    #[error("the container engine at {0} does not answer as one: {1}")]
    Broken(PathBuf, String),
}

/// A container engine.
#[derive(Clone, Debug)]
pub struct Engine {
    socket: PathBuf,
}

/// A container of ours whose owner has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// Its id at the engine.
    pub id: String,
    /// Its name.
    pub name: String,
}

/// The state of a container, as the engine reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Its first process; 0 if it does not run.
    pub pid: u32,
    /// The exit code of its program.
    pub exit_code: i64,
    /// The kernel killed it for lack of memory.
    pub out_of_memory: bool,
}

/// A container to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The function's name.
    pub function: String,
    /// The image.
    pub image: String,
    /// Replaces the image's command; if empty, the image's own is used.
    pub command: Vec<String>,
    /// Environment variables.
    pub environment: BTreeMap<String, String>,
    /// The user and group that its processes run as: `UID:GID`.
    pub user: String,
    /// Most memory, bytes.
    pub memory_bytes: u64,
    /// Most CPU time, per cent of one core.
    pub cpu_percent: u32,
    /// Most processes and threads.
    pub pids: u32,
}

/// The limits of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limited {
    /// Most memory, bytes.
    pub memory_bytes: u64,
    /// Most CPU time, per cent of one core.
    pub cpu_percent: u32,
    /// Most processes and threads.
    pub pids: u32,
}

impl From<Resources> for Limited {
    fn from(Resources { memory_bytes, cpu_percent, pids }: Resources) -> Self {
        Self { memory_bytes, cpu_percent, pids }
    }
}

impl Limited {
    /// As Docker's API takes them.
    fn of_docker(&self) -> Value {
        json!({
            "Memory": self.memory_bytes,
            "MemorySwap": self.memory_bytes,
            "NanoCpus": u64::from(self.cpu_percent) * 10_000_000,
            "PidsLimit": self.pids,
        })
    }

    /// As podman takes them: the resources of a container's bundle (OCI runtime specification).
    fn of_podman(&self) -> Value {
        json!({
            "memory": { "limit": self.memory_bytes, "swap": self.memory_bytes },
            "cpu": { "quota": u64::from(self.cpu_percent) * 1000, "period": 100_000 },
            "pids": { "limit": self.pids },
        })
    }
}

impl Order {
    /// Returns the order for a container of this function.
    pub fn new(function: &str, spec: &ContainerSpec) -> Self {
        Self {
            function: function.to_owned(),
            image: spec.image.to_string(),
            command: spec.command.clone(),
            environment: spec.environment.clone(),
            user: spec.user.to_string(),
            memory_bytes: spec.resources.memory_bytes,
            cpu_percent: spec.resources.cpu_percent,
            pids: spec.resources.pids,
        }
    }
}

impl Engine {
    /// Returns the engine at this socket, or at one of the usual ones.
    ///
    /// # Errors
    /// Fails if no engine listens there.
    pub fn find(socket: Option<&Path>) -> Result<Self, EngineError> {
        let usual = PLACES.map(PathBuf::from);
        let places: Vec<_> = socket.map_or_else(|| usual.to_vec(), |socket| vec![socket.to_owned()]);
        for place in &places {
            match std::os::unix::net::UnixStream::connect(place) {
                Ok(_) => return Ok(Self { socket: place.clone() }),
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                    return Err(EngineError::NotAllowed(place.clone()));
                }
                Err(_) => {}
            }
        }
        let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        Err(EngineError::NotThere(places.join(", ")))
    }

    /// Returns its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns its name and version.
    ///
    /// # Errors
    /// Fails if the answer is not that of an engine.
    pub fn version(&self) -> Result<String, EngineError> {
        let said = self.ask(Method::GET, "/version", None)?;
        let name = said["Components"][0]["Name"].as_str().unwrap_or("container engine");
        let version = said["Version"].as_str().ok_or_else(|| self.broken("it says no version"))?;
        Ok(format!("{name} {version}"))
    }

    /// Creates a container of `order` for the process `owner`, and returns its id. It does not run yet.
    ///
    /// # Errors
    /// Fails if there is no such image, or the engine returns an error.
    pub fn create(&self, order: &Order, name: &str, owner: &str) -> Result<String, EngineError> {
        let path = format!("/containers/create?name={name}");
        match self.ask(Method::POST, &path, Some(&description(order, owner))) {
            Ok(said) => {
                let id = said["Id"].as_str().ok_or_else(|| self.broken("it names no new container"))?;
                Ok(id.to_owned())
            }
            Err(EngineError::Refused(why)) if is_about_the_image(&why) => {
                Err(EngineError::NoImage(order.image.clone()))
            }
            Err(error) => Err(error),
        }
    }

    /// Starts a container.
    ///
    /// # Errors
    /// Fails if its program cannot be executed, or the engine returns an error.
    pub fn start(&self, id: &str) -> Result<(), EngineError> {
        self.ask(Method::POST, &format!("/containers/{id}/start"), None).map(drop)
    }

    /// Returns the state of a container.
    ///
    /// # Errors
    /// Fails if the container does not exist.
    pub fn state(&self, id: &str) -> Result<State, EngineError> {
        let said = self.ask(Method::GET, &format!("/containers/{id}/json"), None)?;
        let state = &said["State"];
        Ok(State {
            pid: state["Pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0),
            exit_code: state["ExitCode"].as_i64().unwrap_or(0),
            out_of_memory: state["OOMKilled"].as_bool().unwrap_or(false),
        })
    }

    /// Changes the limits of a running container.
    ///
    /// # Errors
    /// Fails if the container does not exist, or the engine cannot do it.
    pub fn limit(&self, id: &str, limits: &Limited) -> Result<(), EngineError> {
        let path = format!("/containers/{id}/update");
        let (mut status, mut body) = self.request(&Method::POST, &path, Some(&limits.of_docker()))?;
        if status == StatusCode::NOT_FOUND {
            // Podman has this request under its own interface only.
            let path = format!("/libpod{path}");
            (status, body) = self.request(&Method::POST, &path, Some(&limits.of_podman()))?;
        }
        if status.is_success() { Ok(()) } else { Err(self.refused(status, &body)) }
    }

    /// Returns the last lines that a container wrote, joined to one line.
    ///
    /// # Errors
    /// Fails if the container does not exist.
    pub fn last_words(&self, id: &str) -> Result<String, EngineError> {
        let path = format!("/containers/{id}/logs?stdout=true&stderr=true&tail={LAST_LINES}");
        let (status, body) = self.request(&Method::GET, &path, None)?;
        if !status.is_success() {
            return Err(self.refused(status, &body));
        }
        let lines = frames(&body);
        let lines = lines.lines().map(str::trim).filter(|line| !line.is_empty());
        Ok(lines.collect::<Vec<_>>().join(" | "))
    }

    /// Stops and removes a container, with what it has written to disk. Succeeds if it does not exist.
    ///
    /// # Errors
    /// Fails if the engine returns an error.
    pub fn remove(&self, id: &str) -> Result<(), EngineError> {
        let path = format!("/containers/{id}?force=true&v=true");
        let (status, body) = self.request(&Method::DELETE, &path, None)?;
        match status {
            StatusCode::NOT_FOUND => Ok(()),
            status if status.is_success() => Ok(()),
            status => Err(self.refused(status, &body)),
        }
    }

    /// Returns our containers whose owner has ended.
    ///
    /// # Errors
    /// Fails if the engine returns an error.
    pub fn leftovers(&self) -> Result<Vec<Leftover>, EngineError> {
        let filters = format!("%7B%22label%22%3A%5B%22{OWNER}%22%5D%7D");
        let said = self.ask(Method::GET, &format!("/containers/json?all=true&filters={filters}"), None)?;
        let all = said.as_array().ok_or_else(|| self.broken("it lists no containers"))?;
        let orphaned =
            all.iter().filter(|one| one["Labels"][OWNER].as_str().is_some_and(|owner| !lives(owner)));
        Ok(orphaned
            .filter_map(|one| {
                let name = one["Names"][0].as_str().unwrap_or_default().trim_start_matches('/');
                Some(Leftover { id: one["Id"].as_str()?.to_owned(), name: name.to_owned() })
            })
            .collect())
    }

    /// Returns the image of this name: the digest of its configuration, `sha256:` and 64 digits. None if there is no such
    /// image.
    ///
    /// # Errors
    /// Fails if the engine returns an error.
    pub fn image(&self, name: &str) -> Result<Option<String>, EngineError> {
        let (status, body) = self.request(&Method::GET, &format!("/images/{name}/json"), None)?;
        if status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        if !status.is_success() {
            return Err(self.refused(status, &body));
        }
        let said: Value = serde_json::from_slice(&body).map_err(|error| self.broken(error))?;
        let id = said["Id"].as_str().ok_or_else(|| self.broken("it names no image"))?;
        Ok(Some(if id.starts_with("sha256:") { id.to_owned() } else { format!("sha256:{id}") }))
    }

    /// Loads the images of an archive (`podman save`); `archive` makes its bytes, and is called inside a runtime.
    ///
    /// # Errors
    /// Fails if the engine rejects the archive.
    pub fn load(&self, archive: impl FnOnce() -> Body) -> Result<(), EngineError> {
        let target = "/images/load?quiet=true";
        let (status, body) =
            self.exchange(LOAD_PATIENCE, Method::POST, target, "application/x-tar", archive)?;
        if !status.is_success() {
            return Err(self.refused(status, &body));
        }
        // The answer has lines of JSON; an error during the load is one of them.
        let lines =
            body.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice::<Value>(line).ok());
        let error = lines.filter_map(|line| line["error"].as_str().map(str::to_owned)).next();
        error.map_or(Ok(()), |error| Err(EngineError::Refused(error)))
    }

    /// Gives the image with this digest a name; `name` ends with a tag.
    ///
    /// # Errors
    /// Fails if the engine returns an error.
    pub fn name_image(&self, id: &str, name: &str) -> Result<(), EngineError> {
        let (repository, tag) = name.rsplit_once(':').unwrap_or((name, "latest"));
        self.ask(Method::POST, &format!("/images/{id}/tag?repo={repository}&tag={tag}"), None).map(drop)
    }

    /// Removes the image with this name or digest, under all its names.
    ///
    /// # Errors
    /// Fails if the engine returns an error.
    pub fn remove_image(&self, id: &str) -> Result<(), EngineError> {
        self.ask(Method::DELETE, &format!("/images/{id}?force=true"), None).map(drop)
    }

    fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, EngineError> {
        let (status, body) = self.request(&method, path, body)?;
        if !status.is_success() {
            return Err(self.refused(status, &body));
        }
        // Podman answers some requests with an empty line.
        if body.trim_ascii().is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&body).map_err(|error| self.broken(error))
    }

    fn request(
        &self,
        method: &Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(StatusCode, Vec<u8>), EngineError> {
        let bytes = body.map_or_else(Vec::new, |body| body.to_string().into_bytes());
        self.exchange(PATIENCE, method.clone(), path, "application/json", || Body::from(bytes))
    }

    fn exchange(
        &self,
        patience: Duration,
        method: Method,
        path: &str,
        kind: &str,
        body: impl FnOnce() -> Body,
    ) -> Result<(StatusCode, Vec<u8>), EngineError> {
        let limits = Limits { patience, answer_max: ANSWER_MAX };
        let answer = Blocking::open(&self.socket, limits)
            .and_then(|mut engine| engine.ask(method, &format!("/v1.40{path}"), kind, body));
        answer.map_err(|failure| self.broken(failure))
    }

    fn refused(&self, status: StatusCode, body: &[u8]) -> EngineError {
        let said = serde_json::from_slice::<Value>(body).ok();
        let message = said.as_ref().and_then(|said| said["message"].as_str());
        EngineError::Refused(message.map_or_else(|| status.to_string(), str::to_owned))
    }

    fn broken(&self, what: impl std::fmt::Display) -> EngineError {
        EngineError::Broken(self.socket.clone(), what.to_string())
    }
}

/// Returns the description of a container: an unprivileged user, no network, no capabilities, no new privileges, and
/// nothing writable except a small /tmp.
fn description(order: &Order, owner: &str) -> Value {
    let environment: Vec<_> =
        order.environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mut body = json!({
        "Image": order.image,
        "Env": environment,
        // This replaces the user that the image names, which may be root.
        "User": order.user,
        "Labels": { OWNER: owner, FUNCTION: order.function },
        "HostConfig": {
            "NetworkMode": "none",
            "ReadonlyRootfs": true,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Memory": order.memory_bytes,
            // The same as `Memory`, so that no swap is used.
            "MemorySwap": order.memory_bytes,
            "NanoCpus": u64::from(order.cpu_percent) * 10_000_000,
            "PidsLimit": order.pids,
            "Tmpfs": { "/tmp": "rw,noexec,nosuid,nodev,size=16m" },
            "RestartPolicy": { "Name": "no" },
            "LogConfig": { "Config": { "max-size": "1m" } },
        },
    });
    if !order.command.is_empty() {
        body["Cmd"] = json!(order.command);
    }
    body
}

fn is_about_the_image(why: &str) -> bool {
    let why = why.to_lowercase();
    why.contains("no such image") || why.contains("image not known")
}

/// Returns the text of a log. Without a terminal it comes in frames, each with a header of 8 bytes, the length in the
/// last four.
fn frames(log: &[u8]) -> String {
    let mut text = Vec::new();
    let mut rest = log;
    while let Some((header, behind)) = rest.split_at_checked(8) {
        let &[kind, 0, 0, 0, a, b, c, d] = header else { break };
        let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        if kind > 2 {
            break;
        }
        let (frame, next) = behind.split_at(length.min(behind.len()));
        text.extend_from_slice(frame);
        rest = next;
    }
    String::from_utf8_lossy(if text.is_empty() { log } else { &text }).into_owned()
}

/// Returns the label of this process.
pub fn own_label() -> String {
    let pid = std::process::id();
    format!("{pid}:{}", started(pid).unwrap_or_default())
}

/// True if the process of a label still runs. An unknown label counts as running, so that its container is left alone.
fn lives(label: &str) -> bool {
    let Some((pid, since)) = label.split_once(':') else { return true };
    let (Ok(pid), Ok(since)) = (pid.parse::<u32>(), since.parse::<u64>()) else { return true };
    started(pid) == Some(since)
}

/// Returns when a process was started, in ticks since the machine started (proc(5), field 22 of `stat`).
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may itself contain spaces and parentheses.
    let (_, behind) = stat.rsplit_once(')')?;
    let mut fields = behind.split_whitespace();
    // A zombie has ended and holds nothing any more, although its parent has not waited for it yet.
    fields.next().filter(|state| !matches!(*state, "Z" | "X"))?;
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_tell_whether_their_process_still_runs() {
        let own = own_label();
        assert!(lives(&own), "{own}");
        let (pid, since) = own.split_once(':').unwrap();
        let since: u64 = since.parse().unwrap();
        assert!(since > 0 && !lives(&format!("{pid}:{}", since + 1)), "the number was used again");
        assert!(!lives("4194305:1"));
        assert!(lives("") && lives("x:1"), "none of ours");
    }

    #[test]
    fn logs_come_in_frames_or_as_they_are() {
        let framed = [&[1, 0, 0, 0, 0, 0, 0, 3][..], b"one", &[2, 0, 0, 0, 0, 0, 0, 4], b"two\n"].concat();
        assert_eq!(frames(&framed), "onetwo\n");
        assert_eq!(frames(b"plain text\n"), "plain text\n");
        for cut in 0..framed.len() {
            let _ = frames(&framed[..cut]);
        }
        assert_eq!(frames(&[1, 0, 0, 0, 255, 255, 255, 255, b'x']), "x");
    }

    #[test]
    fn a_container_gets_no_network_no_right_and_no_disk() {
        let order = Order {
            function: "f".into(),
            image: "localhost/f:1".into(),
            command: vec!["/f".into(), "-v".into()],
            environment: [("A".to_owned(), "b c".to_owned())].into(),
            memory_bytes: 1 << 20,
            cpu_percent: 150,
            user: "65534:65534".into(),
            pids: 7,
        };
        let body = description(&order, "1:2");
        let host = &body["HostConfig"];
        assert_eq!(host["NetworkMode"], "none");
        assert_eq!(body["User"], "65534:65534");
        assert_eq!(host["SecurityOpt"], json!(["no-new-privileges"]));
        assert_eq!((&host["ReadonlyRootfs"], &host["CapDrop"]), (&json!(true), &json!(["ALL"])));
        assert_eq!((&host["NanoCpus"], &host["PidsLimit"]), (&json!(1_500_000_000), &json!(7)));
        assert_eq!((&body["Cmd"], &body["Env"]), (&json!(["/f", "-v"]), &json!(["A=b c"])));
        assert_eq!(body["Labels"][OWNER], "1:2");
    }
}
