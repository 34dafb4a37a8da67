//! Dictionaries of Structured Fields (RFC 9651 Sec. 3.2), as far as cache directives need them: keys, integers and
//! booleans. The parser checks all other types, too, because an invalid field counts as absent.

use sfv::visitor::{
    DictionaryVisitor, EntryVisitor, Ignored, InnerListVisitor, ItemVisitor, ParameterVisitor,
};
use sfv::{BareItemFromInput, KeyRef, Parser};
use std::convert::Infallible;

/// The value of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    /// An Integer.
    Integer(i64),
    /// A Boolean. A key without a value is true.
    Boolean(bool),
    /// Anything else.
    Other,
}

/// Reads a whole field. If a key is repeated, the last value counts. `None` if the field is not valid.
pub(super) fn parse(text: &[u8]) -> Option<Vec<(&str, Value)>> {
    Parser::new(text).parse_dictionary_with_visitor(Members(Vec::new())).ok()
}

/// The members so far.
struct Members<'a>(Vec<(&'a str, Value)>);

impl<'a> DictionaryVisitor<'a> for Members<'a> {
    type Out = Vec<(&'a str, Value)>;
    type Error = Infallible;

    fn entry(&mut self, key: &'a KeyRef) -> Result<impl EntryVisitor<'a>, Infallible> {
        self.0.retain(|(other, _)| *other != key.as_str());
        self.0.push((key.as_str(), Value::Other));
        Ok(self.0.last_mut().map(|(_, value)| Member(value)))
    }

    fn finish(self) -> Result<Self::Out, Infallible> {
        Ok(self.0)
    }
}

/// Sets the value of one member. An inner list leaves it [`Value::Other`].
struct Member<'v>(&'v mut Value);

impl<'a> EntryVisitor<'a> for Member<'_> {
    type Error = Infallible;

    fn item(self) -> Result<impl ItemVisitor<'a>, Infallible> {
        Ok(self)
    }

    fn inner_list(self) -> Result<impl InnerListVisitor<'a>, Infallible> {
        Ok(Ignored)
    }
}

impl<'a> ItemVisitor<'a> for Member<'_> {
    type Out = ();
    type Error = Infallible;

    fn bare_item(
        self,
        item: BareItemFromInput<'a>,
    ) -> Result<impl ParameterVisitor<'a, Out = ()>, Infallible> {
        *self.0 = match item {
            BareItemFromInput::Integer(number) => Value::Integer(number.into()),
            BareItemFromInput::Boolean(is_set) => Value::Boolean(is_set),
            _ => Value::Other,
        };
        Ok(Ignored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dictionaries_parse_whole_or_not_at_all() {
        use Value::{Boolean, Integer, Other};
        for (text, expected) in [
            ("max-age=60", Some(vec![("max-age", Integer(60))])),
            (
                "a, b=?0;x=1 ,c=-5",
                Some(vec![("a", Boolean(true)), ("b", Boolean(false)), ("c", Integer(-5))]),
            ),
            ("a=1, a=2", Some(vec![("a", Integer(2))])),
            (
                "a=\"x, \\\"y\";q=tok/en:x, b=(1 \"2\" ?1);w, c=:aGk=:, d=1.5, e=@17",
                Some(vec![("a", Other), ("b", Other), ("c", Other), ("d", Other), ("e", Other)]),
            ),
            ("a=%\"f%c3%bc\", b=1;q=%\"x\"", Some(vec![("a", Other), ("b", Integer(1))])),
            ("a=(1 2), a=3", Some(vec![("a", Integer(3))])),
            ("", Some(vec![])),
            ("A=1", None),
            ("a=", None),
            ("a=1,", None),
            ("a =1", None),
            ("a=1 b", None),
            ("a=1.", None),
            ("a=:x:", None),
            ("a=%\"%zz\"", None),
            ("a=&", None),
            ("a=\"x", None),
            ("a=(1", None),
            ("a=1234567890123456", None),
        ] {
            assert_eq!(parse(text.as_bytes()), expected, "{text}");
        }
    }
}
