//! Writes the requests of intercepted connections to an HTTP Archive (HAR 1.2), which browsers' developer tools can open.
//! It has heads, times and sizes, and as much content as its configuration says. Possible secrets in heads are masked.

mod kept;

pub(super) use kept::Kept;

use super::fetch::Fetched;
use crate::live::LiveFlow;
use serde_json::{Value, json};
use sidetrack_core::flow::Side;
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::message::{Request, Response, Version};
use sidetrack_core::http::uri::{Scheme, Target};
use sidetrack_sys::sync::lock;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::rc::Rc;
use std::sync::Mutex;

/// The text behind the last entry.
const TAIL: &str = "\n]}}\n";

/// Fields whose values may be secrets.
const SECRET: [&str; 5] =
    ["authorization", "cookie", "set-cookie", "proxy-authorization", "proxy-authenticate"];

/// An archive file. Only its owner can read it, and it is valid JSON after every entry.
#[derive(Debug)]
pub struct Har {
    archive: Mutex<Archive>,
    /// Most bytes of content of each request and response.
    bodies_max: usize,
}

#[derive(Debug)]
struct Archive {
    file: File,
    /// The position of the next entry, which overwrites the tail.
    end: u64,
    is_empty: bool,
}

/// What was sent to a client for the current request, as far as the archive needs it.
#[derive(Debug, Default)]
pub struct Told {
    /// At least a part of the final head of a response was sent.
    pub is_begun: bool,
    /// The request, if it is archived.
    pub request: Option<Request>,
    /// The content of the request and its response, if it is archived.
    pub kept: Option<Rc<Kept>>,
    /// The version of the stream that is the client's connection, if it is one.
    version: Option<&'static str>,
    /// The head of the response.
    head: Option<Response>,
    /// The HTTP version in which the server sent it; `None`: the response is ours, or a stored one.
    received: Option<&'static str>,
}

impl Told {
    /// The state before anything is sent.
    pub fn of(version: Option<&'static str>) -> Self {
        Self { version, ..Self::default() }
    }

    /// Notes the head of a response of ours, or of a stored one, which is about to be sent.
    pub fn begin(&mut self, head: &Response) {
        self.is_begun = true;
        if self.request.is_some() {
            self.head = Some(head.clone());
        }
    }

    /// Notes the head of a server's response, which is about to be sent.
    pub fn pass(&mut self, fetched: &Fetched) {
        self.received = Some(version(fetched.response.version, fetched.stream));
        self.begin(&fetched.response);
    }

    /// Takes it back: nothing of that response was sent.
    pub fn take_back(&mut self) {
        (self.is_begun, self.head, self.received) = (false, None, None);
        if let Some(kept) = &self.kept {
            kept.forget(Side::Server);
        }
    }
}

impl Har {
    /// Creates the file; it replaces an older one. `bodies_max`: most bytes of content of each request and response.
    ///
    /// # Errors
    /// As open(2) and write(2).
    pub fn create(path: &Path, bodies_max: usize) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)?;
        let creator = json!({"name": "sidetrack", "version": env!("CARGO_PKG_VERSION")});
        let head = format!("{{\"log\":{{\"version\":\"1.2\",\"creator\":{creator},\"entries\":[");
        file.write_all_at(format!("{head}{TAIL}").as_bytes(), 0)?;
        let archive = Mutex::new(Archive { file, end: head.len() as u64, is_empty: true });
        Ok(Self { archive, bodies_max })
    }

    /// What keeps the content of one request and its response, if content is archived.
    pub fn keep(&self) -> Option<Rc<Kept>> {
        (self.bodies_max > 0).then(|| Rc::new(Kept::new(self.bodies_max)))
    }

    /// Adds a request and its response.
    pub fn add(&self, scheme: Scheme, told: &mut Told, live: &LiveFlow) {
        let Some(request) = told.request.take() else { return };
        let entry = entry(scheme, &request, told, live);
        let mut archive = lock(&self.archive);
        if let Err(error) = archive.append(&entry) {
            tracing::warn!(%error, "cannot write the archive of requests");
        }
    }
}

impl Archive {
    fn append(&mut self, entry: &Value) -> io::Result<()> {
        let comma = if self.is_empty { "" } else { "," };
        let text = format!("{comma}\n{entry}");
        // One call: a concurrent reader sees the old end or the new one.
        self.file.write_all_at(format!("{text}{TAIL}").as_bytes(), self.end)?;
        self.end += text.len() as u64;
        self.is_empty = false;
        Ok(())
    }
}

fn entry(scheme: Scheme, request: &Request, told: &mut Told, live: &LiveFlow) -> Value {
    let millis = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    let age = live.age();
    let connect = live.connect_time();
    let first_byte = live.first_byte_time().unwrap_or(age).min(age);
    let wait = first_byte.saturating_sub(connect.unwrap_or_default());
    let asked_in = version(request.version, told.version);
    let answered_in = told.received.take().unwrap_or(asked_in);
    let peer = live.decided().map(|decided| decided.flow.client);
    let kept = told.kept.take();
    json!({
        "startedDateTime": humantime::format_rfc3339_millis(live.since).to_string(),
        "time": millis(age),
        "request": request_of(scheme, (request, asked_in), kept.as_deref(), live.bytes().0),
        "response": response_of((told.head.take().as_ref(), answered_in), kept.as_deref(), live.bytes().1),
        "cache": {},
        "timings": {
            "send": 0,
            // -1 if a kept connection was used, or no server was contacted.
            "connect": connect.map_or(-1.0, millis),
            "wait": millis(wait),
            "receive": millis(age.saturating_sub(first_byte)),
        },
        "_client": peer.map(|peer| peer.to_string()),
        "_flow": live.id.to_string(),
    })
}

fn request_of(
    scheme: Scheme,
    (request, version): (&Request, &str),
    kept: Option<&Kept>,
    bytes: u64,
) -> Value {
    let url = match Target::within(request, scheme) {
        Ok((Target::Resource(resource), _)) => resource.url(),
        _ => String::from_utf8_lossy(&request.target).into_owned(),
    };
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let pairs: Vec<Value> = pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            json!({"name": name, "value": value})
        })
        .collect();
    let mut entry = json!({
        "method": String::from_utf8_lossy(request.method.as_bytes()),
        "url": url,
        "httpVersion": version,
        "cookies": [],
        "headers": fields(&request.fields),
        "queryString": pairs,
        "headersSize": -1,
        "bodySize": kept.map_or(-1, |kept| kept.length(Side::Client) as i64),
        "_bytesToServer": bytes,
    });
    let mime = request.fields.first("content-type").unwrap_or_default();
    if let Some(posted) = kept.and_then(|kept| kept.posted(&String::from_utf8_lossy(mime))) {
        entry["postData"] = posted;
    }
    entry
}

fn response_of((head, version): (Option<&Response>, &str), kept: Option<&Kept>, bytes: u64) -> Value {
    let text = |name: &str| {
        let value = head.and_then(|head| head.fields.first(name));
        value.map(|value| String::from_utf8_lossy(value).into_owned()).unwrap_or_default()
    };
    let (mime, stated) = (text("content-type"), text("content-length").parse::<i64>().unwrap_or(-1));
    let (content, size) = match kept {
        Some(kept) => (kept.content(head.map(|head| &head.fields), &mime), kept.length(Side::Server) as i64),
        None => (json!({"size": stated, "mimeType": mime}), stated),
    };
    json!({
        // 0 means that there was no response, as browsers write it.
        "status": head.map_or(0, |head| head.status),
        "statusText": head.map(|head| String::from_utf8_lossy(head.reason.as_ref()).into_owned()).unwrap_or_default(),
        "httpVersion": version,
        "cookies": [],
        "headers": head.map(|head| fields(&head.fields)).unwrap_or_default(),
        "content": content,
        "redirectURL": text("location"),
        "headersSize": -1,
        "bodySize": size,
        "_bytesToClient": bytes,
    })
}

fn version(version: Version, stream: Option<&str>) -> &'static str {
    match (stream, version) {
        (Some("3.0"), _) => "HTTP/3.0",
        (Some(_), _) => "HTTP/2.0",
        (None, Version::Http10) => "HTTP/1.0",
        (None, Version::Http11) => "HTTP/1.1",
    }
}

fn fields(fields: &Fields) -> Vec<Value> {
    let one = |(name, value): (&[u8], &[u8])| {
        let is_secret = SECRET.iter().any(|field| name.eq_ignore_ascii_case(field.as_bytes()));
        let value = if is_secret { "***".into() } else { String::from_utf8_lossy(value) };
        json!({"name": String::from_utf8_lossy(name), "value": value})
    };
    fields.iter().map(one).collect()
}
