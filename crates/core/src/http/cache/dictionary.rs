//! Dictionaries of Structured Fields (RFC 9651 Sec. 3.2), as far as cache directives need them: keys, integers and
//! booleans. The parser checks all other types, too, because an invalid field counts as absent.

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
    let mut reader = Reader(text);
    let mut members: Vec<(&str, Value)> = Vec::new();
    reader.spaces(b" ");
    while !reader.0.is_empty() {
        let key = reader.key()?;
        let value = if reader.eat(b'=') { reader.member()? } else { Value::Boolean(true) };
        reader.parameters()?;
        members.retain(|(other, _)| *other != key);
        members.push((key, value));
        reader.spaces(b" \t");
        if reader.0.is_empty() {
            break;
        }
        if !reader.eat(b',') {
            return None;
        }
        reader.spaces(b" \t");
        if reader.0.is_empty() {
            return None;
        }
    }
    Some(members)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn eat(&mut self, byte: u8) -> bool {
        match self.0.split_first() {
            Some((first, rest)) if *first == byte => {
                self.0 = rest;
                true
            }
            _ => false,
        }
    }

    fn spaces(&mut self, which: &[u8]) {
        self.take(|byte| which.contains(&byte));
    }

    fn take(&mut self, good: impl Fn(u8) -> bool) -> &'a [u8] {
        let end = self.0.iter().position(|byte| !good(*byte)).unwrap_or(self.0.len());
        let (taken, rest) = self.0.split_at(end);
        self.0 = rest;
        taken
    }

    fn key(&mut self) -> Option<&'a str> {
        let starts = self.0.first().is_some_and(|byte| byte.is_ascii_lowercase() || *byte == b'*');
        let key = self.take(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-' | b'.' | b'*')
        });
        std::str::from_utf8(key).ok().filter(|_| starts)
    }

    fn member(&mut self) -> Option<Value> {
        if !self.eat(b'(') {
            return self.item();
        }
        loop {
            self.spaces(b" ");
            if self.eat(b')') {
                return Some(Value::Other);
            }
            self.item()?;
            self.parameters()?;
            if !matches!(self.0.first(), Some(b' ' | b')')) {
                return None;
            }
        }
    }

    fn parameters(&mut self) -> Option<()> {
        while self.eat(b';') {
            self.spaces(b" ");
            self.key()?;
            if self.eat(b'=') {
                self.item()?;
            }
        }
        Some(())
    }

    fn item(&mut self) -> Option<Value> {
        match self.0.first()? {
            b'-' | b'0'..=b'9' => self.number(),
            b'"' => self.string(),
            b'?' => {
                self.eat(b'?');
                let is_true = self.eat(b'1');
                (is_true || self.eat(b'0')).then_some(Value::Boolean(is_true))
            }
            b':' => {
                self.eat(b':');
                self.take(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'='));
                self.eat(b':').then_some(Value::Other)
            }
            b'@' => {
                self.eat(b'@');
                matches!(self.number()?, Value::Integer(_)).then_some(Value::Other)
            }
            b'*' | b'a'..=b'z' | b'A'..=b'Z' => {
                self.take(|byte| super::super::fields::is_token_byte(byte) || matches!(byte, b':' | b'/'));
                Some(Value::Other)
            }
            _ => None,
        }
    }

    fn number(&mut self) -> Option<Value> {
        let negative = self.eat(b'-');
        let digits = self.take(|byte| byte.is_ascii_digit());
        if self.eat(b'.') {
            let fraction = self.take(|byte| byte.is_ascii_digit());
            let good = (1..=12).contains(&digits.len()) && (1..=3).contains(&fraction.len());
            return good.then_some(Value::Other);
        }
        let good = (1..=15).contains(&digits.len());
        let number: i64 = std::str::from_utf8(digits).ok().filter(|_| good)?.parse().ok()?;
        Some(Value::Integer(if negative { -number } else { number }))
    }

    fn string(&mut self) -> Option<Value> {
        self.eat(b'"');
        loop {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            match byte {
                b'"' => return Some(Value::Other),
                b'\\' if matches!(self.0.first(), Some(b'"' | b'\\')) => {
                    self.0 = self.0.get(1..)?;
                }
                b' '..=b'[' | b']'..=b'~' => {}
                _ => return None,
            }
        }
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
            ("", Some(vec![])),
            ("A=1", None),
            ("a=", None),
            ("a=1,", None),
            ("a =1", None),
            ("a=1 b", None),
            ("a=1.", None),
            ("a=&", None),
            ("a=\"x", None),
            ("a=(1", None),
            ("a=1234567890123456", None),
        ] {
            assert_eq!(parse(text.as_bytes()), expected, "{text}");
        }
    }
}
