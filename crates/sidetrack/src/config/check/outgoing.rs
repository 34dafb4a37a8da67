//! `[outgoing]`.

use super::super::{At, Outgoing, raw};
use super::Check;
use std::net::IpAddr;

/// The default ports, those of Brane's proxy.
const PORTS: std::ops::RangeInclusive<u16> = 4200..=4299;
const FREE_AFTER_MS: u64 = 3_600_000;

impl Check<'_> {
    /// Checks the settings for ports that services ask for.
    pub(super) fn outgoing(&mut self, raw: Option<&At<raw::Outgoing>>) -> Option<Outgoing> {
        let raw = raw?;
        let Some(listen) = &raw.listen else {
            let help = "write `listen = \"127.0.0.1:50050\"`, the address that services know";
            self.error(raw.span(), "nothing says where paths are asked for", help);
            return None;
        };
        let ports = self.port_range(raw.ports.as_ref(), PORTS);
        let free_after = self.number(raw.free_after_ms.as_ref(), 1000..=u64::from(u32::MAX), " milliseconds");
        let listen_at = self.address(listen);
        let address = match &raw.address {
            None => listen_at.map(|at| at.ip()),
            Some(at) => self.one_ip(at),
        };
        if let Some(at) = raw.address.as_ref().or(raw.listen.as_ref())
            && address.is_some_and(|ip| ip.is_multicast())
        {
            self.error(
                at.span(),
                "no program can listen on a multicast address",
                "use an address of this host",
            );
        }
        Some(Outgoing {
            listen: listen_at?,
            address: address?,
            ports,
            certificates: raw.certificates.as_ref().map(|path| self.path(path, &[])),
            free_after_ms: free_after.unwrap_or(FREE_AFTER_MS),
        })
    }

    fn one_ip(&mut self, at: &At<String>) -> Option<IpAddr> {
        let parsed = at.parse().ok();
        if parsed.is_none() {
            let help = "write an address of this host without a port, such as \"127.0.0.1\"";
            self.error(at.span(), format!("'{}' is not an IP address", at.as_str()), help);
        }
        parsed
    }
}
