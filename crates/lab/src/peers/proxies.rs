//! SOCKS servers: two from Debian, those of the EPI paper, and ours.

use super::{Start, Unavailable, installed, ours, running, socksx};
use crate::load::Via;
use crate::service::Service;
use crate::site::Site;

/// A SOCKS server in the proxy's node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proxy {
    /// dante, SOCKS5 without authentication, everything allowed.
    Dante,
    /// microsocks, SOCKS5, one thread per connection.
    Microsocks,
    /// socksx of that version, speaking SOCKS `5` or `6`.
    Socksx(socksx::Version, u8),
    /// Ours, both versions and all dialects on one port.
    Ours,
}

impl Proxy {
    /// The address it listens on.
    #[must_use]
    pub fn port(self) -> u16 {
        match self {
            Self::Dante => 1070,
            Self::Microsocks => 1081,
            Self::Socksx(..) => socksx::PROXY_PORT,
            Self::Ours => 1090,
        }
    }

    /// Starts it and waits until it listens.
    ///
    /// # Errors
    /// It is absent or does not start.
    pub fn start(self, site: &Site) -> Result<Service, Unavailable> {
        match self {
            Self::Dante => dante(site, self.port()),
            Self::Microsocks => microsocks(site, self.port()),
            Self::Socksx(version, socks) => socksx::proxy(site, version, socks),
            Self::Ours => ours::socks(site, self.port()),
        }
    }

    /// Starts it as a separate row, with a client that speaks `via`.
    pub(super) fn row(self, site: &Site, via: Via) -> Start<'_> {
        let services = vec![self.start(site)?];
        let dial = site.proxy_address(self.port());
        Ok(running(site, services, (dial, via)))
    }
}

fn dante(site: &Site, port: u16) -> Result<Service, Unavailable> {
    installed("danted")?;
    let (internal, external) = (site.client_proxy.b.v4, &site.proxy_server.interface);
    let config = format!(
        "logoutput: stderr
internal: {internal} port = {port}
external: {external}
clientmethod: none
socksmethod: none
user.privileged: root
user.unprivileged: root
client pass {{ from: 0.0.0.0/0 to: 0.0.0.0/0 }}
socks pass {{ from: 0.0.0.0/0 to: 0.0.0.0/0 }}
"
    );
    let path = site.directory.path().join("danted.conf");
    std::fs::write(&path, config)?;
    let mut command = site.proxy_command("danted");
    command.args(["-p", "/dev/null", "-f"]).arg(&path);
    start(site, "danted", command, port)
}

fn microsocks(site: &Site, port: u16) -> Result<Service, Unavailable> {
    installed("microsocks")?;
    let mut command = site.proxy_command("microsocks");
    command.args(["-i", &site.client_proxy.b.v4.to_string(), "-p", &port.to_string()]);
    start(site, "microsocks", command, port)
}

fn start(site: &Site, name: &str, command: std::process::Command, port: u16) -> Result<Service, Unavailable> {
    let mut service = Service::start(name, command, site.directory.path())?;
    service.wait_listening(&site.proxy, port)?;
    Ok(service)
}
