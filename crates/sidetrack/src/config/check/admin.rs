//! `[admin.orchestrator]`.

use super::super::{At, OrchestratorAt, raw};
use super::Check;

impl Check<'_> {
    /// Checks where the orchestrator is whose applications the page shows.
    pub(super) fn orchestrator(&mut self, raw: &At<raw::Orchestrator>) -> Option<OrchestratorAt> {
        let (Some(address), Some(identity), Some(ca)) = (&raw.address, &raw.identity, &raw.ca) else {
            let help = "write `address = \"host:7000\"`, `identity = \"operator.pem\"` and `ca = \"ca.pem\"`";
            self.error(raw.span(), "[admin.orchestrator] needs `address`, `identity` and `ca`", help);
            return None;
        };
        let mut addresses = Vec::new();
        let mut hosts = Vec::new();
        for one in address.items() {
            match one.rsplit_once(':') {
                Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0) => {
                    hosts.push(host.trim_matches(['[', ']']).to_owned());
                    addresses.push(one.to_string());
                }
                _ => {
                    let help = "write a host and a port, such as \"orchestrator.example:7000\"";
                    self.error(one.span(), format!("'{}' is not an address with a port", one.as_str()), help);
                }
            }
        }
        let name =
            raw.name.as_ref().map(|name| name.as_str().to_owned()).or_else(|| hosts.into_iter().next())?;
        let [identity, ca] = [identity, ca].map(|path| self.surroundings.resolve(path));
        Some(OrchestratorAt { addresses, name, identity, ca })
    }
}
