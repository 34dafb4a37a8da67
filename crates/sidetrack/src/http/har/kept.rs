//! Content of a request and of its response, as the client has sent and got it, up to a limit.

use data_encoding::BASE64;
use flate2::read::{MultiGzDecoder, ZlibDecoder};
use serde_json::{Value, json};
use sidetrack_core::flow::Side;
use sidetrack_core::http::fields::Fields;
use std::cell::RefCell;
use std::io::Read;

/// The content of both sides.
#[derive(Debug)]
pub struct Kept {
    /// Most bytes of each side.
    max: usize,
    client: RefCell<Body>,
    server: RefCell<Body>,
}

/// The content of one side.
#[derive(Debug, Default)]
struct Body {
    /// Its first bytes.
    bytes: Vec<u8>,
    /// Its length so far.
    length: u64,
}

impl Kept {
    /// Keeps at most this number of bytes of each side.
    pub(super) fn new(max: usize) -> Self {
        Self { max, client: RefCell::default(), server: RefCell::default() }
    }

    fn of(&self, from: Side) -> &RefCell<Body> {
        match from {
            Side::Client => &self.client,
            Side::Server => &self.server,
        }
    }

    /// Adds a piece from this side.
    pub fn push(&self, from: Side, data: &[u8]) {
        let mut body = self.of(from).borrow_mut();
        let room = self.max - body.bytes.len().min(self.max);
        body.bytes.extend_from_slice(&data[..data.len().min(room)]);
        body.length += data.len() as u64;
    }

    /// Forgets the content of this side.
    pub(super) fn forget(&self, from: Side) {
        *self.of(from).borrow_mut() = Body::default();
    }

    /// The length of a side's content as it was framed, in bytes.
    pub(super) fn length(&self, from: Side) -> u64 {
        self.of(from).borrow().length
    }

    /// `postData` of HAR 1.2: `None` without content.
    pub(super) fn posted(&self, mime: &str) -> Option<Value> {
        let body = self.client.borrow();
        if body.length == 0 {
            return None;
        }
        let mut posted = json!({"mimeType": mime, "params": []});
        let cut = body.is_cut();
        put(&mut posted, "_encoding", &body.bytes, cut);
        if cut {
            posted["comment"] = body.note().into();
        }
        Some(posted)
    }

    /// `content` of HAR 1.2, decoded if that is possible.
    pub(super) fn content(&self, fields: Option<&Fields>, mime: &str) -> Value {
        let body = self.server.borrow();
        let mut content = json!({"size": body.length, "mimeType": mime});
        let coding = fields.map(coding).unwrap_or_default();
        if body.length == 0 {
            content["text"] = "".into();
        } else if body.is_cut() {
            put(&mut content, "encoding", &body.bytes, true);
            content["comment"] = body.note().into();
        } else if let Some(decoded) = decoded(&coding, &body.bytes, self.max) {
            content["size"] = decoded.len().into();
            content["compression"] = (decoded.len() as i64 - body.length as i64).into();
            put(&mut content, "encoding", &decoded, false);
        } else {
            put(&mut content, "encoding", &body.bytes, false);
            if !coding.is_empty() {
                content["comment"] = format!("encoded: {coding}").into();
            }
        }
        content
    }
}

impl Body {
    fn is_cut(&self) -> bool {
        self.length > self.bytes.len() as u64
    }

    fn note(&self) -> String {
        format!("the first {} of {} bytes", self.bytes.len(), self.length)
    }
}

/// Writes bytes as text, or in Base64 if they are not UTF-8. `is_cut`: they may end within a character.
fn put(to: &mut Value, encoding: &str, bytes: &[u8], is_cut: bool) {
    match std::str::from_utf8(bytes) {
        Ok(text) => to["text"] = text.into(),
        Err(error) if is_cut && error.error_len().is_none() => {
            to["text"] = String::from_utf8_lossy(&bytes[..error.valid_up_to()]).into();
        }
        Err(_) => {
            to["text"] = BASE64.encode(bytes).into();
            to[encoding] = "base64".into();
        }
    }
}

/// The codings of a response (RFC 9110 Sec. 8.4), as one text; empty without one.
fn coding(fields: &Fields) -> String {
    let all: Vec<_> = fields
        .members("content-encoding")
        .filter(|coding| !coding.eq_ignore_ascii_case(b"identity"))
        .map(|coding| String::from_utf8_lossy(coding).to_ascii_lowercase())
        .collect();
    all.join(", ")
}

/// Takes one coding off. `None`: it is another one, it is broken, or there would be more than `max` bytes.
fn decoded(coding: &str, bytes: &[u8], max: usize) -> Option<Vec<u8>> {
    let mut decoded = Vec::new();
    let most = max as u64 + 1;
    let read = match coding {
        "gzip" | "x-gzip" => MultiGzDecoder::new(bytes).take(most).read_to_end(&mut decoded),
        "deflate" => ZlibDecoder::new(bytes).take(most).read_to_end(&mut decoded),
        _ => return None,
    };
    (read.is_ok() && decoded.len() <= max).then_some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::{GzEncoder, ZlibEncoder};
    use std::io::Write;

    fn fields(coding: &str) -> Fields {
        let mut fields = Fields::default();
        fields.set("Content-Encoding", coding);
        fields
    }

    fn content(max: usize, coding: &str, bytes: &[u8]) -> Value {
        let kept = Kept::new(max);
        bytes.chunks(3).for_each(|piece| kept.push(Side::Server, piece));
        kept.content(Some(&fields(coding)), "text/plain")
    }

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn text_is_text_and_other_bytes_are_base64() {
        let plain = content(100, "identity", "grüße".as_bytes());
        assert_eq!(plain, json!({"size": 7, "mimeType": "text/plain", "text": "grüße"}));
        let other = content(100, "identity", &[0xff, 0, 1]);
        assert_eq!((&other["text"], &other["encoding"]), (&json!("/wAB"), &json!("base64")));
        // Cut within a character.
        let cut = content(4, "identity", "grüße".as_bytes());
        assert_eq!((&cut["text"], &cut["comment"]), (&json!("grü"), &json!("the first 4 of 7 bytes")));
        let cut = content(3, "identity", "grüße".as_bytes());
        assert_eq!((&cut["text"], &cut["size"]), (&json!("gr"), &json!(7)));
    }

    #[test]
    fn codings_are_taken_off_within_the_limit() {
        let text = "well ".repeat(100);
        let packed = gzip(text.as_bytes());
        let gone = content(1000, "GZip", &packed);
        assert_eq!((&gone["text"], &gone["size"]), (&json!(text), &json!(500)));
        assert_eq!(gone["compression"], json!(500 - packed.len()));
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(b"well").unwrap();
        assert_eq!(content(1000, "deflate", &encoder.finish().unwrap())["text"], "well");
        // More than the limit once it is decoded, broken, or of a coding that is unknown: the bytes as they came.
        for (max, coding, bytes) in [
            (200, "gzip", &packed[..]),
            (1000, "gzip", &packed[..20]),
            (1000, "br", &packed),
            (1000, "gzip, gzip", &packed),
        ] {
            let kept = content(max, coding, bytes);
            assert_eq!(kept["encoding"], "base64", "{coding}");
            assert_eq!(
                (&kept["size"], &kept["comment"]),
                (&json!(bytes.len()), &json!(format!("encoded: {coding}")))
            );
        }
    }

    #[test]
    fn what_was_not_sent_is_not_there() {
        let kept = Kept::new(10);
        assert_eq!(kept.posted("text/plain"), None);
        kept.push(Side::Client, b"a=1");
        kept.push(Side::Server, b"begun");
        kept.forget(Side::Server);
        assert_eq!(kept.posted("text/plain").unwrap()["text"], "a=1");
        assert_eq!((kept.length(Side::Client), kept.length(Side::Server)), (3, 0));
        assert_eq!(kept.content(None, "")["text"], "");
    }
}
