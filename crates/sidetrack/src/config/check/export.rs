//! `[export]`.

use super::super::{At, Export, Ipfix, raw};
use super::Check;
use raw::IpfixTransport;
use sidetrack_core::flow::Protocol;
use std::time::Duration;

/// Default of `template_refresh_ms` and of `active_timeout_ms`.
const MINUTE_MS: u64 = 60_000;
/// A day: the longest of both.
const DAY_MS: u64 = 86_400_000;

impl Check<'_> {
    /// Checks where reports of flows go.
    pub(super) fn export(&mut self, raw: &raw::Export) -> Export {
        Export {
            ipfix: raw.ipfix.as_ref().and_then(|ipfix| self.ipfix(ipfix)),
            otlp: raw.otlp.as_ref().and_then(|otlp| self.otlp(otlp)),
        }
    }

    fn ipfix(&mut self, raw: &At<raw::Ipfix>) -> Option<Ipfix> {
        let Some(collector) = &raw.collector else {
            let help = "write `collector = \"192.0.2.1:4739\"`: a host and a port";
            self.error(raw.span(), "[export.ipfix] has no `collector`", help);
            return None;
        };
        let transport = match raw.transport.as_deref() {
            Some(IpfixTransport::Tcp) => Protocol::Tcp,
            Some(IpfixTransport::Udp) | None => Protocol::Udp,
        };
        let refresh = self.number(raw.template_refresh_ms.as_ref(), 1000..=DAY_MS, " milliseconds");
        if let Some(at) = raw.template_refresh_ms.as_ref().filter(|_| transport == Protocol::Tcp) {
            let help = "take it out: a connection loses no template";
            self.error(at.span(), "`template_refresh_ms` has no meaning with transport \"tcp\"", help);
        }
        let active = match raw.active_timeout_ms.as_ref() {
            Some(at) if **at == 0 => Some(0),
            at => self.number(at, 1000..=DAY_MS, " milliseconds, or 0"),
        };
        let active = active.unwrap_or(MINUTE_MS);
        let enterprise = self.number(raw.enterprise.as_ref(), 1..=u64::from(u32::MAX), "");
        Some(Ipfix {
            collector: self.destination(collector)?,
            transport,
            domain: raw.observation_domain.as_deref().copied().unwrap_or(1),
            refresh: Duration::from_millis(refresh.unwrap_or(MINUTE_MS)),
            active: (active > 0).then(|| Duration::from_millis(active)),
            enterprise: enterprise.and_then(|number| u32::try_from(number).ok()),
        })
    }
}
