//! A value together with its place in the file.

use serde::de::{self, Deserialize, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, Range};

/// A value and the bytes of the file it was read from.
#[derive(Clone, Debug)]
pub struct At<T> {
    value: T,
    span: Range<usize>,
}

impl<T> At<T> {
    /// A value at a place.
    pub const fn new(value: T, span: Range<usize>) -> Self {
        Self { value, span }
    }

    /// The place of the value: byte offsets in the file.
    pub fn span(&self) -> Range<usize> {
        self.span.clone()
    }
}

impl<T> Deref for At<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for At<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = toml::Spanned::<T>::deserialize(deserializer)?;
        Ok(Self { span: spanned.span(), value: spanned.into_inner() })
    }
}

/// One value or a list of them, each with its place.
#[derive(Clone, Debug)]
pub struct List<T> {
    items: Vec<At<T>>,
    span: Range<usize>,
}

impl<T> List<T> {
    /// The values.
    pub fn items(&self) -> &[At<T>] {
        &self.items
    }

    /// The place of the whole list.
    pub fn span(&self) -> Range<usize> {
        self.span.clone()
    }
}

/// One value, whose place is not known yet, or a list.
enum OneOrMany<T> {
    One(T),
    Many(Vec<At<T>>),
}

struct OneOrManyVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for OneOrManyVisitor<T> {
    type Value = OneOrMany<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("one value or a list of values")
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Self::Value, E> {
        T::deserialize(value.into_deserializer()).map(OneOrMany::One)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Self::Value, E> {
        T::deserialize(value.into_deserializer()).map(OneOrMany::One)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        T::deserialize(de::value::MapAccessDeserializer::new(map)).map(OneOrMany::One)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(OneOrMany::Many(items))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OneOrManyVisitor(PhantomData))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = toml::Spanned::<OneOrMany<T>>::deserialize(deserializer)?;
        let span = spanned.span();
        let items = match spanned.into_inner() {
            OneOrMany::One(value) => vec![At::new(value, span.clone())],
            OneOrMany::Many(items) => items,
        };
        Ok(Self { items, span })
    }
}
