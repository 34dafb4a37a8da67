//! Sidetrack in every role: `sidetrack up -c FILE` with a generated configuration.

use std::path::PathBuf;

use anyhow::anyhow;

use super::pairs::redirector_placement;
use super::{RELAY_PORT, Start, Unavailable, redirected, relay, socks_proxy};
use crate::launch;
use crate::load::Via;
use crate::service::Service;
use crate::site::Site;
use crate::topology::Node;

const SOCKS_PORT: u16 = 1090;
const REDIRECT_PORT: u16 = 42090;
/// How long a hop that takes initial data waits for it, in milliseconds; HTTP clients speak at once.
const INITIAL_DATA_WAIT_MS: u32 = 50;

/// A port that leads to the origin, through user space whatever the kernel could do alone.
pub fn reverse(site: &Site) -> Start<'_> {
    let config = format!("{}{}", reverse_listener(site), rule("carrier = \"direct\"\nkernel = \"never\""));
    let service = start(site, &site.proxy, "reverse", &config, RELAY_PORT)?;
    Ok(relay(site, service))
}

/// The same port where the rule needs no bytes, no function and no proxy: the kernel forwards, we record.
pub fn kernel_path(site: &Site) -> Start<'_> {
    let config = format!("{}{}", reverse_listener(site), rule("carrier = \"direct\"\nkernel = \"auto\""));
    let service = start(site, &site.proxy, "kernel", &config, RELAY_PORT)?;
    let running = relay(site, service);
    require_translation(site)?;
    Ok(running)
}

/// A SOCKS listener of both versions.
pub fn socks(site: &Site, via: Via) -> Start<'_> {
    let service = socks_service(site)?;
    Ok(socks_proxy(site, service, SOCKS_PORT, via))
}

/// Redirector beside the client, proxy in the middle; `scheme` and `options` of the hop between them, such as
/// `socks6` and `?tfo=true`.
pub fn pair<'s>(site: &'s Site, scheme: &str, options: &str) -> Start<'s> {
    let proxy = socks_service(site)?;
    let (gateway, origin) = (site.proxy_address(SOCKS_PORT), site.origin());
    let listener = format!(
        "[[listen]]\nkind = \"redirect\"\naddress = \"127.0.0.1:{REDIRECT_PORT}\"\nlocal = true\n\
         dst = [\"{}\"]\nports = [{}]\n",
        origin.ip(),
        origin.port()
    );
    let waits = scheme == "socks6" || !options.is_empty();
    let wait = if waits { format!("\ninitial_data_wait_ms = {INITIAL_DATA_WAIT_MS}") } else { String::new() };
    let config = format!("{listener}{}", rule(&format!("carrier = \"{scheme}://{gateway}{options}\"{wait}")));
    let redirector = start(site, &site.client, "redirect", &config, REDIRECT_PORT)?;
    Ok(redirected(site, vec![redirector, proxy], Vec::new()))
}

fn reverse_listener(site: &Site) -> String {
    let (address, origin) = (site.proxy_address(RELAY_PORT), site.origin());
    format!("[[listen]]\nkind = \"reverse\"\naddress = \"{address}\"\nto = \"{origin}\"\n")
}

fn rule(keys: &str) -> String {
    format!("[[rule]]\nname = \"all\"\n{keys}\n")
}

fn socks_service(site: &Site) -> Result<Service, Unavailable> {
    let address = site.proxy_address(SOCKS_PORT);
    let listener = format!("[[listen]]\nkind = \"socks\"\naddress = \"{address}\"\n");
    let config = format!("{listener}{}", rule("carrier = \"direct\""));
    start(site, &site.proxy, "socks", &config, SOCKS_PORT)
}

/// The row means nothing if the flows went through user space after all.
fn require_translation(site: &Site) -> Result<(), Unavailable> {
    let rules = site.proxy.run("nft", &["list", "ruleset"])?;
    if rules.contains("dnat") {
        return Ok(());
    }
    Err(Unavailable::Failed(anyhow!(
        "sidetrack has put no dnat into nft: the flows would go through user space"
    )))
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
    let directory = site.directory.path();
    let path = directory.join(format!("sidetrack-{role}.toml"));
    // One worker as the others have; records are written, because that is what the product does.
    let head = format!(
        "version = 1\nworkers = 1\ndefault = \"deny\"\n[admin]\nsocket = \"none\"\n[record]\nto = \"{}\"\n",
        directory.join(format!("sidetrack-{role}.jsonl")).display()
    );
    std::fs::write(&path, format!("{head}{config}"))?;
    let mut command = node.command_at(&program.to_string_lossy(), &redirector_placement(site));
    command.args(["up", "-c"]).arg(&path);
    let mut service = Service::start(&format!("sidetrack-{role}"), command, directory)?;
    service.wait_listening(node, port)?;
    Ok(service)
}
