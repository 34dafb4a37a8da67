//! SOCKS5 servers from Debian.

use super::{Start, Unavailable, configured, installed, socks_proxy};
use crate::load::Via;
use crate::service::Service;
use crate::site::Site;

/// Port of dante.
pub const DANTE_PORT: u16 = 1070;
const MICROSOCKS_PORT: u16 = 1081;

/// dante without authentication, everything allowed.
pub fn dante(site: &Site) -> Start<'_> {
    let service = dante_service(site)?;
    Ok(socks_proxy(site, service, DANTE_PORT, Via::Socks5))
}

/// The program of [`dante`].
pub fn dante_service(site: &Site) -> Result<Service, Unavailable> {
    let (internal, external) = (site.client_proxy.b.v4, &site.proxy_server.interface);
    let config = format!(
        "logoutput: stderr
internal: {internal} port = {DANTE_PORT}
external: {external}
clientmethod: none
socksmethod: none
user.privileged: root
user.unprivileged: root
client pass {{ from: 0.0.0.0/0 to: 0.0.0.0/0 }}
socks pass {{ from: 0.0.0.0/0 to: 0.0.0.0/0 }}
"
    );
    configured(site, "danted", &config, &["-p", "/dev/null", "-f"], DANTE_PORT)
}

/// microsocks, one thread a connection.
pub fn microsocks(site: &Site) -> Start<'_> {
    installed("microsocks")?;
    let mut command = site.proxy.command_at("microsocks", &site.proxy_placement());
    command.args(["-i", &site.client_proxy.b.v4.to_string(), "-p", &MICROSOCKS_PORT.to_string()]);
    let mut service = Service::start("microsocks", command, site.directory.path())?;
    service.wait_listening(&site.proxy, MICROSOCKS_PORT)?;
    Ok(socks_proxy(site, service, MICROSOCKS_PORT, Via::Socks5))
}
