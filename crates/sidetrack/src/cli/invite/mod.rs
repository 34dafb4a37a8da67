//! `tunnel invite`, `tunnel join`, `overlay invite` and `overlay join`: a new end gets its keys and addresses by one line of text.
//!
//! The command of the host serves the join itself, on a port of its own, until the guest has joined or the invitation expires. So
//! the secret is in the memory of this command only, and the node that runs needs no right to change its configuration.

mod file;
mod guest;
mod host;
pub mod overlay;
pub mod tunnel;

use crate::admin::{self, Client, ConfigStatus, Status};
use crate::config::{AdminAt, Config};
use crate::tls::RawKey;
use anyhow::Context as _;
use hyper::Method;
use ring::rand::{SecureRandom as _, SystemRandom};
use sidetrack_core::flow::{Destination, Host};
use sidetrack_core::invitation::{Invitation, Kind, SECRET_BYTES, Secret};
use std::io::Read as _;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The port of joins, unless `--listen` names another one.
const PORT: u16 = 4434;

/// The longest validity of an invitation.
const EXPIRES_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// How long a node that runs may take to answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Options of both commands that invite.
#[derive(Clone, Debug, clap::Args)]
pub struct Waiting {
    /// The address and port on which this command waits for the guest (TCP) [default: *:4434]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<String>,
    /// Where the guest reaches that port, if it is not the host of --address with the port of --listen, as behind a port forwarding
    #[arg(long, value_name = "HOST:PORT")]
    pub join_at: Vec<Destination>,
    /// How long the invitation is valid: 30m, 1h, 2days; at most 7 days
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = expiry)]
    pub expires: Duration,
}

fn expiry(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if time > EXPIRES_MAX || time < Duration::from_secs(1) {
        return Err("an invitation is valid for 1 second to 7 days".to_owned());
    }
    Ok(time)
}

impl Waiting {
    /// Binds the port, and returns it with the addresses for the invitation. `hosts`: where the guest reaches this host.
    fn bind(&self, hosts: &[Host]) -> anyhow::Result<(std::net::TcpListener, Vec<Destination>)> {
        let listen = self.listen.clone().unwrap_or_else(|| format!("*:{PORT}"));
        let address: SocketAddr = match listen.strip_prefix("*:") {
            Some(port) => format!("[::]:{port}").parse(),
            None => listen.parse(),
        }
        .with_context(|| format!("--listen '{listen}' is not an address with a port, such as *:{PORT}"))?;
        let listener = std::net::TcpListener::bind(address);
        let listener = listener.with_context(|| {
            format!("cannot wait for the guest on {listen}: name another port with --listen")
        })?;
        let port = listener.local_addr()?.port();
        let at = hosts.iter().map(|host| Destination { host: host.clone(), port, zone: 0 });
        let at = if self.join_at.is_empty() { at.collect() } else { self.join_at.clone() };
        Ok((listener, at))
    }

    /// Makes an invitation with a new secret.
    fn invitation(
        &self,
        kind: Kind,
        key: &RawKey,
        name: &str,
        at: Vec<Destination>,
    ) -> anyhow::Result<Invitation> {
        let mut secret = [0; SECRET_BYTES];
        SystemRandom::new()
            .fill(&mut secret)
            .map_err(|_| anyhow::anyhow!("the system gives no random bytes"))?;
        Ok(Invitation {
            kind,
            addresses: at,
            pin: key.pin().into(),
            name: name.to_owned(),
            secret: Secret(secret),
            expires: now().saturating_add(self.expires.as_secs()),
        })
    }
}

/// The time in seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Formats a time in seconds since 1970.
fn shown(seconds: u64) -> String {
    /// The last second of the year 9999: the format has no later ones.
    const LAST: u64 = 253_402_300_799;
    let time = UNIX_EPOCH + Duration::from_secs(seconds.min(LAST));
    humantime::format_rfc3339_seconds(time).to_string()
}

/// Reads a text of a command line; "-" is standard input, of which at most `max` bytes are read.
fn given(text: &str, max: u64) -> anyhow::Result<String> {
    if text != "-" {
        return Ok(text.to_owned());
    }
    let mut given = String::new();
    std::io::stdin().take(max).read_to_string(&mut given).context("standard input")?;
    Ok(given)
}

/// Reads the invitation of a command line.
fn read(text: &str, kind: Kind) -> anyhow::Result<Invitation> {
    let invitation: Invitation = given(text, 16 * 1024)?.parse()?;
    anyhow::ensure!(
        invitation.kind == kind,
        "this invitation is for 'sidetrack {} join', not for 'sidetrack {kind} join'",
        invitation.kind
    );
    Ok(invitation)
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Returns what makes a change of `[overlay]` in this file effective, in words: a node reads it only at its start.
async fn restart(file: &Path) -> String {
    if running(file).await.is_some() {
        "restart the node there: a change of [overlay] needs it, and cuts its links for a moment".to_owned()
    } else {
        format!("start the node there: sidetrack up -c {}", file.display())
    }
}

/// Returns the node that runs with this file.
async fn running(file: &Path) -> Option<Client> {
    let sockets = match Config::load(file).ok()?.admin.socket {
        AdminAt::Path(path) => vec![path],
        AdminAt::Default => vec![admin::default_socket(), admin::SYSTEM_SOCKET.into()],
        AdminAt::None => Vec::new(),
    };
    for socket in sockets {
        let client = Client::new(&socket);
        let asked =
            tokio::time::timeout(PATIENCE, client.ask::<ConfigStatus>(Method::GET, "/v1/config", &[]));
        let Ok(Ok(status)) = asked.await else { continue };
        if status.path.is_some_and(|path| is_same(&path, file)) {
            return Some(client);
        }
    }
    None
}

/// Lets the node that runs with this file read it again. Returns what is left to do, in words; empty: nothing.
/// `key`: a new file with a key, which this node must be able to read.
async fn put_in_force(file: &Path, key: Option<&Path>) -> String {
    let Some(client) = running(file).await else {
        return format!("start the node there: sidetrack up -c {}", file.display());
    };
    if let Some(key) = key {
        readable(&client, key).await;
    }
    let asked = tokio::time::timeout(PATIENCE, client.ask::<ConfigStatus>(Method::POST, "/v1/reload", &[]));
    match asked.await {
        Ok(Ok(_)) => String::new(),
        Ok(Err(error)) => format!("the node there did not take the new configuration: {error}"),
        Err(_) => "the node there does not answer: reload it".to_owned(),
    }
}

/// Lets the group of the node that runs read a new key: the node has given up the right to read files of root. If this fails,
/// the reload says so.
async fn readable(client: &Client, key: &Path) {
    let asked = tokio::time::timeout(PATIENCE, client.ask::<Status>(Method::GET, "/v1/status", &[]));
    let Ok(Ok(status)) = asked.await else { return };
    let Ok(node) = std::fs::metadata(format!("/proc/{}", status.pid)) else { return };
    let is_other = std::fs::metadata(key).is_ok_and(|key| key.uid() != node.uid());
    if is_other && chown(key, None, Some(node.gid())).is_ok() {
        let _ = std::fs::set_permissions(key, std::fs::Permissions::from_mode(0o640));
    }
}

fn is_same(one: &Path, other: &Path) -> bool {
    let found = |path: &Path| std::fs::canonicalize(path).ok();
    found(one).is_some() && found(one) == found(other)
}
