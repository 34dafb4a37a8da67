//! What every request of a browser passes: which host and origin it names, whether its session is valid, and the header
//! fields of the answer.

use super::session::Sessions;
use super::{Page, Role, Viewer};
use crate::admin::error::ApiError;
use crate::admin::rebinding;
use crate::admin::socket;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use std::time::SystemTime;

/// Header fields of every answer. The policy allows nothing but our own files: no script, style or image from elsewhere, no
/// inline script, no frame around the page, and no text that becomes markup.
const FIELDS: [(&str, &str); 7] = [
    (
        "content-security-policy",
        "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'; frame-ancestors 'none'; \
         require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=()"),
];

/// Adds the header fields that protect the page. Data are not stored by anybody.
pub(in super::super) async fn protect(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in FIELDS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

/// The host that a request names: its target overrides Host (RFC 9112 Sec. 3.2.2).
pub(super) fn host(request: &Request) -> Option<&str> {
    let field = request.headers().get(header::HOST).map(|host| host.to_str().unwrap_or("?"));
    request.uri().authority().map(|authority| authority.as_str()).or(field)
}

fn text(headers: &HeaderMap, name: impl header::AsHeaderName) -> Option<&str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("?"))
}

/// Rejects what a page of another site makes a browser send: a request with another origin.
fn is_foreign(headers: &HeaderMap, host: &str, method: &Method) -> bool {
    if let Some(origin) = text(headers, header::ORIGIN) {
        let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        return authority.is_none_or(|authority| !authority.eq_ignore_ascii_case(host));
    }
    match text(headers, "sec-fetch-site") {
        None | Some("same-origin" | "none") => false,
        // A link that leads here may be followed: it shows the page, and the cookie stays away.
        Some(_) => *method != Method::GET || text(headers, "sec-fetch-mode") != Some("navigate"),
    }
}

fn other_site() -> Response {
    let help = "open the page itself; a proxy before it must pass on Host and Origin as they are";
    ApiError::forbidden("this request comes from another site", help).into_response()
}

/// Rejects requests that a browser sends for another site to the unix socket, which `ssh -L` may have brought to a TCP port.
pub(in super::super) async fn on_socket(request: Request, next: Next) -> Response {
    let host = host(&request).unwrap_or("").to_owned();
    // A name without a dot belongs to no site of the Internet. Our own client uses `sidetrack`.
    if host.contains('.') && !rebinding::is_ours(&host, &[]) {
        return rebinding::misdirected(&host, "use localhost or an IP address");
    }
    if is_foreign(request.headers(), &host, request.method()) {
        return other_site();
    }
    next.run(request).await
}

/// The name of the session's cookie. Cookies belong to a host and not to a port, so that each port has its own name: `ssh -L`
/// brings several nodes to one host.
pub(super) fn cookie_name(host: &str) -> String {
    match host.rsplit_once(':') {
        Some((_, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => {
            format!("sidetrack-{port}")
        }
        _ => "sidetrack".to_owned(),
    }
}

/// The session's cookie.
pub(super) fn cookie<'a>(headers: &'a HeaderMap, host: &str) -> Option<&'a str> {
    let name = cookie_name(host);
    let lines = headers.get_all(header::COOKIE).into_iter().filter_map(|line| line.to_str().ok());
    let mut pairs = lines.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(other, _)| *other == name).map(|(_, value)| value)
}

fn role(sessions: &Sessions, request: &Request, host: &str) -> Option<Role> {
    sessions.role(cookie(request.headers(), host)?, SystemTime::now())
}

/// What may be asked for without a session: the page's own files, the login, and health.
fn is_open(path: &str) -> bool {
    path == "/" || path.starts_with("/page/") || crate::admin::health::is_open(path)
}

/// Checks host, origin, session and role of a request over TCP.
pub(super) async fn on_tcp(State(page): State<Arc<Page>>, mut request: Request, next: Next) -> Response {
    let host = host(&request).unwrap_or("").to_owned();
    if !rebinding::is_ours(&host, &page.hosts) {
        let help = "use its IP address or localhost, or add the name to `page_hosts` in [admin]";
        return rebinding::misdirected(&host, help);
    }
    if is_foreign(request.headers(), &host, request.method()) {
        return other_site();
    }
    let viewer = request.extensions().get::<ConnectInfo<Viewer>>().map(|ConnectInfo(viewer)| viewer.clone());
    let role = role(&page.sessions, &request, &host);
    if let (Some(_), Some(viewer)) = (role, &viewer) {
        viewer.place.is_known();
    }
    if !is_open(request.uri().path()) {
        let Some(role) = role else {
            return ApiError::unauthorized("you are not logged in", "open / of this address").into_response();
        };
        if role == Role::Read && !matches!(*request.method(), Method::GET | Method::HEAD) {
            let help = "log in with a token of the role `admin`";
            return ApiError::forbidden("this session may only look", help).into_response();
        }
        let from = viewer.map(|viewer| viewer.address);
        request.extensions_mut().insert(ConnectInfo(socket::Client::of_page(from)));
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| ((*name).parse().unwrap(), HeaderValue::from_static(value)))
            .collect()
    }

    #[test]
    fn only_our_own_origin_is_ours() {
        let host = "localhost:9466";
        for (pairs, method, expected) in [
            (&[][..], Method::POST, false),
            (&[("origin", "http://localhost:9466")], Method::POST, false),
            (&[("origin", "https://LOCALHOST:9466")], Method::POST, false),
            (&[("origin", "http://localhost:9467")], Method::GET, true),
            (&[("origin", "http://evil.example")], Method::GET, true),
            (&[("origin", "null")], Method::POST, true),
            (&[("sec-fetch-site", "same-origin")], Method::POST, false),
            (&[("sec-fetch-site", "none")], Method::GET, false),
            (&[("sec-fetch-site", "cross-site")], Method::GET, true),
            (&[("sec-fetch-site", "same-site")], Method::POST, true),
            (&[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")], Method::GET, false),
            (&[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")], Method::POST, true),
        ] {
            assert_eq!(is_foreign(&headers(pairs), host, &method), expected, "{pairs:?} {method}");
        }
    }

    #[test]
    fn each_port_has_its_cookie() {
        let both =
            headers(&[("cookie", "a=1; sidetrack-9466=x.y; sidetrack-80=z"), ("cookie", "sidetrack=w")]);
        assert_eq!(cookie(&both, "localhost:9466"), Some("x.y"));
        assert_eq!(cookie(&both, "[::1]:80"), Some("z"));
        assert_eq!(cookie(&both, "node.example"), Some("w"));
        assert_eq!(cookie(&both, "[::1]"), Some("w"));
        assert_eq!(cookie(&both, "localhost:1"), None);
    }
}
