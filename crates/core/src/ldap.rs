//! The first request of an LDAP client (RFC 4511): the operation, and the entry that it is about. This is enough to
//! choose a server by it.
//!
//! An anonymous bind does not name an entry, and many clients wait for its result before they send the request that
//! does. So a proxy answers the bind itself ([`answer_to_anonymous_bind`]), and chooses the server by the next
//! request. The server gets both requests, and [`BindAnswer`] removes its answer to the bind.

/// Longest request that is examined, in bytes. A search without huge filters needs far less.
const LONGEST: usize = 1 << 20;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// The client authenticates. The entry is its own.
    Bind,
    /// The client searches for entries. The entry is the base of the search.
    Search,
    /// The client changes an entry.
    Modify,
    /// The client adds an entry.
    Add,
    /// The client deletes an entry.
    Delete,
    /// The client renames an entry.
    ModifyDn,
    /// The client compares an attribute of an entry.
    Compare,
    /// An extended operation, such as StartTLS. It is not about an entry.
    Extended,
}

/// A client's first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The operation.
    pub operation: Operation,
    /// The distinguished name of the entry, as written. Empty for an anonymous bind or an extended operation.
    pub dn: &'a str,
}

/// What the first bytes of a client are. An anonymous bind before the request does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First<'a> {
    /// The bytes can still become a request.
    NeedMore,
    /// The bytes are not a request.
    NotLdap,
    /// The bytes are a request. Its end may be missing.
    Request(Request<'a>),
}

/// Why an element cannot be read.
enum Stop {
    NeedMore,
    NotLdap,
}

/// One element (X.690, definite length): its tag, and where its content begins and ends.
struct Element {
    tag: u8,
    start: usize,
    end: usize,
}

fn element(bytes: &[u8], at: usize) -> Result<Element, Stop> {
    let byte = |at: usize| bytes.get(at).copied().ok_or(Stop::NeedMore);
    let (tag, first) = (byte(at)?, byte(at + 1)?);
    let (length, start) = match first {
        0..=0x7f => (usize::from(first), at + 2),
        0x81..=0x84 => {
            let count = usize::from(first & 0x7f);
            let mut length = 0;
            for offset in 0..count {
                length = length << 8 | usize::from(byte(at + 2 + offset)?);
            }
            (length, at + 2 + count)
        }
        // The indefinite form is forbidden (RFC 4511 Sec. 5.1).
        _ => return Err(Stop::NotLdap),
    };
    if length > LONGEST {
        return Err(Stop::NotLdap);
    }
    Ok(Element { tag, start, end: start + length })
}

/// As [`element`], but the element must have this tag.
fn expect(bytes: &[u8], at: usize, tag: u8) -> Result<Element, Stop> {
    match bytes.get(at) {
        None => Err(Stop::NeedMore),
        Some(found) if *found == tag => element(bytes, at),
        Some(_) => Err(Stop::NotLdap),
    }
}

/// Parses the first request, or the second one if the first is an anonymous bind. Returns [`First::NeedMore`] only while
/// the bytes can still become one.
pub fn first_request(bytes: &[u8]) -> First<'_> {
    let read = match anonymous_bind(bytes) {
        Ok(Some(bind)) => read(bytes.get(bind.end..).unwrap_or_default()),
        Ok(None) => read(bytes),
        Err(stop) => Err(stop),
    };
    match read {
        Ok(request) => First::Request(request),
        Err(Stop::NeedMore) => First::NeedMore,
        Err(Stop::NotLdap) => First::NotLdap,
    }
}

const SEQUENCE: u8 = 0x30;
const INTEGER: u8 = 0x02;
const OCTETS: u8 = 0x04;
const BIND: u8 = 0x60;
const BIND_ANSWER: u8 = 0x61;
/// The choice `simple` of a bind's authentication.
const SIMPLE: u8 = 0x80;

/// The beginning of a message: the whole, its number, and its operation.
fn head(bytes: &[u8]) -> Result<(Element, Element, Element), Stop> {
    let message = expect(bytes, 0, SEQUENCE)?;
    let id = expect(bytes, message.start, INTEGER)?;
    if !(1..=4).contains(&(id.end - id.start)) {
        return Err(Stop::NotLdap);
    }
    let operation = element(bytes, id.end)?;
    if operation.end > message.end {
        return Err(Stop::NotLdap);
    }
    Ok((message, id, operation))
}

/// An anonymous bind: the number of its message, and where the message ends.
struct AnonymousBind {
    id: u32,
    end: usize,
}

/// Reads an anonymous bind: version 3, no name, an empty simple password, no controls (RFC 4513 Sec. 5.1.1). `None`
/// if the bytes begin with another request.
fn anonymous_bind(bytes: &[u8]) -> Result<Option<AnonymousBind>, Stop> {
    let (message, id, bind) = head(bytes)?;
    if bind.tag != BIND || bind.end != message.end {
        return Ok(None);
    }
    let version = expect(bytes, bind.start, INTEGER)?;
    let name = expect(bytes, version.end, OCTETS)?;
    if name.end != name.start || number(bytes, &version)? != 3 {
        return Ok(None);
    }
    let authentication = element(bytes, name.end)?;
    let is_anonymous = authentication.tag == SIMPLE
        && authentication.end == authentication.start
        && authentication.end == message.end;
    let id = number(bytes, &id)?;
    Ok((is_anonymous && id <= i32::MAX as u32).then_some(AnonymousBind { id, end: message.end }))
}

/// The value of an INTEGER of at most four bytes.
fn number(bytes: &[u8], element: &Element) -> Result<u32, Stop> {
    if element.end - element.start > 4 {
        return Err(Stop::NotLdap);
    }
    let value = bytes.get(element.start..element.end).ok_or(Stop::NeedMore)?;
    Ok(value.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)))
}

/// Returns the answer to a client that has sent exactly one anonymous bind and nothing else, and the state that later
/// removes the server's own answer. `None` for other bytes.
pub fn answer_to_anonymous_bind(bytes: &[u8]) -> Option<(Vec<u8>, BindAnswer)> {
    let bind = anonymous_bind(bytes).ok().flatten().filter(|bind| bind.end == bytes.len())?;
    // The shortest form, as X.690, Sec. 8.3.2 demands; the number is never negative.
    let id: Vec<u8> =
        bind.id.to_be_bytes().into_iter().skip((bind.id.leading_zeros() as usize).min(31) / 8).collect();
    let sign = usize::from(id.first().is_some_and(|byte| byte & 0x80 != 0));
    let id = [&[0][..sign], &id].concat();
    // Result code 0 (success), no matched name, no message.
    let result = [BIND_ANSWER, 7, 0x0a, 1, 0, OCTETS, 0, OCTETS, 0];
    let lengths = [2 + id.len() + result.len(), id.len()].map(u8::try_from);
    let [Ok(all), Ok(of_id)] = lengths else { return None };
    let head = [SEQUENCE, all, INTEGER, of_id];
    Some(([&head[..], &id, &result].concat(), BindAnswer::new(bind.id)))
}

/// Removes a server's answer to an anonymous bind from the beginning of its stream, whatever its result is. A session
/// whose bind has failed is anonymous, too (RFC 4511 Sec. 4.2.1). A stream that begins with another message stays
/// unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindAnswer {
    id: u32,
    state: AnswerState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum AnswerState {
    /// Too few bytes to know what they are: at most [`BindAnswer::HEAD`].
    Head(Vec<u8>),
    /// This many bytes of the answer are still to come.
    Inside(usize),
    /// The rest belongs to the client.
    Over,
}

impl BindAnswer {
    /// Most bytes that show what a message is: three heads of elements with long lengths, and a number of four bytes.
    const HEAD: usize = 3 * 6 + 4;

    const fn new(id: u32) -> Self {
        Self { id, state: AnswerState::Head(Vec::new()) }
    }

    /// Whether all later bytes stay as they are.
    pub fn is_over(&self) -> bool {
        self.state == AnswerState::Over
    }

    /// Returns what the client gets for the next bytes of the server.
    pub fn pass(&mut self, bytes: &[u8]) -> Vec<u8> {
        match &mut self.state {
            AnswerState::Over => bytes.to_vec(),
            AnswerState::Inside(left) => {
                let left = *left;
                self.skip(left, bytes)
            }
            AnswerState::Head(seen) => {
                let before = seen.len();
                seen.extend(bytes.iter().take(Self::HEAD - before));
                match answer_end(self.id, seen) {
                    Err(Stop::NeedMore) => Vec::new(),
                    Ok(Some(end)) => self.skip(end.saturating_sub(before), bytes),
                    Ok(None) | Err(Stop::NotLdap) => {
                        seen.truncate(before);
                        let all = [seen.as_slice(), bytes].concat();
                        self.state = AnswerState::Over;
                        all
                    }
                }
            }
        }
    }

    fn skip(&mut self, left: usize, bytes: &[u8]) -> Vec<u8> {
        self.state = match left.saturating_sub(bytes.len()) {
            0 => AnswerState::Over,
            left => AnswerState::Inside(left),
        };
        bytes.get(left..).unwrap_or_default().to_vec()
    }
}

/// Returns the end of the answer to the bind with this number. `None` if the bytes do not begin with it.
fn answer_end(id: u32, bytes: &[u8]) -> Result<Option<usize>, Stop> {
    let (message, found, operation) = head(bytes)?;
    Ok((operation.tag == BIND_ANSWER && number(bytes, &found)? == id).then_some(message.end))
}

fn read(bytes: &[u8]) -> Result<Request<'_>, Stop> {
    let (message, _, request) = head(bytes)?;
    let operation = match request.tag {
        BIND => Operation::Bind,
        0x63 => Operation::Search,
        0x66 => Operation::Modify,
        0x68 => Operation::Add,
        0x4a => Operation::Delete,
        0x6c => Operation::ModifyDn,
        0x6e => Operation::Compare,
        0x77 => Operation::Extended,
        _ => return Err(Stop::NotLdap),
    };
    let entry = match operation {
        Operation::Delete => request,
        Operation::Extended => return Ok(Request { operation, dn: "" }),
        // The version comes before the name.
        Operation::Bind => expect(bytes, expect(bytes, request.start, INTEGER)?.end, OCTETS)?,
        _ => expect(bytes, request.start, OCTETS)?,
    };
    if entry.end > message.end {
        return Err(Stop::NotLdap);
    }
    let dn = bytes.get(entry.start..entry.end).ok_or(Stop::NeedMore)?;
    let dn = std::str::from_utf8(dn).map_err(|_| Stop::NotLdap)?;
    Ok(Request { operation, dn })
}

/// Whether an entry is `base`, or is below it. The case of letters, and spaces around `,` and `=`, are ignored.
/// Escapes (RFC 4514 Sec. 2.4) are compared as they are written.
pub fn is_below(dn: &str, base: &str) -> bool {
    let (mut dn, mut base) = (parts(dn).rev(), parts(base).rev());
    loop {
        match (base.next(), dn.next()) {
            (None, _) => return true,
            (Some(wanted), Some(found)) if same(wanted, found) => {}
            _ => return false,
        }
    }
}

/// Returns the relative names of a distinguished name. A comma behind a backslash does not separate names.
fn parts(dn: &str) -> impl DoubleEndedIterator<Item = &str> {
    let mut escaped = false;
    let mut commas = Vec::new();
    for (at, c) in dn.char_indices() {
        if c == ',' && !escaped {
            commas.push(at);
        }
        escaped = c == '\\' && !escaped;
    }
    let starts = std::iter::once(0).chain(commas.clone().into_iter().map(|at| at + 1));
    let ends = commas.into_iter().chain([dn.len()]);
    let parts: Vec<_> = starts
        .zip(ends)
        .filter_map(|(start, end)| dn.get(start..end))
        .filter(|part| !part.trim().is_empty())
        .collect();
    parts.into_iter()
}

fn same(a: &str, b: &str) -> bool {
    match (a.split_once('='), b.split_once('=')) {
        (Some((kind, value)), Some((other_kind, other_value))) => {
            kind.trim().eq_ignore_ascii_case(other_kind.trim())
                && value.trim().to_lowercase() == other_value.trim().to_lowercase()
        }
        _ => a.trim().eq_ignore_ascii_case(b.trim()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bind of `ldapsearch -x -D cn=admin,dc=one -w secret`.
    const NAMED_BIND: &[u8] = b"\x30\x1f\x02\x01\x01\x60\x1a\x02\x01\x03\x04\x0dcn=admin,dc=1\x80\x06secret";
    /// The beginning of a search, with lengths in the long form that OpenLDAP writes.
    const SEARCH: &[u8] =
        b"\x30\x84\x00\x00\x00\x20\x02\x01\x02\x63\x84\x00\x00\x00\x17\x04\x04dc=1\x0a\x01\x02\x0a\x01\x00\x02\x01\x00\x02\x01\x00\x01\x01\x00";

    fn request(bytes: &[u8]) -> (Operation, &str) {
        match first_request(bytes) {
            First::Request(Request { operation, dn }) => (operation, dn),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn requests_of_every_kind() {
        assert_eq!(request(NAMED_BIND), (Operation::Bind, "cn=admin,dc=1"));
        assert_eq!(request(SEARCH), (Operation::Search, "dc=1"));
        assert_eq!(request(b"\x30\x09\x02\x01\x07\x4a\x04dc=1"), (Operation::Delete, "dc=1"));
        assert_eq!(request(b"\x30\x05\x02\x01\x01\x77\x00"), (Operation::Extended, ""));
        for (tag, operation) in [
            (0x66, Operation::Modify),
            (0x68, Operation::Add),
            (0x6c, Operation::ModifyDn),
            (0x6e, Operation::Compare),
        ] {
            let bytes = [&[0x30, 0x0b, 2, 1, 5, tag, 6, 4, 4][..], b"dc=1"].concat();
            assert_eq!(request(&bytes), (operation, "dc=1"));
        }
    }

    #[test]
    fn cut_off_anywhere_more_is_needed() {
        for (bytes, name_ends) in [(NAMED_BIND, 25), (SEARCH, 21)] {
            for end in 0..name_ends {
                assert_eq!(first_request(&bytes[..end]), First::NeedMore, "{end} bytes");
            }
            for end in name_ends..=bytes.len() {
                assert!(matches!(first_request(&bytes[..end]), First::Request(_)), "{end} bytes");
            }
        }
    }

    #[test]
    fn other_protocols_and_broken_requests_are_let_go_at_once() {
        let cases: [&[u8]; 8] = [
            b"GET / HTTP/1.1\r\n",
            b"\x16\x03\x01",
            b"\x30\x80",
            b"\x30\x05\x04",
            b"\x30\x05\x02\x00",
            b"\x30\x05\x02\x01\x01\x61\x00",
            b"\x30\x85",
            b"\x30\x05\x02\x01\x01\x4a\x7f",
        ];
        for bytes in cases {
            assert_eq!(first_request(bytes), First::NotLdap, "{bytes:?}");
        }
        assert_eq!(first_request(b"\x30\x06\x02\x01\x01\x4a\x01\xff"), First::NotLdap, "no text");
        assert_eq!(first_request(b"\x30\x84\xff\xff\xff\xff"), First::NotLdap, "nobody sends that much");
    }

    #[test]
    fn below_is_by_names_and_not_by_letters() {
        assert!(is_below("cn=Admin, DC = One,dc=example", "dc=one,dc=example"));
        assert!(is_below("dc=one,dc=example", "dc=one,dc=example"));
        assert!(is_below("anything", ""));
        assert!(!is_below("dc=example", "dc=one,dc=example"));
        assert!(!is_below("ou=dc=one,dc=example", "dc=one,dc=example"));
        assert!(
            !is_below("cn=x\\,dc=one,dc=example", "dc=one,dc=example"),
            "an escaped comma separates nothing"
        );
        assert!(!is_below("", "dc=one"));
    }

    /// The bind of `ldapsearch -x`.
    const ANONYMOUS: &[u8] = b"\x30\x0c\x02\x01\x01\x60\x07\x02\x01\x03\x04\x00\x80\x00";
    /// OpenLDAP's answer to it, and Active Directory's.
    const ANSWER: &[u8] = b"\x30\x0c\x02\x01\x01\x61\x07\x0a\x01\x00\x04\x00\x04\x00";
    const LONG_ANSWER: &[u8] =
        b"\x30\x84\x00\x00\x00\x10\x02\x01\x01\x61\x84\x00\x00\x00\x07\x0a\x01\x00\x04\x00\x04\x00";
    /// OpenLDAP's answer if `disallow bind_anon` is set.
    const REFUSAL: &[u8] =
        b"\x30\x25\x02\x01\x01\x61\x20\x0a\x01\x30\x04\x00\x04\x19anonymous bind disallowed";

    #[test]
    fn an_anonymous_bind_is_answered_and_the_next_request_decides() {
        assert_eq!(first_request(ANONYMOUS), First::NeedMore);
        let (answer, _) = answer_to_anonymous_bind(ANONYMOUS).expect("an answer");
        assert_eq!(answer, ANSWER);
        let both = [ANONYMOUS, SEARCH].concat();
        assert_eq!(request(&both), (Operation::Search, "dc=1"));
        for end in 0..ANONYMOUS.len() + 21 {
            assert_eq!(first_request(&both[..end]), First::NeedMore, "{end} bytes");
            let answers = answer_to_anonymous_bind(&both[..end]).is_some();
            assert_eq!(answers, end == ANONYMOUS.len(), "{end} bytes");
        }
        assert_eq!(request(&[ANONYMOUS, NAMED_BIND].concat()), (Operation::Bind, "cn=admin,dc=1"));
        assert_eq!(
            first_request(&[ANONYMOUS, b"\x30\x05\x02\x01\x02\x42\x00"].concat()),
            First::NotLdap,
            "unbind"
        );
    }

    #[test]
    fn the_number_of_the_bind_is_given_back_in_its_shortest_form() {
        for (id, wanted) in [
            (&b"\x02\x01\x00"[..], &b"\x02\x01\x00"[..]),
            (b"\x02\x01\x7f", b"\x02\x01\x7f"),
            (b"\x02\x02\x00\x80", b"\x02\x02\x00\x80"),
            (b"\x02\x04\x00\x00\x01\x00", b"\x02\x02\x01\x00"),
            (b"\x02\x04\x7f\xff\xff\xff", b"\x02\x04\x7f\xff\xff\xff"),
        ] {
            let bind = [&[0x30, id.len() as u8 + 9], id, &ANONYMOUS[5..]].concat();
            let (answer, _) = answer_to_anonymous_bind(&bind).expect("an answer");
            let expected = [&[0x30, wanted.len() as u8 + 9], wanted, &ANSWER[5..]].concat();
            assert_eq!(answer, expected, "{id:x?}");
        }
    }

    #[test]
    fn other_binds_are_not_answered() {
        let cases: [(&[u8], &str); 7] = [
            (NAMED_BIND, "it has a name and a password"),
            (b"\x30\x11\x02\x01\x01\x60\x0c\x02\x01\x03\x04\x05cn=me\x80\x00", "it has a name"),
            (b"\x30\x0d\x02\x01\x01\x60\x08\x02\x01\x03\x04\x00\x80\x01x", "it has a password"),
            (b"\x30\x0c\x02\x01\x01\x60\x07\x02\x01\x02\x04\x00\x80\x00", "version 2"),
            (b"\x30\x14\x02\x01\x01\x60\x0f\x02\x01\x03\x04\x00\xa3\x08\x04\x06GSSAPI", "SASL"),
            (
                b"\x30\x0e\x02\x01\x01\x60\x07\x02\x01\x03\x04\x00\x80\x00\xa0\x00",
                "it has controls, which may be critical",
            ),
            (b"\x30\x0f\x02\x04\xff\xff\xff\xff\x60\x07\x02\x01\x03\x04\x00\x80\x00", "a negative number"),
        ];
        for (bytes, why) in cases {
            assert_eq!(answer_to_anonymous_bind(bytes), None, "{why}");
            assert!(matches!(first_request(bytes), First::Request(_)), "{why}: it decides itself");
        }
    }

    #[test]
    fn the_servers_answer_is_removed_however_it_is_cut() {
        let rest = b"\x30\x0c\x02\x01\x02\x65\x07and the rest";
        let (_, fresh) = answer_to_anonymous_bind(ANONYMOUS).expect("an answer");
        for answer in [ANSWER, LONG_ANSWER, REFUSAL] {
            let stream = [answer, &rest[..]].concat();
            for first in 0..=stream.len() {
                for second in first..=stream.len() {
                    let mut removal = fresh.clone();
                    let parts = [&stream[..first], &stream[first..second], &stream[second..]];
                    let left: Vec<u8> = parts.iter().flat_map(|part| removal.pass(part)).collect();
                    assert_eq!((left.as_slice(), removal.is_over()), (&rest[..], true), "{first} {second}");
                }
            }
        }
        let mut removal = fresh.clone();
        assert_eq!(removal.pass(ANSWER), b"");
        assert!(removal.is_over(), "it is over with its last byte");
    }

    #[test]
    fn a_server_that_begins_with_something_else_is_passed_as_it_is() {
        let (_, fresh) = answer_to_anonymous_bind(ANONYMOUS).expect("an answer");
        let cases: [&[u8]; 4] = [
            b"\x30\x0c\x02\x01\x02\x61\x07\x0a\x01\x00\x04\x00\x04\x00 the answer to another bind",
            b"\x30\x84\x00\x00\x00\x0a\x02\x01\x00\x78\x05 a notice of disconnection",
            b"\x30\x05\x02\x01\x01\x61\x07 longer than its message",
            b"SSH-2.0-OpenSSH and so on",
        ];
        for stream in cases {
            for cut in 0..=stream.len() {
                let mut removal = fresh.clone();
                let left = [removal.pass(&stream[..cut]), removal.pass(&stream[cut..])].concat();
                assert_eq!((left.as_slice(), removal.is_over()), (stream, true), "{cut}");
            }
        }
    }
}
