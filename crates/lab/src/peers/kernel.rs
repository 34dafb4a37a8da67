//! The limits: no relay, and the kernel's own address translation.

use super::{RELAY_PORT, Running, Start, Table};
use crate::load::Via;
use crate::site::{Forwarding, Site};

/// The client dials the origin over the direct link.
pub fn direct(site: &Site) -> Start<'_> {
    let origin = site.origin_direct();
    Ok(Running {
        services: Vec::new(),
        _tables: Vec::new(),
        _forwarding: None,
        dial: origin,
        via: Via::Plain,
        destination: origin,
    })
}

/// One prerouting rule in the proxy's node, nothing else.
pub fn dnat(site: &Site) -> Start<'_> {
    let dial = site.proxy_address(RELAY_PORT);
    let body = format!(
        "chain prerouting {{ type nat hook prerouting priority -100; \
         ip daddr {} tcp dport {RELAY_PORT} dnat to {}; }}",
        dial.ip(),
        site.origin()
    );
    let table = Table::load(&site.proxy, "ip lab", &body)?;
    Ok(Running {
        services: Vec::new(),
        _tables: vec![table],
        _forwarding: Some(Forwarding::in_proxy(site)?),
        dial,
        via: Via::Plain,
        destination: site.origin(),
    })
}
