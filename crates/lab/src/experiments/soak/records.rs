//! The gateway's records, held against what clients saw.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::traffic::{Done, Entry};

/// The fields of a record that are looked at (docs/records.md).
#[derive(Debug, Deserialize)]
struct Record {
    client: Option<SocketAddr>,
    reason: Option<String>,
    protocol: Option<String>,
}

/// Reasons of a good end: that of our flows, and that of connections which the kernel has carried alone.
const WELL: [&str; 2] = ["ok", "kernel_closed"];

/// What the records say.
#[derive(Debug, Default, Serialize)]
pub(super) struct Records {
    /// Records by reason, those of datagrams too.
    pub reasons: BTreeMap<String, usize>,
    /// Lines that could not be read.
    pub unread: usize,
    /// Flows that the shunt has moved to its fast path: only these leave a record there.
    pub moved: usize,
    /// Client addresses that have more or fewer records than flows, with both numbers.
    pub miscounted: Vec<(SocketAddr, usize, usize)>,
    /// Client addresses of flows that were cut, whose records all say that they ended well.
    pub without_reason: Vec<SocketAddr>,
    /// Client addresses of flows that ended well, with a record that says something else, and what.
    pub misjudged: Vec<(SocketAddr, String)>,
}

impl Records {
    /// Reads records, and compares them with flows.
    pub(super) fn read(text: &str, flows: &[Done]) -> Self {
        let mut all = Self::default();
        let mut of_client: BTreeMap<SocketAddr, Vec<String>> = BTreeMap::new();
        for line in text.lines() {
            let Ok(Record { client, reason, protocol }) = serde_json::from_str(line) else {
                all.unread += 1;
                continue;
            };
            let reason = reason.unwrap_or_else(|| "none".to_owned());
            *all.reasons.entry(reason.clone()).or_default() += 1;
            if let (Some(client), Some("tcp")) = (client, protocol.as_deref()) {
                of_client.entry(client).or_default().push(reason);
            }
        }
        let mut done: BTreeMap<SocketAddr, Vec<&Done>> = BTreeMap::new();
        let mut redirected: BTreeMap<IpAddr, Vec<&Done>> = BTreeMap::new();
        for flow in flows {
            done.entry(flow.own).or_default().push(flow);
        }
        // Connections of one port to two servers are redirected to one address: the kernel gives the second another port, if the first is
        // known to it. So those of a host are only counted together.
        for own in done.extract_if(.., |_, flows| flows.iter().any(|flow| flow.entry == Entry::Redirect)) {
            redirected.entry(own.0.ip()).or_default().extend(own.1);
        }
        for (ip, flows) in redirected {
            let of_host = of_client.iter().filter(|(client, _)| client.ip() == ip);
            let reasons: Vec<_> = of_host.flat_map(|(_, reasons)| reasons).collect();
            let cut = flows.iter().filter(|flow| flow.error.is_some()).count();
            let other = reasons.iter().filter(|reason| !WELL.contains(&reason.as_str())).count();
            if reasons.len() != flows.len() {
                all.miscounted.push(((ip, 0).into(), flows.len(), reasons.len()));
            }
            if other < cut {
                all.without_reason.push((ip, 0).into());
            }
        }
        for (own, flows) in done {
            let reasons = of_client.get(&own).map_or(&[][..], Vec::as_slice);
            let of_shunt = flows.iter().filter(|flow| flow.entry == Entry::Shunt).count();
            all.moved += reasons.len().min(of_shunt);
            if !(flows.len() - of_shunt..=flows.len()).contains(&reasons.len()) {
                all.miscounted.push((own, flows.len(), reasons.len()));
                continue;
            }
            let (cut, other) = (
                flows.iter().filter(|flow| flow.error.is_some()).count(),
                reasons.iter().filter(|reason| !WELL.contains(&reason.as_str())),
            );
            let other: Vec<_> = other.collect();
            if other.len() < cut {
                all.without_reason.push(own);
            } else if other.len() > cut {
                all.misjudged.push((own, other[0].clone()));
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn done(port: u16, error: Option<&str>) -> Done {
        let (begun, ended) = (Duration::ZERO, Duration::ZERO);
        let own = SocketAddr::from(([10, 0, 0, 1], port));
        let error = error.map(str::to_owned);
        Done { entry: Entry::Socks, port: 9001, own, begun, ended, bytes: 1, error, is_wrong: false }
    }

    fn line(port: u16, reason: &str) -> String {
        format!("{{\"client\":\"10.0.0.1:{port}\",\"reason\":\"{reason}\",\"protocol\":\"tcp\"}}\n")
    }

    #[test]
    fn redirected_flows_of_a_host_are_counted_together() {
        let of_redirect = |port: u16, error| Done { entry: Entry::Redirect, ..done(port, error) };
        let flows = [of_redirect(1, None), of_redirect(1, Some("reset"))];
        let records = |text: [String; 2]| Records::read(&text.concat(), &flows);
        let right = records([line(1, "ok"), line(7, "refused")]);
        assert!(right.miscounted.is_empty() && right.without_reason.is_empty());
        let host = SocketAddr::from(([10, 0, 0, 1], 0));
        assert_eq!(records([line(1, "ok"), line(7, "ok")]).without_reason, [host]);
        assert_eq!(records([line(1, "refused"), String::new()]).miscounted, [(host, 2, 1)]);
    }

    #[test]
    fn flows_of_the_shunt_have_at_most_one_record() {
        let of_shunt = |port: u16| Done { entry: Entry::Shunt, ..done(port, None) };
        let text = [line(1, "ok"), line(2, "ok"), line(2, "ok")].concat();
        let records = Records::read(&text, &[of_shunt(1), of_shunt(2), of_shunt(3)]);
        let own = SocketAddr::from(([10, 0, 0, 1], 2));
        assert_eq!((records.moved, records.miscounted), (2, vec![(own, 1, 2)]));
    }

    #[test]
    fn flows_and_records_are_compared_by_the_clients_address() {
        let text = [
            line(1, "ok"),
            line(2, "ok"),
            line(3, "idle"),
            line(4, "ok"),
            line(4, "ok"),
            line(6, "refused"),
            "{".into(),
        ];
        let flows = [
            done(1, None),
            done(2, Some("reset")),
            done(3, None),
            done(4, None),
            done(5, None),
            done(6, Some("x")),
        ];
        let records = Records::read(&text.concat(), &flows);
        let own = |port: u16| SocketAddr::from(([10, 0, 0, 1], port));
        assert_eq!(records.miscounted, [(own(4), 1, 2), (own(5), 1, 0)]);
        assert_eq!(records.without_reason, [own(2)]);
        assert_eq!(records.misjudged, [(own(3), "idle".to_owned())]);
        assert_eq!((records.unread, records.reasons["ok"]), (1, 4));
    }
}
