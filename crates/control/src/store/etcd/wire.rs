//! The messages of etcd's JSON gateway (etcd v3.4, `rpc.proto`): bytes are Base64, numbers of 64 bits are texts, and what is zero is
//! left out.

use super::super::{Entry, If, LeaseId, Revision};
use data_encoding::BASE64;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bytes64(pub Vec<u8>);

impl Serialize for Bytes64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        BASE64.decode(text.as_bytes()).map(Self).map_err(serde::de::Error::custom)
    }
}

/// A number as a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Number(pub u64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        // Some numbers are signed; a negative one (the time of an expired lease) counts as 0.
        text.parse::<i64>()
            .map(|number| Self(u64::try_from(number).unwrap_or(0)))
            .map_err(serde::de::Error::custom)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Refusal {
    pub code: u32,
    pub message: String,
    pub error: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    pub revision: Number,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct KeyValue {
    pub key: Bytes64,
    pub value: Bytes64,
    pub mod_revision: Number,
    pub lease: Number,
}

impl KeyValue {
    pub(super) fn entry(self) -> Entry {
        let lease = Some(self.lease.0).filter(|lease| *lease != 0);
        Entry { value: self.value.0, revision: self.mod_revision.0, lease }
    }
}

/// A request for one key, or for all with a prefix.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Range {
    pub key: Bytes64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range_end: Option<Bytes64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<Number>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Found {
    pub header: Header,
    pub kvs: Vec<KeyValue>,
}

/// A put or a deletion under a condition.
#[derive(Debug, Serialize)]
pub(super) struct Transaction {
    pub compare: Vec<Compare>,
    pub success: Vec<Operation>,
    pub failure: Vec<Operation>,
}

#[derive(Debug, Serialize)]
pub(super) struct Compare {
    key: Bytes64,
    target: &'static str,
    result: &'static str,
    mod_revision: Number,
}

impl Compare {
    /// The comparisons of a condition. A key that does not exist has revision 0.
    pub(super) fn of(key: &Bytes64, when: If) -> Vec<Self> {
        let revision = match when {
            If::Always => return Vec::new(),
            If::Absent => 0,
            If::Revision(revision) => revision,
        };
        let (target, result) = ("MOD", "EQUAL");
        vec![Self { key: key.clone(), target, result, mod_revision: Number(revision) }]
    }
}

#[derive(Debug, Serialize)]
pub(super) enum Operation {
    #[serde(rename = "request_range")]
    Range(Range),
    #[serde(rename = "request_put")]
    Put { key: Bytes64, value: Bytes64, lease: Number },
    #[serde(rename = "request_delete_range")]
    DeleteRange { key: Bytes64 },
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Done {
    pub header: Header,
    pub succeeded: bool,
    pub responses: Vec<Response>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Response {
    pub response_range: Found,
    pub response_delete_range: Deleted,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Deleted {
    pub deleted: Number,
}

#[derive(Debug, Serialize)]
pub(super) struct LeaseAsk {
    #[serde(rename = "TTL", skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Number>,
    #[serde(rename = "ID")]
    pub id: Number,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Leased {
    #[serde(rename = "ID")]
    pub id: Number,
    #[serde(rename = "TTL")]
    pub ttl: Number,
}

/// A line of a stream.
#[derive(Debug, Default, Deserialize)]
#[serde(default, bound = "T: Default + Deserialize<'de>")]
pub(super) struct Line<T> {
    pub result: Option<T>,
}

#[derive(Debug, Serialize)]
pub(super) struct Watch {
    pub create_request: Create,
}

#[derive(Debug, Serialize)]
pub(super) struct Create {
    pub key: Bytes64,
    pub range_end: Bytes64,
    pub start_revision: Number,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Watched {
    pub header: Header,
    pub canceled: bool,
    pub compact_revision: Number,
    pub events: Vec<Change>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Change {
    /// "DELETE", or left out for a put.
    #[serde(rename = "type")]
    pub kind: String,
    pub kv: KeyValue,
}

/// The end of the range of all keys with this prefix.
pub(super) fn end_of(prefix: &[u8]) -> Bytes64 {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return Bytes64(end);
        }
    }
    // All keys from the prefix on.
    Bytes64(vec![0])
}

/// The number of a lease for etcd, whose numbers are signed.
pub(super) fn lease(id: Option<LeaseId>) -> Number {
    Number(id.unwrap_or(0))
}

/// The revision after this one.
pub(super) const fn after(revision: Revision) -> Revision {
    revision.saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_form_of_the_gateway() {
        let key = Bytes64(b"a/1".to_vec());
        let put = Operation::Put { key: key.clone(), value: Bytes64(b"one".to_vec()), lease: lease(Some(7)) };
        let range = Range { key: key.clone(), range_end: None, limit: None };
        let transaction = Transaction {
            compare: Compare::of(&key, If::Absent),
            success: vec![put],
            failure: vec![Operation::Range(range)],
        };
        let expected = r#"{"compare":[{"key":"YS8x","target":"MOD","result":"EQUAL","mod_revision":"0"}],"success":[{"request_put":{"key":"YS8x","value":"b25l","lease":"7"}}],"failure":[{"request_range":{"key":"YS8x"}}]}"#;
        assert_eq!(serde_json::to_string(&transaction).expect("JSON"), expected);
        assert!(Compare::of(&key, If::Always).is_empty());
        assert_eq!(
            (end_of(b"a/"), end_of(b"a\xff"), end_of(b"\xff")),
            (Bytes64(b"a0".to_vec()), Bytes64(b"b".to_vec()), Bytes64(vec![0]))
        );
    }

    #[test]
    fn what_is_zero_may_be_left_out_of_an_answer() {
        let found: Found =
            serde_json::from_str(r#"{"header":{"revision":"5"},"kvs":[{"key":"YQ==","mod_revision":"4"}]}"#)
                .expect("an answer");
        let entry = found.kvs.into_iter().next().expect("a value").entry();
        assert_eq!(
            (found.header.revision.0, entry),
            (5, Entry { value: Vec::new(), revision: 4, lease: None })
        );
        let line: Line<Watched> =
            serde_json::from_str(r#"{"result":{"events":[{"type":"DELETE","kv":{"key":"YQ=="}}]}}"#)
                .expect("a line");
        assert_eq!(line.result.expect("a result").events.first().map(|change| &*change.kind), Some("DELETE"));
        assert_eq!(serde_json::from_str::<Leased>(r#"{"ID":"9","TTL":"-1"}"#).expect("an answer").ttl.0, 0);
        assert!(serde_json::from_str::<Found>(r#"{"kvs":[{"key":"!"}]}"#).is_err());
    }
}
