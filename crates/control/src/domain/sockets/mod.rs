//! The process that uses the sockets of this host for the agent: the admin sockets of the party's proxies, and the container
//! engine's. They belong to root as a rule, so this process keeps the right to open them and the agent, which reads what peers
//! send, does not. It answers a closed list of requests; which sockets and which images it was told before the first of them.

mod serve;

pub use serve::serve;

use crate::settings::{DomainSettings, Images};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use sidetrack_common::admin::FunctionCounts;
use sidetrack_common::rights::DataUser;
use sidetrack_common::wire;
use sidetrack_sys::sync::lock;
use sidetrack_sys::{process, scm};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::Child;
use std::sync::Mutex;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::spawn_blocking;

/// The argument that makes the program this process.
pub const ARGUMENT: &str = "domain-sockets";

/// What is wrong if nothing answers.
const GONE: &str =
    "the process that uses the sockets of proxies and container engine is gone: restart the agent";

/// What it may be asked for. It is said once, before a peer's byte was read.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Begin {
    /// The user to become.
    user: Option<DataUser>,
    /// The admin sockets of the proxies.
    proxies: Vec<PathBuf>,
    /// The images that are taken, and the engine that gets them.
    images: Images,
}

/// A request. One end of a connection comes along, for the answer. A proxy is the index of its socket in [`Begin`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Ask {
    /// The functions of a proxy.
    Functions(usize),
    /// Give a proxy this agreement, for the peer of this name.
    Apply(usize, String, Option<String>),
    /// Start the containers of a function of a proxy.
    Start(usize, String),
    /// The digest of the image that the engine has under a name or digest.
    Image(String),
    /// A new file without a name, for an archive.
    File,
    /// Check the archive of the image with this digest, which comes along as a file, and give it to the engine.
    Load(String),
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Told {
    /// It waits for requests.
    Begun,
    /// The functions.
    Functions(Vec<FunctionCounts>),
    /// The agreement is in force. The number of flows that ended.
    Applied(u64),
    /// The image.
    Image(Option<String>),
    /// Done. The file comes along, if one was asked for.
    Done,
    /// It was not done, for this reason.
    Failed(String),
}

/// Our end of the connection to that process.
#[derive(Debug)]
pub struct Sockets {
    end: OwnedFd,
    child: Mutex<Child>,
}

impl Sockets {
    /// Starts the process, which becomes this user. Before rights are given up.
    ///
    /// # Errors
    /// What the system says about a new process, or that process about its start.
    pub fn start(settings: &DomainSettings, user: Option<&DataUser>) -> anyhow::Result<Self> {
        let (ours, theirs) = scm::pair()?;
        let child = process::respawn(ARGUMENT, theirs).context("cannot start the process for sockets")?;
        let (proxies, images) = (settings.proxies.clone(), settings.images.clone());
        wire::send(&ours, &Begin { user: user.cloned(), proxies, images }, &[])?;
        match wire::receive(&ours)? {
            Some((Told::Begun, _)) => Ok(Self { end: ours, child: Mutex::new(child) }),
            Some((Told::Failed(why), _)) => anyhow::bail!("the process for sockets: {why}"),
            _ => anyhow::bail!("{GONE}"),
        }
    }

    /// Waits until the process has ended; then the agent is of no use.
    pub async fn gone(&self) -> anyhow::Error {
        let id = lock(&self.child).id();
        #[expect(deprecated, reason = "its successor is unsafe; this descriptor is owned and stays open")]
        let watched = process::watch(id).and_then(|end| AsyncFd::with_interest(end, Interest::READABLE));
        let ended = match &watched {
            Ok(end) => end.readable().await.is_ok(),
            Err(_) => false,
        };
        if !ended {
            tracing::warn!("cannot watch the process for sockets: its end would go unnoticed");
            return std::future::pending().await;
        }
        anyhow::anyhow!("{GONE} (`Restart=on-failure` of systemd does)")
    }

    /// The functions of a proxy.
    ///
    /// # Errors
    /// It cannot be asked.
    pub async fn functions(&self, proxy: usize) -> Result<Vec<FunctionCounts>, String> {
        match self.ask(&Ask::Functions(proxy), None).await? {
            (Told::Functions(functions), _) => Ok(functions),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Gives a proxy this agreement; gives how many flows ended. `peer`: the name in the certificate of the peer that caused it.
    ///
    /// # Errors
    /// It does not take it.
    pub async fn apply(&self, proxy: usize, text: String, peer: Option<&str>) -> Result<u64, String> {
        match self.ask(&Ask::Apply(proxy, text, peer.map(str::to_owned)), None).await? {
            (Told::Applied(revoked), _) => Ok(revoked),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Has a proxy start the containers of a function.
    ///
    /// # Errors
    /// It cannot be asked, or has no such function.
    pub async fn start_function(&self, proxy: usize, function: String) -> Result<(), String> {
        self.ask(&Ask::Start(proxy, function), None).await.map(drop)
    }

    /// The digest of the engine's image of this name or digest, if it has one.
    ///
    /// # Errors
    /// The engine cannot be asked.
    pub async fn image(&self, name: &str) -> Result<Option<String>, String> {
        match self.ask(&Ask::Image(name.to_owned()), None).await? {
            (Told::Image(image), _) => Ok(image),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// A file without a name, for an archive.
    ///
    /// # Errors
    /// It cannot be made.
    pub async fn file(&self) -> Result<File, String> {
        let (_, mut fds) = self.ask(&Ask::File, None).await?;
        fds.pop().map(File::from).ok_or_else(|| GONE.to_owned())
    }

    /// Gives the engine the image with this digest out of an archive.
    ///
    /// # Errors
    /// The archive is not what it should be, or the engine does not take it.
    pub async fn load(&self, id: &str, archive: File) -> Result<(), String> {
        self.ask(&Ask::Load(id.to_owned()), Some(archive.into())).await.map(drop)
    }

    async fn ask(&self, ask: &Ask, file: Option<OwnedFd>) -> Result<(Told, Vec<OwnedFd>), String> {
        let (ours, theirs) = scm::pair().map_err(|error| error.to_string())?;
        let fds: Vec<_> = file.iter().chain([&theirs]).map(AsFd::as_fd).collect();
        wire::send(&self.end, ask, &fds).map_err(|_| GONE.to_owned())?;
        drop(theirs);
        let told = spawn_blocking(move || wire::receive(&ours)).await;
        match told.map_err(|error| error.to_string())?.map_err(|error| error.to_string())? {
            Some((Told::Failed(why), _)) => Err(why),
            Some(told) => Ok(told),
            None => Err(GONE.to_owned()),
        }
    }
}

fn unexpected(told: &Told) -> String {
    format!("the process for sockets answered something else: {told:?}")
}
