//! HAProxy in `mode tcp`, with and without splicing.

use super::{FLOW_LIMIT, RELAY_PORT, Start, configured, relay};
use crate::site::Site;

/// One thread, bytes copied through its buffers.
pub(super) fn copy(site: &Site) -> Start<'_> {
    start(site, FLOW_LIMIT, "")
}

/// One thread, `splice(2)` in both directions; fewer flows, because pipes need descriptors, too.
pub(super) fn splice(site: &Site) -> Start<'_> {
    start(site, 6000, "option splice-request\n  option splice-response\n")
}

fn start<'s>(site: &'s Site, flow_limit: u32, options: &str) -> Start<'s> {
    let (listen, origin) = (site.proxy_address(RELAY_PORT), site.origin());
    let config = format!(
        "global
  nbthread 1
  maxconn {flow_limit}
defaults
  mode tcp
  maxconn {flow_limit}
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  {options}
listen relay
  bind {listen} backlog 8192
  server origin {origin}
"
    );
    let service = configured(site, "haproxy", &config, &["-db", "-f"], RELAY_PORT)?;
    Ok(relay(site, service))
}
