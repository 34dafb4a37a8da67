//! Implementations that cannot be derived: schemas of words of core, entries that are written in several ways, and a text that
//! is never logged.

use super::raw::{Login, Number, UserEntry};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use sidetrack_core::shunt::{FastPathKind, Meaning, ShuntAction};
use std::borrow::Cow;
use std::fmt;

/// The schema of [`FastPathKind`].
pub(super) struct FastPathWord;

impl JsonSchema for FastPathWord {
    fn schema_name() -> Cow<'static, str> {
        "FastPath".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        words("The fast path.", FastPathKind::ALL.map(|kind| (kind.as_str(), about_path(kind))))
    }
}

/// The schema of [`Meaning`].
pub(super) struct MeaningWord;

impl JsonSchema for MeaningWord {
    fn schema_name() -> Cow<'static, str> {
        "ShuntAction".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let about = |meaning| match meaning {
            Meaning::Action(ShuntAction::Ignore) => "The slow path.",
            Meaning::Action(ShuntAction::Shunt) => "The first fast path.",
            Meaning::Action(ShuntAction::Block) => "Dropped on the fast path.",
            Meaning::Rules => "The rules decide.",
            Meaning::Path(kind) => about_path(kind),
        };
        words("The meaning of a number in a mark.", Meaning::ALL.map(|one| (one.as_str(), about(one))))
    }
}

const fn about_path(kind: FastPathKind) -> &'static str {
    match kind {
        FastPathKind::Tc => "BPF between driver and stack.",
        FastPathKind::Xdp => "BPF in the driver.",
        FastPathKind::XdpGeneric => "BPF behind the driver, without its help.",
        FastPathKind::OpenFlow => "A switch.",
        FastPathKind::Flowtable => "A flow table of nftables.",
        FastPathKind::Wire => "The kernel, for flows of listeners.",
        FastPathKind::None => "None: only shows what would be shunted.",
    }
}

fn words<const N: usize>(about: &str, words: [(&str, &str); N]) -> Schema {
    let one =
        |(word, about): (&str, &str)| json_schema!({ "description": about, "type": "string", "const": word });
    json_schema!({ "description": about, "oneOf": words.map(one).as_slice() })
}

// By hand, not with `untagged`, which would lose the place of an error.

struct NumberVisitor;

impl Visitor<'_> for NumberVisitor {
    type Value = Number;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number or a text")
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Number, E> {
        Ok(Number::Number(value))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Number, E> {
        Ok(Number::Text(value.to_owned()))
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberVisitor)
    }
}

struct UserVisitor;

impl<'de> Visitor<'de> for UserVisitor {
    type Value = UserEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{ user = …, password_file = … }, a user name or a user id")
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<UserEntry, E> {
        Ok(UserEntry::Id(value))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<UserEntry, E> {
        Ok(UserEntry::Name(value.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<UserEntry, A::Error> {
        Login::deserialize(de::value::MapAccessDeserializer::new(map)).map(UserEntry::Login)
    }
}

impl<'de> Deserialize<'de> for UserEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UserVisitor)
    }
}

/// A text that is never logged.
#[derive(Clone, serde::Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// The text itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
