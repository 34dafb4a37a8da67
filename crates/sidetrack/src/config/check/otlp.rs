//! `[export.otlp]`.

use super::super::{At, Otlp, raw};
use super::Check;
use crate::tls::Roots;
use http::{HeaderName, HeaderValue, Uri};
use sidetrack_core::flow::Destination;
use std::sync::Arc;
use std::time::Duration;

/// The port of OTLP over HTTP.
const PORT: u16 = 4318;
/// Default of `interval_ms`.
const INTERVAL_MS: u64 = 60_000;

impl Check<'_> {
    /// Checks a collector of OpenTelemetry.
    pub(super) fn otlp(&mut self, raw: &At<raw::Otlp>) -> Option<Otlp> {
        let Some(endpoint) = &raw.endpoint else {
            let help = "write `endpoint = \"http://192.0.2.1:4318\"`";
            self.error(raw.span(), "[export.otlp] has no `endpoint`", help);
            return None;
        };
        let interval = self.number(raw.interval_ms.as_ref(), 1000..=3_600_000, " milliseconds");
        let headers = raw.headers_file.as_ref().map(|file| self.headers(file)).unwrap_or_default();
        let ca_pem = raw.ca.as_ref().and_then(|file| self.authorities(file));
        let (traces, metrics) = (raw.traces.unwrap_or(true), raw.metrics.unwrap_or(true));
        if !traces && !metrics {
            let help = "take the table out, or one of `traces = false` and `metrics = false`";
            self.error(raw.span(), "[export.otlp] sends neither traces nor metrics", help);
        }
        let (collector, secure, prefix) = self.endpoint(endpoint)?;
        if let Some(ca) = raw.ca.as_ref().filter(|_| !secure) {
            self.error(ca.span(), "`ca` without TLS", "write `endpoint = \"https://…\"`, or take `ca` out");
        }
        Some(Otlp {
            collector,
            secure,
            prefix,
            headers,
            ca_pem,
            interval: Duration::from_millis(interval.unwrap_or(INTERVAL_MS)),
            traces,
            metrics,
            resource: raw
                .resource
                .iter()
                .map(|(key, value)| (key.clone(), value.as_str().to_owned()))
                .collect(),
        })
    }

    /// Reads the address of a collector: where it is, whether by TLS, and the path before its own.
    fn endpoint(&mut self, at: &At<String>) -> Option<(Destination, bool, String)> {
        let uri = at.parse::<Uri>().ok().filter(|uri| uri.query().is_none() && !at.contains(['@', '#']));
        let parts = uri.as_ref().and_then(|uri| Some((uri.scheme_str()?, uri.host()?)));
        let secure = parts.map(|(scheme, _)| scheme).and_then(|scheme| match scheme {
            "http" => Some(false),
            "https" => Some(true),
            _ => None,
        });
        let port = uri.as_ref().and_then(Uri::port_u16).unwrap_or(PORT);
        let collector = parts.and_then(|(_, host)| format!("{host}:{port}").parse().ok());
        let found = secure.zip(collector);
        if found.is_none() {
            let help = "write \"http://host:4318\" or \"https://host:4318\", with a path before /v1/traces if it has one";
            self.error(at.span(), "this is not the address of a collector", help);
        }
        let (secure, collector) = found?;
        let path = uri.as_ref().map_or("", Uri::path).trim_end_matches('/');
        Some((collector, secure, path.to_owned()))
    }

    /// Reads a file with the fields of each request. No message repeats a line: it is secret.
    fn headers(&mut self, file: &At<String>) -> Vec<(HeaderName, HeaderValue)> {
        let lines = self.secret_lines(file, file.span()).unwrap_or_default();
        let mut headers = Vec::new();
        for (number, line) in lines.iter().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let field = line.split_once(':').and_then(|(name, value)| {
                Some((name.parse::<HeaderName>().ok()?, HeaderValue::from_str(value.trim()).ok()?))
            });
            match field {
                Some((name, mut value)) => {
                    value.set_sensitive(true);
                    headers.push((name, value));
                }
                None => {
                    let help = "write a line such as `Authorization: Bearer TOKEN` for each field";
                    let message = format!("line {} of '{}' is not a field", number + 1, file.as_str());
                    self.error(file.span(), message, help);
                }
            }
        }
        headers
    }

    fn authorities(&mut self, file: &At<String>) -> Option<Arc<str>> {
        let read = self
            .surroundings
            .secret_file(file)
            .map_err(|error| format!("cannot read '{}': {error}", file.as_str()));
        let read = read.and_then(|read| match Roots::of(&read.text) {
            Ok(_) => Ok(read.text.into()),
            Err(error) => Err(format!("'{}': {error}", file.as_str())),
        });
        read.map_err(|message| {
            let help = "`ca` names a file with certificates in PEM; a relative path starts from the folder of this file";
            self.error(file.span(), message, help);
        })
        .ok()
    }
}
