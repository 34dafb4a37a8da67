//! Metrics of the resolver.

use super::{Metrics, ReasonLabel, raise};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransportLabel {
    transport: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabel {
    source: &'static str,
}

/// What the resolver of a node has done since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DnsCounts {
    /// Queries by their transport.
    pub queries: Vec<(&'static str, u64)>,
    /// Answers by where they came from.
    pub answers: Vec<(&'static str, u64)>,
    /// Queries and connections without an answer, by the reason.
    pub unanswered: Vec<(&'static str, u64)>,
    /// Names that have an address now.
    pub names: u64,
    /// Answers of name servers that are kept now.
    pub kept: u64,
}

/// What is counted about the resolver.
#[derive(Default)]
pub(super) struct DnsMetrics {
    queries: Family<TransportLabel, Counter>,
    answers: Family<SourceLabel, Counter>,
    unanswered: Family<ReasonLabel, Counter>,
    names: Gauge,
    kept: Gauge,
}

impl DnsMetrics {
    pub(super) fn register(&self, to: &mut Registry) {
        to.register("dns_queries", "Queries to the resolver", self.queries.clone());
        to.register("dns_answers", "Answers of the resolver, by where they came from", self.answers.clone());
        to.register(
            "dns_unanswered",
            "Queries and connections to the resolver without an answer",
            self.unanswered.clone(),
        );
        to.register("dns_names", "Names that an address represents now", self.names.clone());
        to.register("dns_kept", "Answers of name servers that are kept now", self.kept.clone());
    }
}

impl Metrics {
    /// Takes over what the resolver has done.
    pub fn read_dns(&self, counts: &DnsCounts) {
        let DnsMetrics { queries, answers, unanswered, names, kept } = &self.dns;
        for (transport, total) in &counts.queries {
            raise(&queries.get_or_create_owned(&TransportLabel { transport }), *total);
        }
        for (source, total) in &counts.answers {
            raise(&answers.get_or_create_owned(&SourceLabel { source }), *total);
        }
        for (reason, total) in &counts.unanswered {
            raise(&unanswered.get_or_create_owned(&ReasonLabel { reason }), *total);
        }
        names.set(counts.names.cast_signed());
        kept.set(counts.kept.cast_signed());
    }
}
