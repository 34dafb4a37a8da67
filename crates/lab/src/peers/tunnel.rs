//! Our tunnel: a redirector beside the client and a far side at the proxy, joined by one connection that is open
//! before the first request.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use super::{Start, Unavailable, ours, running};
use crate::load::Via;
use crate::service::Service;
use crate::site::Site;

/// Port of the far side, on UDP and TCP.
const PORT: u16 = 1091;
/// Time limit for the two ends to connect; a thousand times what that takes.
const STANDS_WITHIN: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// The transport of the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    /// One QUIC connection, a stream for each flow.
    Quic,
    /// A pool of TLS connections, one for each flow.
    Tls,
}

impl Transport {
    /// Returns its word in our configuration and log.
    const fn word(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::Tls => "tls",
        }
    }
}

/// One end's certificate and key in a file, and the pin that the other end trusts.
struct Identity {
    file: PathBuf,
    pin: String,
}

/// Starts redirector, tunnel and far side; returns when the tunnel is open.
pub(super) fn pair(site: &Site, transport: Transport) -> Start<'_> {
    let [near, far] = ["near.lab", "far.lab"].map(|name| identity(site.directory.path(), name));
    let (near, far) = (near?, far?);
    let far_side = ours::start(site, &site.proxy, "far", &far_config(site, &near, &far), PORT)?;
    let tables = near_tables(site, transport, &near, &far);
    let near_side = ours::redirect(site, &["tunnel:far".to_owned()], ours::INITIAL_DATA_WAIT_MS, &tables)?;
    wait_until_it_stands(&near_side, transport)?;
    Ok(running(site, vec![near_side, far_side], (site.origin(), Via::Plain)))
}

/// A UDP port beside the client that leads through the tunnel, with QUIC, to the origin.
pub(super) fn datagrams(site: &Site) -> Start<'_> {
    let [near, far] = ["near.lab", "far.lab"].map(|name| identity(site.directory.path(), name));
    let (near, far) = (near?, far?);
    let far_side = ours::start(site, &site.proxy, "far", &far_config(site, &near, &far), PORT)?;
    let tables = near_tables(site, Transport::Quic, &near, &far);
    let near_side = ours::near_datagrams(site, "tunnel:far", &tables)?;
    wait_until_it_stands(&near_side, Transport::Quic)?;
    Ok(ours::by_near(site, vec![near_side, far_side]))
}

fn far_config(site: &Site, near: &Identity, far: &Identity) -> String {
    format!(
        "[[listen]]\nkind = \"tunnel\"\naddress = \"{}\"\nidentity = \"{}\"\npins = [\"{}\"]\n{}",
        site.proxy_address(PORT),
        far.file.display(),
        near.pin,
        ours::rule("match = { socks_user = \"near.lab\" }\ncarrier = \"direct\"")
    )
}

fn near_tables(site: &Site, transport: Transport, near: &Identity, far: &Identity) -> String {
    format!(
        "[[tunnel]]\nname = \"far\"\naddress = \"{}\"\nidentity = \"{}\"\npins = [\"{}\"]\ntransport = \"{}\"\n",
        site.proxy_address(PORT),
        near.file.display(),
        far.pin,
        transport.word()
    )
}

/// Makes a key as the manual says; reuses an earlier one of the same run.
fn identity(directory: &Path, name: &str) -> Result<Identity, Unavailable> {
    let file = directory.join(format!("{name}.pem"));
    let path = file.to_string_lossy();
    if !file.exists() {
        sidetrack(&["tunnel", "key", "--name", name, "--out", &path])?;
    }
    let printed = sidetrack(&["tunnel", "pin", &path])?;
    let pin = printed.split_whitespace().find(|word| word.starts_with("sha256//"));
    let pin = pin.with_context(|| format!("`sidetrack tunnel pin` printed no pin: {}", printed.trim()))?;
    Ok(Identity { pin: pin.to_owned(), file })
}

fn sidetrack(arguments: &[&str]) -> Result<String, Unavailable> {
    let output = std::process::Command::new(ours::program()?).args(arguments).output()?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(anyhow!("sidetrack {}: {}", arguments.join(" "), words.trim()).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The set-up of the tunnel does not belong to a flow's set-up: waits until the near side's log says that it is done.
fn wait_until_it_stands(near_side: &Service, transport: Transport) -> Result<()> {
    let wanted = format!("transport=\"{}\"", transport.word());
    let began = Instant::now();
    while began.elapsed() < STANDS_WITHIN {
        if near_side.log().contains(&wanted) {
            return Ok(());
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    bail!("the tunnel does not stand after {STANDS_WITHIN:?}: {}", near_side.log().trim())
}
