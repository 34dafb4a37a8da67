//! Rows of datagrams with two programs of ours: `run` with a SOCKS server, and CONNECT-UDP over HTTP/3.

use super::{Running, Start, ours, running};
use crate::certificate::{self, Pair};
use crate::load::Via;
use crate::site::Site;

/// Port of the SOCKS server behind `run`.
const SOCKS_PORT: u16 = 1093;
/// Port of the proxy that takes CONNECT-UDP.
const PROXY_PORT: u16 = 1092;

/// The client's program runs under `sidetrack run --via socks5://...`, and knows nothing of it. The relays have one core, the
/// client the other.
pub(super) fn run(site: &Site) -> Start<'_> {
    let service = ours::socks(site, SOCKS_PORT)?;
    let program = ours::program_with_run()?.to_string_lossy().into_owned();
    let hop = format!("socks5://{}", site.proxy_address(SOCKS_PORT));
    let cpu = site.client_placement().cpu.unwrap_or_default().to_string();
    let words = [program.as_str(), "run", "--quiet", "--via", &hop, "--", "taskset", "-c", &cpu];
    let inside = words.map(str::to_owned).to_vec();
    Ok(Running { inside, ..running(site, vec![service], (site.origin(), Via::Plain)) })
}

/// A port beside the client, and a proxy that it asks for CONNECT-UDP over HTTP/3 (RFC 9298).
pub(super) fn connect_udp(site: &Site) -> Start<'_> {
    let proxy = site.proxy_address(PROXY_PORT);
    let pair = Pair::at(site.directory.path(), "proxy");
    let names = [("-addext", format!("subjectAltName=IP:{}", proxy.ip()))];
    certificate::make(&names, &pair, "/CN=proxy.lab")?;
    let identity = pair.in_one_file()?;
    let listener = format!(
        "[[listen]]\nkind = \"http\"\naddress = \"{proxy}\"\nidentity = \"{}\"\nhttp3 = true\n{}",
        identity.display(),
        ours::rule("carrier = \"direct\"")
    );
    let far_side = ours::start(site, &site.proxy, "far", &listener, PROXY_PORT)?;
    let carrier = format!("h3://{proxy}?ca={}", pair.certificate.display());
    let near_side = ours::near_datagrams(site, &carrier, "")?;
    Ok(ours::by_near(site, vec![near_side, far_side]))
}
