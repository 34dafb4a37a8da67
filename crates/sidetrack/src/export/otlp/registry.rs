//! The metrics of `/metrics` in the form of OTLP. Their text is what is read, so that both always say the same
//! (OpenMetrics 1.0, and the specification "Prometheus and OpenMetrics Compatibility" of OpenTelemetry).

use super::text;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, Sum,
};

/// One line with a value.
#[derive(Debug, PartialEq)]
struct Sample<'t> {
    name: &'t str,
    labels: Vec<(&'t str, String)>,
    value: &'t str,
}

/// Reads a line such as `name{a="b",le="0.5"} 3`. `None`: it is not one.
fn sample(line: &str) -> Option<Sample<'_>> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (key, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.push((key, value));
            rest = after.strip_prefix(',').unwrap_or(after);
        }
        rest = rest.get(1..)?;
    }
    Some(Sample { name, labels, value: rest.split_whitespace().next()? })
}

/// Reads a value up to its closing quote. Returns it, and what follows the quote.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, text.get(at + 1..)?)),
            '\\' => value.push(match letters.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            other => value.push(other),
        }
    }
    None
}

/// The times of all points: nanoseconds since 1970.
#[derive(Clone, Copy)]
struct Times {
    start: u64,
    now: u64,
}

fn attributes(labels: &[(&str, String)]) -> Vec<KeyValue> {
    labels.iter().filter(|(key, _)| *key != "le").map(|(key, value)| text(key, value.clone())).collect()
}

/// A metric whose lines are being read.
#[derive(Default)]
struct Family<'t> {
    name: &'t str,
    kind: &'t str,
    help: &'t str,
    samples: Vec<Sample<'t>>,
}

impl Family<'_> {
    fn points(&self, times: Times) -> Vec<NumberDataPoint> {
        let value = |text: &str| match text.parse() {
            Ok(whole) => Some(Value::AsInt(whole)),
            Err(_) => text.parse().ok().map(Value::AsDouble),
        };
        let point = |sample: &Sample<'_>| NumberDataPoint {
            attributes: attributes(&sample.labels),
            start_time_unix_nano: times.start,
            time_unix_nano: times.now,
            value: value(sample.value),
            ..NumberDataPoint::default()
        };
        self.samples.iter().map(point).collect()
    }

    /// The points of a histogram: buckets of the text count all that are smaller, those of OTLP do not.
    fn histograms(&self, times: Times) -> Vec<HistogramDataPoint> {
        let mut points: Vec<HistogramDataPoint> = Vec::new();
        for sample in &self.samples {
            let attributes = attributes(&sample.labels);
            let at = points.iter().position(|point| point.attributes == attributes).unwrap_or_else(|| {
                let (start_time_unix_nano, time_unix_nano) = (times.start, times.now);
                points.push(HistogramDataPoint {
                    attributes,
                    start_time_unix_nano,
                    time_unix_nano,
                    ..Default::default()
                });
                points.len() - 1
            });
            let (Some(point), Some(part)) = (points.get_mut(at), sample.name.strip_prefix(self.name)) else {
                continue;
            };
            match part {
                "_sum" => point.sum = sample.value.parse().ok(),
                "_count" => point.count = sample.value.parse().unwrap_or(0),
                "_bucket" => {
                    let below: u64 = point.bucket_counts.iter().sum();
                    let all = sample.value.parse().unwrap_or(below);
                    point.bucket_counts.push(all.saturating_sub(below));
                    let bound = sample.labels.iter().find(|(key, _)| *key == "le");
                    let bound = bound.and_then(|(_, bound)| bound.parse().ok());
                    point.explicit_bounds.extend(bound.filter(|bound: &f64| bound.is_finite()));
                }
                _ => {}
            }
        }
        points
    }

    fn metric(&self, times: Times) -> Option<Metric> {
        let cumulative = AggregationTemporality::Cumulative.into();
        let data = match self.kind {
            _ if self.samples.is_empty() => return None,
            "counter" => Data::Sum(Sum {
                data_points: self.points(times),
                aggregation_temporality: cumulative,
                is_monotonic: true,
            }),
            "histogram" => Data::Histogram(Histogram {
                data_points: self.histograms(times),
                aggregation_temporality: cumulative,
            }),
            _ => Data::Gauge(Gauge { data_points: self.points(times) }),
        };
        let unit = match self.name {
            name if name.ends_with("_seconds") => "s",
            name if name.ends_with("_bytes") => "By",
            _ => "",
        };
        // The text has the word in the names of the lines only.
        let suffix = if self.kind == "info" { "_info" } else { "" };
        Some(Metric {
            name: format!("{}{suffix}", self.name),
            description: self.help.trim_end_matches('.').to_owned(),
            unit: unit.to_owned(),
            data: Some(data),
            ..Metric::default()
        })
    }
}

/// Returns the metrics of a text. `start` is when counting began, nanoseconds since 1970.
pub(super) fn metrics(text: &str, start: u64, now: u64) -> Vec<Metric> {
    let (times, mut all, mut family) = (Times { start, now }, Vec::new(), Family::default());
    for line in text.lines() {
        let Some(comment) = line.strip_prefix("# ") else {
            family.samples.extend(sample(line));
            continue;
        };
        let mut words = comment.splitn(3, ' ');
        let (Some(what), Some(name)) = (words.next(), words.next()) else { continue };
        if name != family.name {
            all.extend(std::mem::take(&mut family).metric(times));
            family.name = name;
        }
        match what {
            "TYPE" => family.kind = words.next().unwrap_or_default(),
            "HELP" => family.help = words.next().unwrap_or_default(),
            _ => {}
        }
    }
    all.extend(family.metric(times));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::otlp::nanos;
    use std::time::{Duration, UNIX_EPOCH};

    const TEXT: &str = r#"# HELP flows Flows that ended.
# TYPE flows counter
flows_total{rule="a\"b\\c\nd, e=\"f}",reason="ok"} 3
flows_total{rule="",reason="idle"} 18446744073709551615
# HELP wait_seconds Waits.
# TYPE wait_seconds histogram
wait_seconds_sum 1.5
wait_seconds_count 6
wait_seconds_bucket{le="0.5"} 2
wait_seconds_bucket{le="1.0"} 5
wait_seconds_bucket{le="+Inf"} 6
# HELP build This build.
# TYPE build info
build_info{version="0.1.0"} 1
# HELP empty Nothing.
# TYPE empty gauge
nonsense{a="
{
# EOF
"#;

    #[test]
    fn a_text_becomes_metrics() {
        let all = metrics(TEXT, 7, nanos(UNIX_EPOCH + Duration::from_nanos(9)));
        let names: Vec<_> =
            all.iter().map(|one| (&one.name[..], &one.description[..], &one.unit[..])).collect();
        assert_eq!(
            names,
            [
                ("flows", "Flows that ended", ""),
                ("wait_seconds", "Waits", "s"),
                ("build_info", "This build", "")
            ]
        );
        let Some(Data::Sum(sum)) = &all[0].data else { panic!("{:?}", all[0]) };
        let [one, other] = &sum.data_points[..] else { panic!("{sum:?}") };
        assert_eq!(one.attributes, [text("rule", "a\"b\\c\nd, e=\"f}"), text("reason", "ok")]);
        assert_eq!((one.value, one.start_time_unix_nano, one.time_unix_nano), (Some(Value::AsInt(3)), 7, 9));
        assert_eq!(other.value, Some(Value::AsDouble(u64::MAX as f64)));
        let Some(Data::Histogram(histogram)) = &all[1].data else { panic!("{:?}", all[1]) };
        let [point] = &histogram.data_points[..] else { panic!("{histogram:?}") };
        assert_eq!((&point.bucket_counts[..], &point.explicit_bounds[..]), (&[2, 3, 1][..], &[0.5, 1.0][..]));
        assert_eq!((point.count, point.sum), (6, Some(1.5)));
    }
}
