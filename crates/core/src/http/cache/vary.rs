//! The request fields that a stored response was selected by (RFC 9111 Sec. 4.1).

use super::super::fields::{Fields, members};
use super::weigh::weight_of;

/// The selecting fields: the name in lower case and the value in a normal form. `None` if the request did not have
/// the field.
pub(super) type Selecting = Vec<(Vec<u8>, Option<Vec<u8>>)>;

/// Returns the selecting fields of a response to this request. `None` if another request can never match (`Vary: *`).
pub(super) fn selecting(response: &Fields, request: &Fields) -> Option<Selecting> {
    let mut found: Selecting = Vec::new();
    for name in response.members("vary") {
        if name == b"*" {
            return None;
        }
        let name = name.to_ascii_lowercase();
        if !found.iter().any(|(other, _)| *other == name) {
            let value = value_of(request, &name);
            found.push((name, value));
        }
    }
    Some(found)
}

/// Whether a request has the same selecting fields.
pub(super) fn matches(selecting: &Selecting, request: &Fields) -> bool {
    selecting.iter().all(|(name, value)| value_of(request, name) == *value)
}

/// Returns the value of a field in a normal form, with its lines joined. For Accept fields, white space, the case of
/// letters and some orders do not matter, so they are normalised.
fn value_of(request: &Fields, name: &[u8]) -> Option<Vec<u8>> {
    let joined = request.joined(name)?;
    match name {
        b"accept" | b"accept-encoding" | b"accept-language" | b"accept-charset" => {
            let mut list: Vec<_> = members(&joined).map(in_one_spelling).collect();
            // The order of codings has no meaning, only their weights. For languages, some servers prefer the first
            // one.
            if name == b"accept-encoding" {
                list.sort_unstable();
            }
            Some(list.join(&b','))
        }
        _ => Some(joined.into_owned()),
    }
}

/// Returns a member without white space, in lower case, and with its weight in a normal form: left out if it is 1,
/// without zeros at its end.
fn in_one_spelling(member: &[u8]) -> Vec<u8> {
    let mut text: Vec<u8> =
        member.iter().filter(|byte| !matches!(byte, b' ' | b'\t')).map(u8::to_ascii_lowercase).collect();
    let begin = text.windows(3).rposition(|three| three == b";q=");
    let weight = begin.and_then(|at| text.get(at + 3..)).filter(|weight| !weight.contains(&b';'));
    if let (Some(at), Some(weight)) = (begin, weight.map(weight_of)) {
        // An invalid weight is left unchanged.
        match weight {
            1000 => text.truncate(at),
            1..1000 => {
                text.truncate(at + 3);
                let digits = format!("0.{weight:03}");
                text.extend_from_slice(digits.trim_end_matches('0').as_bytes());
            }
            _ => {}
        }
    }
    text
}
