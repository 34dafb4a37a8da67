//! Flows as spans, and metrics, at a small HTTP server that reads them with the types of OpenTelemetry.

use super::{ask, denied, metric, server, start, visit};
use crate::node::{Up, admin};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::metrics::v1::{Metric, metric::Data, number_data_point};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use sidetrack::tls::{Made, self_signed};
use sidetrack_testkit::{LIMIT, eventually, in_namespace};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};

/// A request: its path, its head in lower case, its body.
#[derive(Clone, Debug)]
struct Request {
    path: String,
    head: String,
    body: Vec<u8>,
}

/// A collector that keeps all requests, and gives the first ones the answers it was told.
#[derive(Clone)]
struct Collector {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    answers: Arc<Mutex<VecDeque<Vec<u8>>>>,
}

fn answer(status: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

fn request(stream: &mut BufReader<impl Read>) -> Option<Request> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let path = head.split(' ').nth(1)?.to_owned();
    let head = head.to_lowercase();
    let length = head.split("content-length: ").nth(1)?.lines().next()?.parse().ok()?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some(Request { path, head, body })
}

impl Collector {
    /// `answers` are those to the first requests with spans. An empty one: the connection is closed instead.
    fn start(answers: Vec<Vec<u8>>) -> Self {
        Self::start_with(answers, None)
    }

    fn start_with(answers: Vec<Vec<u8>>, tls: Option<Arc<rustls::ServerConfig>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let collector =
            Self { address, requests: Arc::default(), answers: Arc::new(Mutex::new(answers.into())) };
        let shared = collector.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (shared, tls) = (shared.clone(), tls.clone());
                std::thread::spawn(move || match tls {
                    Some(tls) => {
                        let session = rustls::ServerConnection::new(tls).unwrap();
                        shared.serve(rustls::StreamOwned::new(session, stream));
                    }
                    None => shared.serve(stream),
                });
            }
        });
        collector
    }

    fn serve(&self, stream: impl Read + Write) {
        let mut stream = BufReader::new(stream);
        while let Some(request) = request(&mut stream) {
            let is_traces = request.path.ends_with("/v1/traces");
            let next = if is_traces { self.answers.lock().unwrap().pop_front() } else { None };
            let answer = next.unwrap_or_else(|| answer("200 OK", b""));
            self.requests.lock().unwrap().push(request);
            if answer.is_empty() || stream.get_mut().write_all(&answer).is_err() {
                return;
            }
            let _ = stream.get_mut().flush();
        }
    }

    fn of(&self, path: &str) -> Vec<Request> {
        self.requests.lock().unwrap().iter().filter(|one| one.path == path).cloned().collect()
    }

    fn spans(&self, path: &str) -> Vec<Span> {
        let requests = self.of(path).into_iter();
        let all = requests.map(|one| ExportTraceServiceRequest::decode(&one.body[..]).expect("spans"));
        all.flat_map(|all| all.resource_spans)
            .flat_map(|all| all.scope_spans)
            .flat_map(|all| all.spans)
            .collect()
    }

    /// The metrics of the latest request.
    fn metrics(&self) -> Option<BTreeMap<String, Metric>> {
        let latest = self.of("/v1/metrics").pop()?;
        let all = ExportMetricsServiceRequest::decode(&latest.body[..]).expect("metrics");
        let metrics = all.resource_metrics.into_iter().flat_map(|all| all.scope_metrics);
        Some(metrics.flat_map(|all| all.metrics).map(|one| (one.name.clone(), one)).collect())
    }
}

fn to(collector: &Collector, more: &str) -> String {
    format!("[export.otlp]\nendpoint = \"http://{}\"\n{more}\n", collector.address)
}

/// The attributes as text.
fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let shown = |one: &KeyValue| match one.value.clone().and_then(|value| value.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    attributes.iter().map(|one| (one.key.clone(), shown(one))).collect()
}

fn roots(spans: &[Span]) -> Vec<Span> {
    spans.iter().filter(|span| span.parent_span_id.is_empty()).cloned().collect()
}

#[test]
fn flows_are_spans_with_their_steps_below() {
    in_namespace(|| {
        let collector = Collector::start(Vec::new());
        let endpoint = format!("endpoint = \"http://localhost:{}/tenant/\"", collector.address.port());
        let resource = "resource = { \"service.name\" = \"edge\", \"quote\" = \"a\\\"b\" }\nheaders_file = \"@/headers\"";
        let export = format!("[export.otlp]\n{endpoint}\nmetrics = false\n{resource}\n");
        let to = server("127.0.0.1:0");
        let node = super::start_with(to, &export, |folder| {
            std::fs::write(folder.join("headers"), "# a comment\nAuthorization: Bearer Secret\n").unwrap();
        });
        let (web, asked) = (visit(&node, 3000), ask(&node, 700));
        denied(&node);
        let path = "/tenant/v1/traces";
        eventually("three flows", || roots(&collector.spans(path)).len() == 3);
        let spans = collector.spans(path);
        let first = &collector.of(path)[0];
        assert!(first.head.contains("authorization: bearer secret"), "{}", first.head);
        assert!(first.head.contains("content-type: application/x-protobuf"), "{}", first.head);
        assert!(!node.logged().contains("Secret"), "{}", node.logged());
        let all = ExportTraceServiceRequest::decode(&first.body[..]).unwrap();
        let resource = texts(&all.resource_spans[0].resource.as_ref().unwrap().attributes);
        assert_eq!((&resource["service.name"][..], &resource["quote"][..]), ("edge", "a\"b"));
        assert_eq!(resource["service.instance.id"].len(), 32);
        assert_eq!(roots(&spans).iter().map(|one| one.trace_id.clone()).collect::<BTreeSet<_>>().len(), 3);
        let ids: BTreeSet<_> = spans.iter().map(|one| one.span_id.clone()).collect();
        assert_eq!(ids.len(), spans.len(), "each span has its own id");
        assert!(spans.iter().all(|one| one.trace_id.len() == 16 && one.span_id.len() == 8));
        flow_of_tcp(&spans, web, to);
        let udp =
            roots(&spans).into_iter().find(|one| texts(&one.attributes)["client.port"] == asked.to_string());
        let udp = udp.expect("the flow of UDP");
        assert_eq!((&udp.name[..], udp.status.is_none()), ("udp flow", true), "{udp:#?}");
        let rest = roots(&spans).into_iter().find(|one| one.status.is_some()).expect("the denied one");
        assert_eq!(texts(&rest.attributes)["error.type"], "policy_denied");
    });
}

fn flow_of_tcp(spans: &[Span], client: u16, server: SocketAddr) {
    let root =
        roots(spans).into_iter().find(|one| texts(&one.attributes)["client.port"] == client.to_string());
    let root = root.expect("the flow of TCP");
    let about = texts(&root.attributes);
    for (key, value) in [
        ("network.transport", "tcp"),
        ("network.type", "ipv4"),
        ("client.address", "127.0.0.1"),
        ("server.address", "127.0.0.1"),
        ("server.port", &server.port().to_string()),
        ("network.peer.port", &server.port().to_string()),
        ("sidetrack.rule", "all"),
        ("sidetrack.carrier", "direct"),
        ("sidetrack.bytes_up", "3000"),
        ("sidetrack.reason", "ok"),
    ] {
        assert_eq!(about.get(key).map(String::as_str), Some(value), "{key} of {about:#?}");
    }
    assert!(!about.contains_key("error.type") && root.status.is_none(), "{root:#?}");
    let below: Vec<_> = spans.iter().filter(|one| one.parent_span_id == root.span_id).collect();
    let names: Vec<_> = below.iter().map(|one| &one.name[..]).collect();
    assert_eq!(names, ["policy", "connect", "first byte"], "{below:#?}");
    for span in below {
        assert_eq!(span.trace_id, root.trace_id);
        let (from, until) = (span.start_time_unix_nano, span.end_time_unix_nano);
        assert!(
            root.start_time_unix_nano <= from && from <= until && until <= root.end_time_unix_nano,
            "{span:#?}"
        );
    }
    assert!(root.events.iter().any(|event| event.name == "ready"), "{root:#?}");
}

/// The sum of a counter over all of its points.
fn counter(metrics: &BTreeMap<String, Metric>, name: &str) -> i64 {
    let Some(Data::Sum(sum)) = metrics.get(name).and_then(|metric| metric.data.as_ref()) else { return 0 };
    assert!(sum.is_monotonic && sum.aggregation_temporality == 2, "cumulative: {sum:?}");
    let value = |value: Option<number_data_point::Value>| match value {
        Some(number_data_point::Value::AsInt(number)) => number,
        other => panic!("{name}: {other:?}"),
    };
    sum.data_points
        .iter()
        .inspect(|point| {
            assert!(0 < point.start_time_unix_nano && point.start_time_unix_nano <= point.time_unix_nano)
        })
        .map(|point| value(point.value))
        .sum()
}

#[test]
fn metrics_are_those_of_the_admin_interface() {
    in_namespace(|| {
        let collector = Collector::start(Vec::new());
        let node = start(server("127.0.0.1:0"), &to(&collector, "traces = false\ninterval_ms = 1000"));
        visit(&node, 10);
        visit(&node, 20);
        eventually("both flows are counted", || {
            collector.metrics().is_some_and(|metrics| counter(&metrics, "sidetrack_flows") == 2)
        });
        let metrics = collector.metrics().unwrap();
        let shown = admin::show(&node, "/metrics");
        let shown: BTreeSet<_> =
            shown.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        let has = |name: &&str| metrics.contains_key(*name) || metrics.contains_key(&format!("{name}_info"));
        // A family without a line has nothing to send.
        let missing: Vec<_> = shown.iter().filter(|name| !has(name)).collect();
        assert!(metrics.len() > 25 && missing.len() < shown.len() / 2, "missing: {missing:?}");
        let Some(Data::Histogram(histogram)) = &metrics["sidetrack_connect_seconds"].data else {
            panic!("a histogram")
        };
        let point = &histogram.data_points[0];
        assert_eq!((point.count, point.bucket_counts.iter().sum()), (2, 2), "{point:?}");
        assert_eq!(point.explicit_bounds.len() + 1, point.bucket_counts.len());
        assert!(point.sum.is_some_and(|sum| sum > 0.0));
        assert_eq!(metrics["sidetrack_connect_seconds"].unit, "s");
        let Some(Data::Gauge(gauge)) = &metrics["process_start_time_seconds"].data else { panic!("a gauge") };
        assert!(
            matches!(gauge.data_points[0].value, Some(number_data_point::Value::AsDouble(at)) if at > 1.7e9)
        );
        assert!(collector.of("/v1/traces").is_empty());
    });
}

fn otlp(node: &Up, name: &str) -> u64 {
    metric(node, &format!("sidetrack_export_{name}"))
}

#[test]
fn answers_of_a_collector_decide_what_is_sent_again() {
    in_namespace(|| {
        let partial =
            ExportTracePartialSuccess { rejected_spans: 1, error_message: "no \u{1b}[31mroom".into() };
        let partial = ExportTraceServiceResponse { partial_success: Some(partial) }.encode_to_vec();
        let later = b"HTTP/1.1 503 No\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n".to_vec();
        let collector = Collector::start(vec![
            later,
            // The connection is closed without an answer.
            Vec::new(),
            answer("429 Slow", b"x"),
            answer("200 OK", b"\xff\xff nonsense"),
            answer("400 Bad", b"<html>"),
            answer("200 OK", &partial),
        ]);
        let mut node = start(server("127.0.0.1:0"), &to(&collector, "metrics = false"));
        visit(&node, 10);
        eventually("the first flow is taken", || otlp(&node, "reports_total{to=\"otlp\"}") == 1);
        let bodies: Vec<_> = collector.of("/v1/traces").into_iter().map(|one| one.body).collect();
        assert_eq!(bodies.len(), 4);
        assert!(bodies.iter().all(|body| *body == bodies[0]), "the same request again");
        visit(&node, 20);
        let refused = "dropped_reports_total{to=\"otlp\",reason=\"refused\"}";
        eventually("the second is refused", || otlp(&node, refused) == 1);
        visit(&node, 30);
        eventually("so is the third", || otlp(&node, refused) == 2);
        visit(&node, 40);
        eventually("the fourth is taken", || otlp(&node, "reports_total{to=\"otlp\"}") == 2);
        assert_eq!(collector.of("/v1/traces").len(), 7);
        let log = node.log_so_far();
        assert!(log.contains("status 503") && !log.contains('\u{1b}'), "{log}");
        // What waits at the end is sent.
        visit(&node, 50);
        let (status, _) = node.stop();
        assert!(status.success(), "{status}");
        let last = roots(&collector.spans("/v1/traces")).pop().expect("a flow");
        assert_eq!(texts(&last.attributes)["sidetrack.bytes_up"], "50");
    });
}

#[test]
fn a_collector_that_answers_nothing_slows_no_flow() {
    in_namespace(|| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("[export.otlp]\nendpoint = \"http://{}\"\n", listener.local_addr().unwrap());
        let mut node = start(server("127.0.0.1:0"), &endpoint);
        for _ in 0..20 {
            visit(&node, 100);
            assert_eq!(node.record().text("reason"), "ok");
        }
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        assert!(stream.read(&mut [0; 16]).unwrap() > 0, "a request came");
        let (status, _) = node.stop();
        assert!(status.success(), "{status}");
    });
}

/// A server's settings with this certificate.
fn secured(made: &Made) -> Arc<rustls::ServerConfig> {
    let certificate = CertificateDer::from_pem_slice(made.certificate_pem.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(made.key_pem.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Arc::new(config.unwrap().with_no_client_auth().with_single_cert(vec![certificate], key).unwrap())
}

#[test]
fn a_collector_behind_tls_must_have_the_right_certificate() {
    in_namespace(|| {
        let [ours, other] = [0, 1].map(|_| self_signed("localhost", 30).unwrap());
        let export = |made: &Made| {
            let collector = Collector::start_with(Vec::new(), Some(secured(made)));
            let port = collector.address.port();
            let text = format!(
                "[export.otlp]\nendpoint = \"https://localhost:{port}\"\nca = \"@/ca.pem\"\nmetrics = false\n"
            );
            let pem = ours.certificate_pem.clone();
            let node = super::start_with(server("127.0.0.1:0"), &text, |folder| {
                std::fs::write(folder.join("ca.pem"), pem).unwrap();
            });
            visit(&node, 10);
            (collector, node)
        };
        let (collector, _node) = export(&ours);
        eventually("the flow comes", || roots(&collector.spans("/v1/traces")).len() == 1);
        let (collector, mut node) = export(&other);
        let why = node.log_line("why", |line| line.contains("cannot send reports of flows"));
        assert!(why.contains("certificate"), "{why}");
        assert!(collector.of("/v1/traces").is_empty());
    });
}
