//! Checks the host name in requests over TCP. A web page can make its own name resolve to our address (DNS
//! rebinding). Its requests then have that name in Host, and are rejected.

use super::error::ApiError;
use axum::extract::{Request, State};
use axum::http::{Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

/// Passes on requests whose host is an address, `localhost`, or one of these names.
pub(super) async fn guard(State(names): State<Arc<[String]>>, request: Request, next: Next) -> Response {
    let field = request.headers().get(header::HOST).map(|host| host.to_str().unwrap_or("?"));
    // In absolute form the target overrides Host (RFC 9112 Sec. 3.2.2).
    let host = request.uri().authority().map(|authority| authority.as_str()).or(field);
    let is_ours = match host {
        Some(host) => is_ours(host, &names),
        None => request.version() < Version::HTTP_11,
    };
    if is_ours {
        return next.run(request).await;
    }
    let help = "use its IP address or localhost, or add the name to `metrics_hosts` in [admin]";
    misdirected(host.unwrap_or_default(), help)
}

/// The refusal of a request for this host.
pub(super) fn misdirected(host: &str, help: &str) -> Response {
    let error = format!("this address is not served under the name \"{}\"", host.escape_debug());
    ApiError::misdirected(error, help).into_response()
}

/// Whether a host is an address, `localhost` or one of these names.
pub(super) fn is_ours(host: &str, names: &[String]) -> bool {
    let host = without_port(host);
    if let Some(inner) = host.strip_prefix('[') {
        return inner.strip_suffix(']').is_some_and(|inner| inner.parse::<Ipv6Addr>().is_ok());
    }
    let host = host.strip_suffix('.').unwrap_or(host);
    let is = |name: &str| host.eq_ignore_ascii_case(name);
    host.parse::<IpAddr>().is_ok() || is("localhost") || names.iter().any(|name| is(name))
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((before, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => before,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_localhost_and_listed_names_are_ours() {
        let names = ["node.example".to_owned()];
        for host in [
            "127.0.0.1",
            "127.0.0.1:9465",
            "192.0.2.1:80",
            "[::1]",
            "[::1]:9465",
            "localhost",
            "LOCALHOST:9465",
            "localhost.:1",
            "node.example",
            "Node.Example:9465",
        ] {
            assert!(is_ours(host, &names), "{host}");
        }
        for host in [
            "",
            ":9465",
            "evil.example",
            "evil.example:9465",
            "localhost.evil.example",
            "evil.localhost.example",
            "other.example",
            "node.example.evil.example",
            "127.0.0.1.evil.example",
            "[evil.example]",
            "[::1",
            "::1x",
            "user@127.0.0.1",
            "127.1",
            "2130706433",
            "0x7f.0.0.1",
        ] {
            assert!(!is_ours(host, &names), "{host}");
        }
    }
}
