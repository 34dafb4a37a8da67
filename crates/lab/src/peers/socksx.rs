//! The programs of the EPI paper: `proxy` and `redirector` of socksx 0.1.0, `socksx` and `redirector` of 0.1.1.
//!
//! `bench/peers.sh` builds them into the directory that the environment variable `SIDETRACK_PEERS` names, or
//! `~/.cache/sidetrack/peers`.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use super::Unavailable;
use crate::load::Via;
use crate::service::Service;
use crate::site::Site;

/// SOCKS6 in socksx's layout, data after the reply.
pub const S6: Via = Via::Socks6Socksx { initial_data: false };
/// SOCKS6 in socksx's layout, the HTTP request as initial data.
pub const S6_DATA: Via = Via::Socks6Socksx { initial_data: true };

/// Port of the proxy; it is fixed in the examples of 0.1.0.
pub const PROXY_PORT: u16 = 1080;
/// Port of the redirector, on 127.0.0.1.
pub const REDIRECTOR_PORT: u16 = 42000;

/// A version of the crate, as `bench/peers.sh` builds it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Directory below `SIDETRACK_PEERS`.
    pub directory: &'static str,
    /// The program that is a SOCKS server.
    proxy: &'static str,
    /// Further arguments.
    arguments: &'static [&'static str],
}

impl fmt::Debug for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.directory)
    }
}

/// The version that the EPI paper measured.
pub const V0_1_0: Version = Version { directory: "socksx-0.1.0", proxy: "proxy", arguments: &[] };
/// The last version in the registry; its limit of 256 connections is removed.
pub const V0_1_1: Version =
    Version { directory: "socksx-0.1.1", proxy: "socksx", arguments: &["--limit", "0"] };

/// Returns the path of one of its programs.
pub fn program(version: Version, name: &str) -> Result<PathBuf, Unavailable> {
    let path = directory().map(|root| root.join(version.directory).join("bin").join(name));
    path.filter(|path| path.is_file()).ok_or_else(|| {
        Unavailable::Absent(format!("{} is not built; bench/peers.sh builds it", version.directory))
    })
}

/// Returns the folder where `bench/peers.sh` puts its builds.
fn directory() -> Option<PathBuf> {
    let cache = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    std::env::var_os("SIDETRACK_PEERS").map(PathBuf::from).or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(cache)?;
        Some(cache.join("sidetrack/peers"))
    })
}

/// Its SOCKS server, speaking SOCKS `socks`.
pub fn proxy(site: &Site, version: Version, socks: u8) -> Result<Service, Unavailable> {
    let program = program(version, version.proxy)?;
    let mut command = site.proxy_command(&program.to_string_lossy());
    command.args(["--socks", &socks.to_string()]).args(version.arguments);
    let mut service = Service::start_muted(version.directory, command, site.directory.path())?;
    service.wait_listening(&site.proxy, PROXY_PORT)?;
    Ok(service)
}

/// Its redirector beside the client, leading to `gateway`.
pub fn redirector(
    site: &Site,
    version: Version,
    socks: u8,
    gateway: SocketAddr,
) -> Result<Service, Unavailable> {
    let program = program(version, "redirector")?;
    let mut command = site.client.command_at(&program.to_string_lossy(), &site.proxy_placement());
    command.args(["--socks", &socks.to_string(), &gateway.ip().to_string(), &gateway.port().to_string()]);
    let mut service = Service::start_muted("socksx-redirector", command, site.directory.path())?;
    service.wait_listening(&site.client, REDIRECTOR_PORT)?;
    Ok(service)
}
