//! The files of the page, which are part of the program. Each is compressed once, at its first use.

use super::super::error::ApiError;
use axum::extract::Path;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::Write as _;
use std::sync::LazyLock;

/// Name, content type and text of each file of the page.
macro_rules! files {
    ($($name:literal: $kind:literal),* $(,)?) => {
        &[$(($name, $kind, include_bytes!(concat!("../../../../../web/", $name)))),*]
    };
}

const FILES: &[(&str, &str, &[u8])] = files! {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "main.js": "text/javascript; charset=utf-8",
    "ask.js": "text/javascript; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
    "units.js": "text/javascript; charset=utf-8",
    "login.js": "text/javascript; charset=utf-8",
    "watch.js": "text/javascript; charset=utf-8",
    "columns.js": "text/javascript; charset=utf-8",
    "table.js": "text/javascript; charset=utf-8",
    "flows.js": "text/javascript; charset=utf-8",
    "fastpath.js": "text/javascript; charset=utf-8",
    "filter.js": "text/javascript; charset=utf-8",
    "drawer.js": "text/javascript; charset=utf-8",
    "map.js": "text/javascript; charset=utf-8",
    "ways.js": "text/javascript; charset=utf-8",
    "svg.js": "text/javascript; charset=utf-8",
    "panel.js": "text/javascript; charset=utf-8",
    "cache.js": "text/javascript; charset=utf-8",
    "control.js": "text/javascript; charset=utf-8",
    "chains.js": "text/javascript; charset=utf-8",
    "overlay.js": "text/javascript; charset=utf-8",
    "panels.js": "text/javascript; charset=utf-8",
};

/// A file, ready to be sent.
struct Asset {
    name: &'static str,
    kind: &'static str,
    plain: &'static [u8],
    gzip: Vec<u8>,
    /// Quoted, as in the header field.
    etag: String,
}

static ASSETS: LazyLock<Vec<Asset>> = LazyLock::new(|| FILES.iter().map(Asset::new).collect());

impl Asset {
    fn new(&(name, kind, plain): &(&'static str, &'static str, &'static [u8])) -> Self {
        let mut packer = GzEncoder::new(Vec::new(), Compression::best());
        // Writing to a Vec cannot fail.
        let gzip = packer.write_all(plain).and_then(|()| packer.finish()).unwrap_or_default();
        let hash = ring::digest::digest(&ring::digest::SHA256, plain);
        let etag = format!("\"{}\"", data_encoding::HEXLOWER.encode(&hash.as_ref()[..16]));
        Self { name, kind, plain, gzip, etag }
    }

    /// Answers a request with these header fields.
    fn answer(&self, headers: &HeaderMap) -> Response {
        let field = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
        let common = [
            (header::ETAG, self.etag.as_str()),
            (header::CACHE_CONTROL, "no-cache"),
            (header::VARY, "accept-encoding"),
        ];
        let known = field(header::IF_NONE_MATCH).split(',').map(str::trim);
        if known.into_iter().any(|known| known.trim_start_matches("W/") == self.etag) {
            return (StatusCode::NOT_MODIFIED, common).into_response();
        }
        let kind = [(header::CONTENT_TYPE, self.kind)];
        if takes_gzip(field(header::ACCEPT_ENCODING)) && !self.gzip.is_empty() {
            let packed = [(header::CONTENT_ENCODING, "gzip")];
            return (common, kind, packed, self.gzip.clone()).into_response();
        }
        (common, kind, self.plain).into_response()
    }
}

/// Whether the client takes gzip (RFC 9110 Sec. 12.5.3).
fn takes_gzip(accepted: &str) -> bool {
    accepted.split(',').any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let is_gzip = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
        let is_refused = |part: &str| {
            part.strip_prefix("q=").and_then(|q| q.parse::<f32>().ok()).is_some_and(|q| q <= 0.0)
        };
        is_gzip && !parts.any(is_refused)
    })
}

fn find(name: &str, headers: &HeaderMap) -> Response {
    match ASSETS.iter().find(|asset| asset.name == name) {
        Some(asset) => asset.answer(headers),
        None => ApiError::not_found("the page has no such file", "open / of this address").into_response(),
    }
}

pub(in super::super) async fn index(headers: HeaderMap) -> Response {
    find("index.html", &headers)
}

pub(in super::super) async fn file(Path(name): Path<String>, headers: HeaderMap) -> Response {
    find(&name, &headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_sent_to_clients_that_take_it() {
        for (accepted, is_taken) in [
            ("gzip", true),
            ("gzip, deflate, br", true),
            ("br;q=1.0, GZIP;q=0.8", true),
            ("gzip;q=0", false),
            ("gzip; q=0.0", false),
            ("identity", false),
            ("", false),
            ("xgzip", false),
        ] {
            assert_eq!(takes_gzip(accepted), is_taken, "{accepted}");
        }
    }

    #[test]
    fn the_page_is_small() {
        let bytes: usize = ASSETS.iter().map(|asset| asset.gzip.len()).sum();
        assert!(bytes <= 300_000, "{bytes} bytes");
        assert!(ASSETS.iter().all(|asset| !asset.gzip.is_empty()));
    }
}
