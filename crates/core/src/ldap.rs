//! The first request of an LDAP client (RFC 4511): which operation, and which entry it is about. Enough to choose a server
//! by it, and nothing more.

/// Longest request that is looked at, bytes: what a search without huge filters needs many times over.
const LONGEST: usize = 1 << 20;

/// What a client asks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// It says who it is; the entry is its own.
    Bind,
    /// It looks for entries; the entry is the base of the search.
    Search,
    /// It changes an entry.
    Modify,
    /// It adds an entry.
    Add,
    /// It deletes an entry.
    Delete,
    /// It renames an entry.
    ModifyDn,
    /// It compares an attribute of an entry.
    Compare,
    /// An extended operation, such as StartTLS; about no entry.
    Extended,
}

/// A client's first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// What it asks.
    pub operation: Operation,
    /// The distinguished name of the entry it is about, as written; empty for an anonymous bind or an extended operation.
    pub dn: &'a str,
}

/// What the first bytes of a client say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First<'a> {
    /// They can still become a request.
    NeedMore,
    /// They are none.
    NotLdap,
    /// They are one; not all of it need be there.
    Request(Request<'a>),
}

/// Why an element cannot be read.
enum Stop {
    NeedMore,
    NotLdap,
}

/// One element (X.690, definite lengths): its tag, and where its content begins and ends.
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
        // The indefinite form is forbidden (RFC 4511, section 5.1).
        _ => return Err(Stop::NotLdap),
    };
    if length > LONGEST {
        return Err(Stop::NotLdap);
    }
    Ok(Element { tag, start, end: start + length })
}

/// As [`element`], of this kind.
fn expect(bytes: &[u8], at: usize, tag: u8) -> Result<Element, Stop> {
    match bytes.get(at) {
        None => Err(Stop::NeedMore),
        Some(found) if *found == tag => element(bytes, at),
        Some(_) => Err(Stop::NotLdap),
    }
}

/// Reads the first request. Answers [`First::NeedMore`] only while the bytes can still become one.
pub fn first_request(bytes: &[u8]) -> First<'_> {
    match read(bytes) {
        Ok(request) => First::Request(request),
        Err(Stop::NeedMore) => First::NeedMore,
        Err(Stop::NotLdap) => First::NotLdap,
    }
}

fn read(bytes: &[u8]) -> Result<Request<'_>, Stop> {
    const SEQUENCE: u8 = 0x30;
    const INTEGER: u8 = 0x02;
    const OCTETS: u8 = 0x04;
    let message = expect(bytes, 0, SEQUENCE)?;
    let id = expect(bytes, message.start, INTEGER)?;
    if !(1..=4).contains(&(id.end - id.start)) {
        return Err(Stop::NotLdap);
    }
    let request = element(bytes, id.end)?;
    if request.end > message.end {
        return Err(Stop::NotLdap);
    }
    let operation = match request.tag {
        0x60 => Operation::Bind,
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
        // The version comes first.
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

/// Whether an entry is `base`, or lies below it. Upper and lower case, and spaces around `,` and `=`, make no difference;
/// escapes (RFC 4514, section 2.4) are compared as they are written.
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

/// The relative names of a distinguished name; a comma behind a backslash separates none.
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

    /// `ldapsearch -x -D cn=admin,dc=one -w secret`: its bind.
    const BIND: &[u8] = b"\x30\x1f\x02\x01\x01\x60\x1a\x02\x01\x03\x04\x0dcn=admin,dc=1\x80\x06secret";
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
        assert_eq!(request(BIND), (Operation::Bind, "cn=admin,dc=1"));
        assert_eq!(request(SEARCH), (Operation::Search, "dc=1"));
        assert_eq!(request(b"\x30\x09\x02\x01\x07\x4a\x04dc=1"), (Operation::Delete, "dc=1"));
        assert_eq!(
            request(b"\x30\x0c\x02\x01\x01\x60\x07\x02\x01\x03\x04\x00\x80\x00"),
            (Operation::Bind, "")
        );
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
        for (bytes, name_ends) in [(BIND, 25), (SEARCH, 21)] {
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
}
