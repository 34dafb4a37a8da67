//! The seed's own programs: `proxy` and `redirector` of socksx 0.1.0, the `socksx` binary of 0.1.1.
//!
//! `bench/peers.sh` builds them into the directory that the environment variable `SIDETRACK_PEERS` names, or
//! `~/.cache/sidetrack/peers`.

use std::path::PathBuf;

use super::{Start, Unavailable, socks_proxy};
use crate::load::Via;
use crate::service::Service;
use crate::site::Site;

/// SOCKS6 in socksx's layout, data after the reply.
pub const S6: Via = Via::Socks6Socksx { initial_data: false };
/// SOCKS6 in socksx's layout, the HTTP request as initial data.
pub const S6_DATA: Via = Via::Socks6Socksx { initial_data: true };

/// Port of the proxy; the examples of 0.1.0 know no other.
pub const PROXY_PORT: u16 = 1080;
/// Port of the redirector, on 127.0.0.1.
pub const REDIRECTOR_PORT: u16 = 42000;

/// A version of the crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Directory below `SIDETRACK_PEERS`.
    pub directory: &'static str,
    /// The program that is a SOCKS server.
    proxy: &'static str,
    /// Further arguments.
    arguments: &'static [&'static str],
}

/// The version the EPI paper measured.
pub const V0_1_0: Version = Version { directory: "socksx-0.1.0", proxy: "proxy", arguments: &[] };
/// The last one in the registry; its limit of 256 connections is lifted.
pub const V0_1_1: Version =
    Version { directory: "socksx-0.1.1", proxy: "socksx", arguments: &["--limit", "0"] };

/// The path of one of its programs.
pub fn program(version: Version, name: &str) -> Result<PathBuf, Unavailable> {
    let path = directory().map(|root| root.join(version.directory).join("bin").join(name));
    path.filter(|path| path.is_file()).ok_or_else(|| {
        Unavailable::Absent(format!("{} is not built; bench/peers.sh builds it", version.directory))
    })
}

/// Where `bench/peers.sh` puts what it builds.
fn directory() -> Option<PathBuf> {
    let cache = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    std::env::var_os("SIDETRACK_PEERS").map(PathBuf::from).or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(cache)?;
        Some(cache.join("sidetrack/peers"))
    })
}

/// The proxy as a row of its own.
pub fn proxy(site: &Site, version: Version, via: Via) -> Start<'_> {
    let socks = if via == Via::Socks5 { "5" } else { "6" };
    let service = proxy_service(site, version, socks)?;
    Ok(socks_proxy(site, service, PROXY_PORT, via))
}

/// The program of [`proxy`].
pub fn proxy_service(site: &Site, version: Version, socks: &str) -> Result<Service, Unavailable> {
    let program = program(version, version.proxy)?;
    let mut command = site.proxy.command_at(&program.to_string_lossy(), &site.proxy_placement());
    command.args(["--socks", socks]).args(version.arguments);
    let mut service = Service::start_muted(version.directory, command, site.directory.path())?;
    service.wait_listening(&site.proxy, PROXY_PORT)?;
    Ok(service)
}
