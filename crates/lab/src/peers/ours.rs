//! Sidetrack in every role: `sidetrack up -c FILE` with a generated configuration.

use std::path::PathBuf;

use super::pairs::redirector_placement;
use super::{RELAY_PORT, Running, Start, Unavailable, redirected, relay, socks_proxy};
use crate::launch;
use crate::load::Via;
use crate::service::Service;
use crate::site::Site;
use crate::topology::Node;

const SOCKS_PORT: u16 = 1090;
const REDIRECT_PORT: u16 = 42090;

/// Everything is carried straight to its destination.
const DIRECT_RULE: &str = "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\n";

/// A port that leads to the origin.
pub fn reverse(site: &Site) -> Start<'_> {
    let listen = format!(
        "[[listen]]\nkind = \"reverse\"\naddress = \"{}\"\nto = \"{}\"\n",
        site.proxy_address(RELAY_PORT),
        site.origin()
    );
    let service = start(site, &site.proxy, "reverse", &format!("{listen}{DIRECT_RULE}"), RELAY_PORT)?;
    Ok(relay(site, service))
}

/// A SOCKS listener of both versions.
pub fn socks(site: &Site, via: Via) -> Start<'_> {
    let service = socks_service(site)?;
    Ok(socks_proxy(site, service, SOCKS_PORT, via))
}

/// Redirector beside the client, proxy in the middle, `carrier` (`socks5` or `socks6`) between them.
pub fn pair<'s>(site: &'s Site, carrier: &str) -> Start<'s> {
    let proxy = socks_service(site)?;
    let (gateway, origin) = (site.proxy_address(SOCKS_PORT), site.origin());
    let config = format!(
        "[[listen]]\nkind = \"redirect\"\naddress = \"127.0.0.1:{REDIRECT_PORT}\"\nlocal = true\n\
         match = {{ to = \"{}\", port = {} }}\n\
         [[rule]]\nname = \"all\"\ncarrier = \"{carrier}://{gateway}\"\n",
        origin.ip(),
        origin.port()
    );
    let redirector = start(site, &site.client, "redirect", &config, REDIRECT_PORT)?;
    Ok(redirected(site, vec![redirector, proxy], Vec::new()))
}

/// A rule that needs no bytes, no function and no proxy: the kernel forwards, we record.
pub fn kernel_path(site: &Site) -> Start<'_> {
    let running = reverse_in_kernel(site)?;
    Ok(running)
}

fn reverse_in_kernel(site: &Site) -> Result<Running<'_>, Unavailable> {
    let listen = format!(
        "[[listen]]\nkind = \"reverse\"\naddress = \"{}\"\nto = \"{}\"\nkernel = true\n",
        site.proxy_address(RELAY_PORT),
        site.origin()
    );
    let service = start(site, &site.proxy, "kernel", &format!("{listen}{DIRECT_RULE}"), RELAY_PORT)?;
    Ok(relay(site, service))
}

fn socks_service(site: &Site) -> Result<Service, Unavailable> {
    let listen = format!("[[listen]]\nkind = \"socks\"\naddress = \"{}\"\n", site.proxy_address(SOCKS_PORT));
    start(site, &site.proxy, "socks", &format!("{listen}{DIRECT_RULE}"), SOCKS_PORT)
}

/// Our program: `SIDETRACK_BIN`, or the one built beside the lab.
pub fn program() -> Result<PathBuf, Unavailable> {
    let named = std::env::var_os("SIDETRACK_BIN").map(PathBuf::from);
    let beside = || launch::sibling_program(&std::env::current_exe().ok()?, "sidetrack");
    named.or_else(beside).filter(|path| path.is_file()).ok_or_else(|| {
        Unavailable::Absent("sidetrack is not built beside sidetrack-lab; cargo build --release".into())
    })
}

fn start(site: &Site, node: &Node, role: &str, config: &str, port: u16) -> Result<Service, Unavailable> {
    let program = program()?;
    let path = site.directory.path().join(format!("sidetrack-{role}.toml"));
    std::fs::write(&path, config)?;
    let mut command = node.command_at(&program.to_string_lossy(), &redirector_placement(site));
    command.args(["up", "-c"]).arg(&path);
    let mut service = Service::start(&format!("sidetrack-{role}"), command, site.directory.path())?;
    service.wait_listening(node, port)?;
    Ok(service)
}
