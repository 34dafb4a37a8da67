//! Header and trailer fields of an HTTP message, in the order of their arrival (RFC 9110 Sec. 5).
//!
//! All lines are in one buffer, as they arrived. So reading a head costs two allocations and one copy, however many
//! fields it has. Writing it costs one copy for each run of lines that are unchanged. Names keep the sender's
//! spelling, and compare without case.

use crate::decimal::Digits;
use std::borrow::Cow;
use std::fmt;

/// Header or trailer fields. The empty collection is the default.
#[derive(Clone, Default)]
pub struct Fields {
    text: Vec<u8>,
    places: Vec<Place>,
    /// One bit for each name that is or was in the collection, see [`kind`]. It answers most lookups of absent names
    /// quickly.
    kinds: u64,
}

/// Where a field is in the text.
#[derive(Clone, Copy)]
struct Place {
    /// The offset and the length of its name.
    start: u32,
    name: u32,
    /// The offset and the length of its value.
    value: u32,
    length: u32,
    /// The line is in the text exactly as it is written: `Name: value CRLF`.
    is_plain: bool,
}

/// The bytes between name and value, and behind the value.
const COLON: &[u8] = b": ";
const END: &[u8] = b"\r\n";

impl Fields {
    /// Makes an empty collection.
    pub const fn new() -> Self {
        Self { text: Vec::new(), places: Vec::new(), kinds: 0 }
    }

    /// Makes an empty collection, with room for this number of bytes of names and values in this number of lines.
    pub fn with_capacity(bytes: usize, lines: usize) -> Self {
        Self { text: Vec::with_capacity(bytes), places: Vec::with_capacity(lines), kinds: 0 }
    }

    /// Returns a copy with room for this number of additional bytes of names and values, and of additional lines.
    #[must_use]
    pub fn clone_with_room(&self, bytes: usize, lines: usize) -> Self {
        let mut clone = Self::with_capacity(self.text.len() + bytes, self.places.len() + lines);
        clone.text.extend_from_slice(&self.text);
        clone.places.extend_from_slice(&self.places);
        clone.kinds = self.kinds;
        clone
    }

    /// Copies the text of a head or a trailer section. Call [`Self::line`] for each of its lines. There is room for
    /// this number of additional bytes, and for this number of lines.
    pub(super) fn of_text(text: &[u8], bytes: usize, lines: usize) -> Self {
        let mut fields = Self::with_capacity(text.len() + bytes, lines);
        fields.text.extend_from_slice(text);
        fields
    }

    /// Adds the next line of the text: where its name begins, the length of the name, and where its value is.
    pub(super) fn line(&mut self, start: usize, name: usize, value: std::ops::Range<usize>) {
        let between = self.text.get(start + name..value.start);
        let behind = self.text.get(value.end..value.end + END.len());
        let is_plain = between == Some(COLON) && behind == Some(END);
        let length = value.len();
        self.kinds |= kind(self.text.get(start..start + name).unwrap_or_default());
        self.places.push(Place {
            start: size(start),
            name: size(name),
            value: size(value.start),
            length: size(length),
            is_plain,
        });
    }

    /// Returns the number of field lines.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there is no field.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Removes all fields, but keeps the memory.
    pub fn clear(&mut self) {
        self.text.clear();
        self.places.clear();
        self.kinds = 0;
    }

    /// Returns the bytes of memory that names and values take.
    pub fn memory_bytes(&self) -> usize {
        self.text.capacity() + self.places.capacity() * size_of::<Place>()
    }

    /// Adds a field line at the end. Name and value are written unchanged: the caller has checked them, or wrote them
    /// itself.
    pub fn push(&mut self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) {
        self.push_pieces(name, &[value.as_ref()]);
    }

    /// As [`Self::push`], with a value in several pieces.
    pub fn push_pieces(&mut self, name: impl AsRef<[u8]>, value: &[&[u8]]) {
        let name = name.as_ref();
        self.kinds |= kind(name);
        let start = self.text.len();
        self.text.extend_from_slice(name);
        self.text.extend_from_slice(COLON);
        let begin = self.text.len();
        for piece in value {
            self.text.extend_from_slice(piece);
        }
        let length = self.text.len() - begin;
        self.text.extend_from_slice(END);
        self.places.push(Place {
            start: size(start),
            name: size(name.len()),
            value: size(begin),
            length: size(length),
            is_plain: true,
        });
    }

    /// As [`Self::push`], with a number.
    pub fn push_number(&mut self, name: impl AsRef<[u8]>, value: u64) {
        self.push_pieces(name, &[Digits::of(value).as_bytes()]);
    }

    /// As [`Self::set`], with a number. If there is exactly one line with this value already, it stays where it is.
    pub fn set_number(&mut self, name: impl AsRef<[u8]>, value: u64) {
        let (name, digits) = (name.as_ref(), Digits::of(value));
        let is_said = {
            let mut lines = self.all(name);
            lines.next() == Some(digits.as_bytes()) && lines.next().is_none()
        };
        if !is_said {
            self.set(name, digits.as_bytes());
        }
    }

    /// Removes all fields of this name, and adds this one at the end.
    pub fn set(&mut self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) {
        self.remove(name.as_ref());
        self.push(name, value);
    }

    /// Removes all fields of this name. Returns whether there was one.
    pub fn remove(&mut self, name: impl AsRef<[u8]>) -> bool {
        let before = self.places.len();
        let name = name.as_ref();
        if self.may_have(name).is_empty() {
            return false;
        }
        let text = &self.text;
        self.places.retain(|place| !place.is_named(name, text));
        self.places.len() < before
    }

    /// Keeps the fields for which `keep` returns true.
    pub fn retain(&mut self, mut keep: impl FnMut(&[u8], &[u8]) -> bool) {
        let text = &self.text;
        self.places.retain(|place| keep(place.name(text), place.value(text)));
    }

    /// Returns names and values in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&[u8], &[u8])> {
        self.places.iter().map(|place| (place.name(&self.text), place.value(&self.text)))
    }

    /// Returns the values of all lines of this name, in order.
    pub fn all<'a>(&'a self, name: &'a (impl AsRef<[u8]> + ?Sized)) -> impl Iterator<Item = &'a [u8]> {
        let may = self.may_have(name.as_ref());
        let named = may.iter().filter(|place| place.is_named(name.as_ref(), &self.text));
        named.map(|place| place.value(&self.text))
    }

    /// Returns the value of the first line of this name.
    pub fn first(&self, name: impl AsRef<[u8]>) -> Option<&[u8]> {
        let name = name.as_ref();
        let place = self.may_have(name).iter().find(|place| place.is_named(name, &self.text))?;
        Some(place.value(&self.text))
    }

    /// Returns the lines that may have this name: all or none.
    fn may_have(&self, name: &[u8]) -> &[Place] {
        if self.kinds & kind(name) == 0 { &[] } else { &self.places }
    }

    /// Whether there is a field of this name.
    pub fn has(&self, name: impl AsRef<[u8]>) -> bool {
        self.first(name).is_some()
    }

    /// Returns the value as a recipient sees it: several lines joined by commas (RFC 9110 Sec. 5.3). `None` if there
    /// is no line.
    pub fn joined(&self, name: impl AsRef<[u8]>) -> Option<Cow<'_, [u8]>> {
        let name = name.as_ref();
        let named = self.may_have(name).iter().filter(|place| place.is_named(name, &self.text));
        let mut lines = named.map(|place| place.value(&self.text));
        let mut joined = Cow::Borrowed(lines.next()?);
        for line in lines {
            let joined = joined.to_mut();
            joined.extend_from_slice(b", ");
            joined.extend_from_slice(line);
        }
        Some(joined)
    }

    /// Returns the members of a list field over all its lines, without empty ones. A comma inside quotes does not
    /// separate members.
    pub fn members<'a>(&'a self, name: &'a (impl AsRef<[u8]> + ?Sized)) -> impl Iterator<Item = &'a [u8]> {
        self.all(name).flat_map(members)
    }

    /// Whether a list field has this member, without regard to case.
    pub fn has_member(&self, name: &str, member: &str) -> bool {
        let is = |other: &[u8]| same_name(other, member.as_bytes());
        // Usually there is one member and nothing to split. A line shorter than the member cannot contain it.
        let has =
            |line: &[u8]| is(line) || (line.len() > member.len() && !is_token(line) && members(line).any(is));
        self.all(name).any(has)
    }

    /// Appends the field lines to a head: `Name: value CRLF` each.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        out.reserve(self.text.len() + self.places.len() * (COLON.len() + END.len()));
        // Adjacent unchanged lines are copied as one piece.
        let mut run = 0..0;
        for place in &self.places {
            let (start, end) = (place.start as usize, place.end());
            if place.is_plain && start == run.end {
                run.end = end;
                continue;
            }
            out.extend_from_slice(self.text.get(run).unwrap_or_default());
            run = start..start;
            if place.is_plain {
                run.end = end;
            } else {
                write_field(out, place.name(&self.text), place.value(&self.text));
            }
        }
        out.extend_from_slice(self.text.get(run).unwrap_or_default());
    }
}

/// Appends one field line to a head.
pub fn write_field(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.extend_from_slice(name);
    out.extend_from_slice(COLON);
    out.extend_from_slice(value);
    out.extend_from_slice(END);
}

/// Returns the bit for a name, the same for all spellings.
fn kind(name: &[u8]) -> u64 {
    let first = name.first().map_or(0, |first| usize::from(first | 0x20));
    // Few of the names in use have the same length and first letter.
    1 << ((name.len() * 5 + first) % 64)
}

/// Converts an offset in the text, which is always short enough for 32 bits.
fn size(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

impl Place {
    /// The length alone tells most names apart.
    #[inline]
    fn is_named(&self, name: &[u8], text: &[u8]) -> bool {
        self.name as usize == name.len() && same_name(self.name(text), name)
    }

    fn name<'a>(&self, text: &'a [u8]) -> &'a [u8] {
        let start = self.start as usize;
        text.get(start..start + self.name as usize).unwrap_or_default()
    }

    fn value<'a>(&self, text: &'a [u8]) -> &'a [u8] {
        let start = self.value as usize;
        text.get(start..start + self.length as usize).unwrap_or_default()
    }

    /// Returns the offset behind the end of a line that is plain.
    const fn end(&self) -> usize {
        self.value as usize + self.length as usize + END.len()
    }
}

/// Two collections are equal if they hold the same lines in the same order, names compared without case.
impl PartialEq for Fields {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len()
            && self.iter().zip(other.iter()).all(|((name, value), (other_name, other_value))| {
                name.eq_ignore_ascii_case(other_name) && value == other_value
            })
    }
}

impl Eq for Fields {}

impl fmt::Debug for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lossy = |(name, value)| (String::from_utf8_lossy(name), String::from_utf8_lossy(value));
        f.debug_map().entries(self.iter().map(lossy)).finish()
    }
}

impl<const N: usize> From<[(&str, &str); N]> for Fields {
    fn from(lines: [(&str, &str); N]) -> Self {
        let mut fields = Self::new();
        for (name, value) in lines {
            fields.push(name, value);
        }
        fields
    }
}

/// Returns the members of one line of a list field (RFC 9110 Sec. 5.6.1): separated by commas outside quotes,
/// trimmed, without empty ones.
pub fn members(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    split_outside_quotes(line, b',').map(trim).filter(|member| !member.is_empty())
}

/// Returns the parts of a text between `separator` bytes outside quoted strings.
pub fn split_outside_quotes(text: &[u8], separator: u8) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(text);
    let has_quotes = text.contains(&b'"');
    std::iter::from_fn(move || {
        let text = rest?;
        let end = match has_quotes {
            true => end_outside_quotes(text, separator),
            false => text.iter().position(|byte| *byte == separator),
        };
        rest = end.and_then(|end| text.get(end + 1..));
        Some(end.and_then(|end| text.get(..end)).unwrap_or(text))
    })
}

/// Returns the position of the first `separator` outside quoted strings.
fn end_outside_quotes(text: &[u8], separator: u8) -> Option<usize> {
    let (mut quoted, mut escaped) = (false, false);
    text.iter().position(|byte| {
        match (quoted, *byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => quoted = !quoted,
            (false, byte) => return byte == separator,
            (true, _) => {}
        }
        false
    })
}

/// Whether two texts are equal except for the case of letters. Like `eq_ignore_ascii_case`, but compares eight bytes
/// at a time, because field names are compared very often.
pub fn same_name(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let (Some((start, last)), Some((other_start, other_last))) = (ends(one), ends(other)) else {
        return one.eq_ignore_ascii_case(other);
    };
    // Some of the last eight bytes may have been compared already.
    let inner = start.iter().zip(other_start).all(|(one, other)| is_same_word(*one, *other));
    inner && is_same_word(last, other_last)
}

/// Splits a text of at least eight bytes into whole words, and returns its last eight bytes, too.
fn ends(text: &[u8]) -> Option<(&[[u8; 8]], [u8; 8])> {
    Some((text.as_chunks::<8>().0, *text.last_chunk()?))
}

fn is_same_word(one: [u8; 8], other: [u8; 8]) -> bool {
    const CASE: u64 = u64::from_le_bytes([0x20; 8]);
    const SEVEN: u64 = u64::from_le_bytes([0x7f; 8]);
    const HIGH: u64 = u64::from_le_bytes([0x80; 8]);
    let (one, differs) = (u64::from_le_bytes(one), u64::from_le_bytes(one) ^ u64::from_le_bytes(other));
    if differs == 0 {
        return true;
    }
    if differs & !CASE != 0 {
        return false;
    }
    // The highest bit of each byte that is a letter. The sums cannot carry into the next byte: both addends have
    // seven bits.
    let lower = (one | CASE) & SEVEN;
    let from_a = lower + u64::from_le_bytes([0x80 - b'a'; 8]);
    let behind_z = lower + u64::from_le_bytes([0x7f - b'z'; 8]);
    let letters = from_a & !behind_z & !one & HIGH;
    (differs << 2) & !letters == 0
}

/// Removes the optional white space (only SP and HTAB) around a text.
pub fn trim(text: &[u8]) -> &[u8] {
    trim_end(trim_start(text))
}

/// Removes the optional white space at the end.
pub fn trim_end(mut text: &[u8]) -> &[u8] {
    while let [rest @ .., b' ' | b'\t'] = text {
        text = rest;
    }
    text
}

/// Removes the optional white space at the beginning.
pub fn trim_start(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] = text {
        text = rest;
    }
    text
}

/// Whether the bytes are a token (RFC 9110 Sec. 5.6.2).
pub fn is_token(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().copied().all(is_token_byte)
}

/// Whether a token may contain this byte.
pub const fn is_token_byte(byte: u8) -> bool {
    // Always in bounds: there is an entry for each byte.
    TOKEN_BYTES[byte as usize]
}

/// Which bytes are tchar. A table, because field names are checked byte by byte.
static TOKEN_BYTES: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    loop {
        table[byte as usize] = is_tchar(byte);
        if byte == u8::MAX {
            break;
        }
        byte += 1;
    }
    table
};

const fn is_tchar(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'!' | b'#'
                | b'$'
                | b'%'
                | b'&'
                | b'\''
                | b'*'
                | b'+'
                | b'-'
                | b'.'
                | b'^'
                | b'_'
                | b'`'
                | b'|'
                | b'~'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_joined_and_taken_out() {
        let mut fields = Fields::from([("Vary", "A"), ("ETag", "\"1\""), ("vary", "b, c"), ("X", "")]);
        assert_eq!(fields.joined("VARY").as_deref(), Some(&b"A, b, c"[..]));
        assert_eq!(fields.members("vary").collect::<Vec<_>>(), [&b"A"[..], b"b", b"c"]);
        assert!(fields.has_member("Vary", "B") && !fields.has("no"));
        assert!(fields.remove("vary") && !fields.remove("vary"));
        fields.set("x", "1");
        let mut out = Vec::new();
        fields.write_to(&mut out);
        assert_eq!(out, b"ETag: \"1\"\r\nx: 1\r\n");
    }

    #[test]
    fn numbers_are_written_and_left_alone_where_they_stand() {
        let mut fields = Fields::from([("Content-Length", "10"), ("X", "1")]);
        fields.set_number("content-length", 10);
        fields.push_number("Age", 0);
        fields.push_number("Most", u64::MAX);
        fields.push_pieces("Via", &[b"1.1", b" ", b"edge"]);
        let mut out = Vec::new();
        fields.write_to(&mut out);
        let text = "Content-Length: 10\r\nX: 1\r\nAge: 0\r\nMost: 18446744073709551615\r\nVia: 1.1 edge\r\n";
        assert_eq!(String::from_utf8(out).unwrap(), text);
        fields.set_number("X", 2);
        fields.push("x", "2");
        fields.set_number("x", 2);
        assert_eq!(fields.all("x").collect::<Vec<_>>(), [b"2"], "two lines become one");
        assert_eq!(fields.clone_with_room(9, 1), fields);
    }

    #[test]
    fn a_member_is_found_wherever_it_stands_and_no_part_of_one_is() {
        for line in ["close", "CLOSE", " close", "close,", "a, close", "close , a", "a=\"b\", close"] {
            assert!(Fields::from([("Connection", line)]).has_member("connection", "close"), "{line}");
            assert!(
                Fields::from([("Connection", "a"), ("Connection", line)]).has_member("connection", "close")
            );
        }
        for line in ["", "clos", "closed", "a-close", "clo, se", "a=\"b, close\"", "a close"] {
            assert!(!Fields::from([("Connection", line)]).has_member("connection", "close"), "{line}");
        }
    }

    #[test]
    fn names_are_compared_as_bytes_are() {
        for length in [0, 1, 7, 8, 9, 15, 16, 17, 24] {
            let name: Vec<u8> = b"Transfer-Encoding: 0@z[".iter().copied().cycle().take(length).collect();
            assert!(
                same_name(&name, &name.to_ascii_uppercase()) && same_name(&name.to_ascii_lowercase(), &name)
            );
            for place in 0..length {
                for byte in 0..=u8::MAX {
                    let mut other = name.clone();
                    other[place] = byte;
                    assert_eq!(same_name(&name, &other), name.eq_ignore_ascii_case(&other), "{other:?}");
                    for twin in [byte ^ 0x20, byte ^ 0x80, byte ^ 0xa0] {
                        let mut twins = other.clone();
                        twins[place] = twin;
                        assert_eq!(
                            same_name(&other, &twins),
                            other.eq_ignore_ascii_case(&twins),
                            "{twins:?}"
                        );
                    }
                }
            }
            assert!(!same_name(&name, b"a name of another length than all"));
        }
    }

    #[test]
    fn commas_in_quotes_separate_nothing() {
        let list = |text: &'static str| {
            members(text.as_bytes()).map(|m| std::str::from_utf8(m).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(list(r#" a ,, b="x,\"y,", c"#), ["a", r#"b="x,\"y,""#, "c"]);
        assert_eq!(list(r#"a="open, b"#), [r#"a="open, b"#]);
        assert_eq!(list(" ,\t, "), [""; 0]);
    }
}
