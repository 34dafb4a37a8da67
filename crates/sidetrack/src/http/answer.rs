//! Responses that we make ourselves: error and block pages, the request for a password, the PAC file, and TRACE and
//! OPTIONS requests that end here. None of them is ever cached.

use super::Proxy;
use crate::carry::Failure;
use crate::session::Refusals;
use sidetrack_core::flow::{Destination, EndReason};
use sidetrack_core::http::cache::format_date;
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::message::{MessageError, Method, Request, Response, reason_phrase};
use std::net::SocketAddr;

/// A response of our own, and the reason for it.
#[derive(Debug)]
pub(super) struct Answer {
    /// Head.
    pub head: Response,
    /// Content.
    pub content: Vec<u8>,
    /// The end reason in the record.
    pub reason: EndReason,
    /// The same in words.
    pub detail: Option<String>,
    /// The connection must be closed: it is unknown where its next message begins.
    pub closes: bool,
}

impl Answer {
    fn new(status: u16, kind: &str, content: Vec<u8>) -> Self {
        let mut fields = Fields::new();
        fields.push("Date", format_date(super::now_s()));
        fields.push("Content-Type", kind);
        fields.push("Cache-Control", "no-store");
        let head = Response::new(status, fields);
        Self { head, content, reason: EndReason::Ok, detail: None, closes: false }
    }

    /// A page for a person: what happened, where, and what to do. `error` is the Proxy-Status error (RFC 9209).
    fn page(proxy: &Proxy, status: u16, error: &str, (title, text): (&str, &str)) -> Self {
        let phrase = reason_phrase(status);
        let content = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{status} {phrase}</title></head>\n\
             <body><h1>{}</h1>\n<p>{}</p>\n<hr><p>Sidetrack ({})</p></body></html>\n",
            escaped(title),
            escaped(text),
            proxy.pseudonym
        );
        let mut answer = Self::new(status, "text/html; charset=utf-8", content.into_bytes());
        answer.head.fields.push("Proxy-Status", format!("{}; error={error}", proxy.pseudonym));
        answer
    }

    /// The request is malformed, so nothing that follows on the connection can be parsed.
    pub(super) fn broken(proxy: &Proxy, error: MessageError) -> Self {
        let mut answer = Self::page(
            proxy,
            error.status(),
            "http_request_error",
            ("Bad Request!", &format!("The request was refused: {error}.")),
        );
        answer.reason = EndReason::BadRequest;
        answer.detail = Some(error.to_string());
        answer.closes = true;
        answer
    }

    /// The request is valid, but we do not serve it.
    pub(super) fn refused(proxy: &Proxy, status: u16, reason: EndReason, why: &str) -> Self {
        let mut answer =
            Self::page(proxy, status, "http_request_error", (reason_phrase(status), &format!("{why}.")));
        answer.reason = reason;
        answer.detail = Some(why.to_owned());
        answer
    }

    /// A rule or the default action denies the request.
    pub(super) fn denied(proxy: &Proxy, what: &str, why: &str) -> Self {
        let text = format!("This proxy does not let you reach {what}: {why}.");
        let mut answer =
            Self::page(proxy, 403, "http_request_denied", ("This request has been blocked", &text));
        answer.reason = EndReason::PolicyDenied;
        answer.detail = Some(why.to_owned());
        answer
    }

    /// The request has the placeholder of a secret that its server does not get.
    pub(super) fn misplaced(proxy: &Proxy, why: &str) -> Self {
        let mut answer = Self::refused(proxy, 403, EndReason::SecretRefused, why);
        // More of it may be on its way.
        answer.closes = true;
        answer
    }

    /// The server could not be reached, or did not answer as HTTP.
    pub(super) fn failed(proxy: &Proxy, what: &str, failure: &Failure) -> Self {
        let (status, error) = status_of(failure.reason);
        let text = format!("{what} could not be had: {}.", failure.detail);
        let mut answer = Self::page(proxy, status, error, (reason_phrase(status), &text));
        answer.reason = failure.reason;
        answer.detail = Some(failure.detail.clone());
        answer
    }

    /// No usable response is stored, and the client accepts only a stored one.
    pub(super) fn not_cached(proxy: &Proxy) -> Self {
        let text = "The request asks for a stored response (only-if-cached), and there is none";
        let mut answer = Self::refused(proxy, 504, EndReason::Ok, text);
        answer.head.fields.push("Cache-Status", format!("{}; detail=only-if-cached", proxy.pseudonym));
        answer
    }

    /// The responses stored under a URL were removed, or there were none.
    pub(super) fn purged(proxy: &Proxy, was_there: bool) -> Self {
        if was_there {
            return Self::new(200, "text/plain", b"purged\n".to_vec());
        }
        Self::refused(proxy, 404, EndReason::Ok, "Nothing is stored under this URL")
    }

    /// A password is needed (RFC 9110 Sec. 11.7.1).
    pub(super) fn challenge(proxy: &Proxy, why: &str) -> Self {
        let mut answer = Self::refused(proxy, 407, EndReason::AuthFailed, why);
        answer.head.fields.push("Proxy-Authenticate", "Basic realm=\"sidetrack\", charset=\"UTF-8\"");
        answer
    }

    /// The proxy auto-configuration file: everything but this host's own names goes through us, so that the rules
    /// apply to it.
    pub(super) fn pac(own: SocketAddr) -> Self {
        let text = format!(
            "function FindProxyForURL(url, host) {{\n  if (isPlainHostName(host) || host == \"127.0.0.1\" || host == \
             \"[::1]\") return \"DIRECT\";\n  return \"PROXY {own}\";\n}}\n"
        );
        Self::new(200, "application/x-ns-proxy-autoconfig", text.into_bytes())
    }

    /// A TRACE or OPTIONS request that ends here (Max-Forwards: 0, or `OPTIONS *`).
    pub(super) fn here(request: &Request) -> Self {
        if request.method != Method::Trace {
            let mut answer = Self::new(200, "text/plain", Vec::new());
            answer.head.fields.push("Allow", "GET, HEAD, POST, PUT, DELETE, PATCH, OPTIONS, TRACE, CONNECT");
            return answer;
        }
        // Possible secrets are not sent back (RFC 9110 Sec. 9.3.8).
        let mut echo = request.clone();
        for secret in ["authorization", "cookie", "proxy-authorization"] {
            echo.fields.remove(secret);
        }
        let mut content = Vec::new();
        echo.write_to(&mut content);
        Self::new(200, "message/http", content)
    }
}

impl Refusals for Proxy {
    fn page(&self, destination: &Destination, failure: &Failure) -> Vec<u8> {
        let what = destination.to_string();
        let mut answer = match failure.reason {
            EndReason::PolicyDenied => Answer::denied(self, &what, &failure.detail),
            _ => Answer::failed(self, &what, failure),
        };
        answer.head.fields.push("Content-Length", answer.content.len().to_string());
        answer.head.fields.push("Connection", "close");
        let mut out = Vec::new();
        answer.head.write_to(&mut out);
        out.extend_from_slice(&answer.content);
        out
    }
}

/// Maps an end reason to a status and a Proxy-Status error (RFC 9209 Sec. 2.3).
const fn status_of(reason: EndReason) -> (u16, &'static str) {
    match reason {
        // The rules allowed the name but deny the address that it resolved to.
        EndReason::PolicyDenied => (403, "destination_ip_prohibited"),
        EndReason::FunctionRefused => (403, "http_request_denied"),
        EndReason::FunctionFailed => (502, "proxy_internal_error"),
        EndReason::Certificate => (502, "tls_certificate_error"),
        EndReason::TlsFailed => (502, "tls_protocol_error"),
        EndReason::Refused => (502, "connection_refused"),
        EndReason::Unreachable => (502, "destination_ip_unroutable"),
        EndReason::ConnectTimeout => (504, "connection_timeout"),
        EndReason::Dns => (502, "dns_error"),
        EndReason::Loop => (502, "proxy_loop_detected"),
        EndReason::Limit => (503, "connection_limit_reached"),
        EndReason::Idle | EndReason::Lifetime => (504, "http_response_timeout"),
        EndReason::ServerReset => (502, "connection_terminated"),
        EndReason::Killed | EndReason::Shutdown => (503, "proxy_internal_response"),
        EndReason::Internal => (500, "proxy_internal_error"),
        _ => (502, "http_protocol_error"),
    }
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
