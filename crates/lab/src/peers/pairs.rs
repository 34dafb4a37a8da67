//! Redirector and proxy of other people: the client knows nothing.

use super::{Start, Table, installed, redirected, socks, socksx as seed};
use crate::launch::Placement;
use crate::service::Service;
use crate::site::Site;

const REDSOCKS_PORT: u16 = 12345;

/// redsocks in the client's node, dante in the proxy's.
pub fn redsocks_dante(site: &Site) -> Start<'_> {
    installed("redsocks")?;
    let proxy = socks::dante_service(site)?;
    let config = site.directory.path().join("redsocks.conf");
    let text = format!(
        "base {{ log_debug = off; log_info = off; log = stderr; daemon = off; redirector = iptables; \
         redsocks_conn_max = 9000; }}
redsocks {{ local_ip = 127.0.0.1; local_port = {REDSOCKS_PORT}; listenq = 8192; \
         ip = {}; port = {}; type = socks5; }}
",
        site.client_proxy.b.v4,
        socks::DANTE_PORT
    );
    std::fs::write(&config, text)?;
    let mut command = site.client.command_at("redsocks", &redirector_placement(site));
    command.arg("-c").arg(&config);
    let mut redirector = Service::start("redsocks", command, site.directory.path())?;
    redirector.wait_listening(&site.client, REDSOCKS_PORT)?;
    let table = Table::redirect(site, REDSOCKS_PORT)?;
    Ok(redirected(site, vec![redirector, proxy], vec![table]))
}

/// socksx 0.1.0 in both roles, SOCKS version `socks`.
pub fn socksx<'s>(site: &'s Site, socks: &str) -> Start<'s> {
    let program = seed::program(seed::V0_1_0, "redirector")?;
    let proxy = seed::proxy_service(site, seed::V0_1_0, socks)?;
    let mut command = site.client.command_at(&program.to_string_lossy(), &redirector_placement(site));
    let (host, port) = (site.client_proxy.b.v4.to_string(), seed::PROXY_PORT.to_string());
    command.args(["--socks", socks, &host, &port]);
    let mut redirector = Service::start_muted("socksx-redirector", command, site.directory.path())?;
    redirector.wait_listening(&site.client, seed::REDIRECTOR_PORT)?;
    let table = Table::redirect(site, seed::REDIRECTOR_PORT)?;
    Ok(redirected(site, vec![redirector, proxy], vec![table]))
}

/// A redirector lives beside the client but shares the proxy's CPU: its cost is the pair's, not the client's.
pub fn redirector_placement(site: &Site) -> Placement {
    site.proxy_placement()
}
