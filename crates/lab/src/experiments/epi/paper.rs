//! The content of the EPI framework paper: Table I, Eqs. 6 to 9, and its figures.

use std::time::Duration;

/// One set-up of Table I; its values are round-trip times in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub(super) struct Topology {
    /// Its name in the paper.
    pub name: &'static str,
    /// Client to proxy.
    pub client_proxy_ms: f64,
    /// Proxy to server.
    pub proxy_server_ms: f64,
    /// Client to server.
    pub client_server_ms: f64,
}

const fn topology(name: &'static str, cp: f64, ps: f64, cs: f64) -> Topology {
    Topology { name, client_proxy_ms: cp, proxy_server_ms: ps, client_server_ms: cs }
}

/// Table I. The first three have the proxy on the path, the others beside it.
pub(super) const TABLE_I: [Topology; 6] = [
    topology("DOCKER 1", 5.0, 5.0, 10.0),
    topology("DOCKER 2", 5.0, 10.0, 15.0),
    topology("DOCKER 3", 10.0, 5.0, 15.0),
    topology("DOCKER 4", 1.0, 1.0, 1.0),
    topology("DOCKER 5", 5.0, 5.0, 5.0),
    topology("DOCKER 6", 10.0, 10.0, 10.0),
];

impl Topology {
    /// Returns true if the proxy is on the path from the client to the server.
    #[must_use]
    pub(super) fn is_in_between(&self) -> bool {
        self.client_server_ms >= self.client_proxy_ms + self.proxy_server_ms
    }

    /// `5/5/10`.
    #[must_use]
    pub(super) fn distances(&self) -> String {
        format!("{}/{}/{}", self.client_proxy_ms, self.proxy_server_ms, self.client_server_ms)
    }

    /// One-way delays of the links client-proxy, proxy-server, client-server.
    #[must_use]
    pub(super) fn delays(&self) -> [Duration; 3] {
        [self.client_proxy_ms, self.proxy_server_ms, self.client_server_ms]
            .map(|round_trip| Duration::from_secs_f64(round_trip / 2000.0))
    }
}

/// The number of round trips of a request, by link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(super) struct Model {
    /// Client to server, directly.
    pub client_server: u32,
    /// Client to proxy.
    pub client_proxy: u32,
    /// Proxy to server.
    pub proxy_server: u32,
}

impl Model {
    /// Eq. 6: connect and request.
    pub(super) const NO_PROXY: Self = Self { client_server: 2, client_proxy: 0, proxy_server: 0 };

    /// Eqs. 7 to 9 with these factors.
    #[must_use]
    pub(super) const fn proxied(client_proxy: u32, proxy_server: u32) -> Self {
        Self { client_server: 0, client_proxy, proxy_server }
    }

    /// Returns its time for a topology, without processing, in milliseconds.
    #[must_use]
    pub(super) fn time_ms(self, topology: &Topology) -> f64 {
        f64::from(self.client_server) * topology.client_server_ms
            + f64::from(self.client_proxy) * topology.client_proxy_ms
            + f64::from(self.proxy_server) * topology.proxy_server_ms
    }

    /// Returns its time minus that without a proxy, in milliseconds.
    #[must_use]
    pub(super) fn overhead_ms(self, topology: &Topology) -> f64 {
        self.time_ms(topology) - Self::NO_PROXY.time_ms(topology)
    }
}

/// Overheads compared with no proxy, in the order of [`TABLE_I`], from the text of Secs. VI-B and VI-C; "" if the
/// text has none.
pub(super) type Overheads = [&'static str; 6];

/// nginx (Figs. 11b, 12b).
pub(super) const NGINX: Overheads = ["<1", "<1", "<1", "2", "", "21"];
/// SOCKS5.
pub(super) const SOCKS5: Overheads = ["12", "12", "", "5", "", "42"];
/// SOCKS6.
pub(super) const SOCKS6: Overheads = ["6", "6", "", "4", "", "32"];
/// Without a figure in the paper.
pub(super) const NONE: Overheads = [""; 6];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_equations_give_what_they_give() {
        let [docker_1, .., docker_6] = TABLE_I;
        assert!(docker_1.is_in_between() && !docker_6.is_in_between());
        assert_eq!(TABLE_I.iter().filter(|topology| topology.is_in_between()).count(), 3);
        assert!((Model::proxied(2, 2).overhead_ms(&docker_1)).abs() < 1e-9);
        assert!((Model::proxied(3, 2).overhead_ms(&docker_6) - 30.0).abs() < 1e-9);
        assert!((Model::proxied(4, 2).overhead_ms(&docker_6) - 40.0).abs() < 1e-9);
        assert!((Model::proxied(1, 1).overhead_ms(&docker_1) + 10.0).abs() < 1e-9);
        assert_eq!(docker_1.delays()[2], Duration::from_millis(5));
        assert_eq!(docker_1.distances(), "5/5/10");
    }
}
