//! The page: its files, and the admin interface for browsers on a TCP address, behind a login.
//!
//! On the unix socket the page needs no login: who may open the socket may do everything. A browser reaches the socket by
//! `ssh -L`; then its requests are checked as those on TCP are, so that no other site uses it.

mod assets;
mod attempts;
mod guard;
mod session;
mod tokens;

pub(super) use assets::{file, index};
pub(super) use guard::{on_socket, protect};
pub use tokens::{Tokens, TokensError};

use super::capped::{Bounds, Capped, CappedStream, Place};
use super::error::ApiError;
use super::{AdminState, router, told, until_stopped};
use attempts::Attempts;
use axum::extract::connect_info::Connected;
use axum::extract::rejection::JsonRejection;
use axum::extract::{ConnectInfo, Json, Request};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::IncomingStream;
use axum::{Extension, Router};
use serde::{Deserialize, Serialize};
use session::Sessions;
use sidetrack_sys::sync::lock;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch;

/// Connections at a time without a session, and how long each may last.
const STRANGERS: Bounds = Bounds { most: 64, time: Duration::from_secs(30), what: "the page" };

/// What a session may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Everything that the admin interface does.
    Admin,
    /// Looking: GET requests.
    Read,
}

impl Role {
    fn parse(word: &str) -> Option<Self> {
        match word {
            "admin" => Some(Self::Admin),
            "read" => Some(Self::Read),
            _ => None,
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Read => "read",
        }
    }
}

/// What the routes of the page share.
struct Page {
    sessions: Sessions,
    attempts: Mutex<Attempts>,
    /// Host names of the page, besides addresses and `localhost`.
    hosts: Arc<[String]>,
}

/// A browser's connection.
#[derive(Clone)]
pub(super) struct Viewer {
    address: SocketAddr,
    place: Place,
}

impl Connected<IncomingStream<'_, Capped>> for Viewer {
    fn connect_info(stream: IncomingStream<'_, Capped>) -> Self {
        let io: &CappedStream = stream.io();
        Self { address: *stream.remote_addr(), place: io.place() }
    }
}

/// The answer of `/page/session`.
#[derive(Serialize)]
struct Session {
    /// `null`: not logged in.
    role: Option<Role>,
    /// Whether there is a login.
    has_login: bool,
}

#[derive(Deserialize)]
struct Login {
    token: String,
}

/// The session on the unix socket.
pub(super) async fn session_of_socket() -> impl IntoResponse {
    Json(Session { role: Some(Role::Admin), has_login: false })
}

async fn session(Extension(page): Extension<Arc<Page>>, request: Request) -> Response {
    let host = guard::host(&request).unwrap_or("");
    let cookie = guard::cookie(request.headers(), host);
    let role = cookie.and_then(|cookie| page.sessions.role(cookie, SystemTime::now()));
    Json(Session { role, has_login: true }).into_response()
}

/// The cookie as header field. `Secure` if the browser came over TLS, which its origin says.
fn set_cookie(headers: &HeaderMap, host: &str, value: &str, lasts: Duration) -> String {
    let is_tls = headers.get(header::ORIGIN).is_some_and(|origin| origin.as_bytes().starts_with(b"https://"));
    format!(
        "{}={value}; Path=/; Max-Age={}; HttpOnly; SameSite=Strict{}",
        guard::cookie_name(host),
        lasts.as_secs(),
        if is_tls { "; Secure" } else { "" }
    )
}

async fn log_in(
    Extension(page): Extension<Arc<Page>>,
    ConnectInfo(viewer): ConnectInfo<Viewer>,
    headers: HeaderMap,
    login: Result<Json<Login>, JsonRejection>,
) -> Response {
    let login = match login {
        Ok(Json(login)) => login,
        Err(rejection) => {
            let help = "send {\"token\": \"...\"} as application/json";
            let refusal = ApiError::unreadable(rejection.status(), rejection.body_text(), help);
            return refusal.into_response();
        }
    };
    let address = viewer.address.ip();
    let wait = lock(&page.attempts).wait(address, Instant::now());
    if !wait.is_zero() {
        let seconds = wait.as_secs() + 1;
        let help = format!("wait {seconds} s");
        let refusal = ApiError::too_many("too many logins have failed from your address", help);
        return ([(header::RETRY_AFTER, seconds.to_string())], refusal).into_response();
    }
    let Some(role) = page.sessions.role_of(&login.token) else {
        let failures = lock(&page.attempts).failed(address, Instant::now());
        // One line for each doubling: an attacker does not fill the log.
        if failures.is_power_of_two() {
            tracing::warn!(%address, failures, "a login to the page failed: the token is wrong");
        }
        let help = "the log of `sidetrack up` says at its start which file has the tokens";
        return ApiError::unauthorized("this token is wrong", help).into_response();
    };
    lock(&page.attempts).succeeded(address);
    tracing::info!(%address, role = role.as_str(), "logged in to the page");
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("");
    match page.sessions.open(role, SystemTime::now()) {
        Ok(value) => {
            let cookie = set_cookie(&headers, host, &value, session::LASTS);
            ([(header::SET_COOKIE, cookie)], Json(Session { role: Some(role), has_login: true }))
                .into_response()
        }
        Err(error) => ApiError::internal(error.to_string()).into_response(),
    }
}

async fn log_out(Extension(page): Extension<Arc<Page>>, headers: HeaderMap) -> Response {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("");
    if let Some(cookie) = guard::cookie(&headers, host) {
        page.sessions.close(cookie, SystemTime::now());
    }
    let cookie = set_cookie(&headers, host, "", Duration::ZERO);
    (StatusCode::NO_CONTENT, [(header::SET_COOKIE, cookie)]).into_response()
}

/// The routes of the page's files.
pub(super) fn files(router: Router<AdminState>) -> Router<AdminState> {
    router.route("/", get(index)).route("/page/{name}", get(file))
}

/// Serves the page and all routes of the admin interface on a TCP address until `stop` becomes true. `hosts`: names that
/// requests may carry in Host, besides addresses and `localhost`.
///
/// # Errors
/// Fails if the listener cannot be registered with this runtime.
pub async fn serve_page(
    state: AdminState,
    listener: std::net::TcpListener,
    tokens: Tokens,
    hosts: Arc<[String]>,
    stop: watch::Receiver<bool>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = Capped::new(tokio::net::TcpListener::from_std(listener)?, STRANGERS, || {});
    let page = Arc::new(Page { sessions: Sessions::new(&tokens), attempts: Mutex::default(), hosts });
    let router = router(state)
        .route("/page/session", post(log_in).get(session).delete(log_out))
        .layer(from_fn_with_state(page.clone(), guard::on_tcp))
        .layer(Extension(page))
        .layer(from_fn(protect));
    let service = router.into_make_service_with_connect_info::<Viewer>();
    let serving = axum::serve(listener, service).with_graceful_shutdown(told(stop.clone()));
    until_stopped(async move { serving.await }, stop).await
}
