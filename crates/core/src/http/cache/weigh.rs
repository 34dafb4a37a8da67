//! How much a request prefers a stored response, according to the weights of its Accept fields (RFC 9110 Sec. 12.4.2,
//! 12.5; RFC 9111 Sec. 4.1).

use super::super::fields::{Fields, members, trim};
use super::store::Stored;

/// A weight in thousandths: 0 is not acceptable, 1000 is preferred most.
pub(super) type Weight = u16;

/// The weight of a member without `q`.
const FULL: Weight = 1000;
/// The weight of unencoded content if the request does not mention it: acceptable, but after all codings that it
/// names.
const UNNAMED: Weight = 1;

/// A request field with weights, and the response field that it is about.
struct Dimension {
    asks: &'static [u8],
    says: &'static str,
    /// Returns the weight that a request value gives to a response value. `None` if the request does not mention it.
    weigh: fn(&[u8], &[u8]) -> Option<Weight>,
    /// The value of a response without the field.
    absent: Option<&'static [u8]>,
}

const DIMENSIONS: [Dimension; 3] = [
    Dimension { asks: b"accept", says: "content-type", weigh: of_type, absent: None },
    Dimension { asks: b"accept-language", says: "content-language", weigh: of_language, absent: None },
    Dimension {
        asks: b"accept-encoding",
        says: "content-encoding",
        weigh: of_coding,
        absent: Some(b"identity"),
    },
];

/// Returns the preference for each of several stored responses that a request selects. It is the product of the
/// weights of every field that at least one of them was selected by. A field is ignored if one of the responses does
/// not state its own value.
pub(super) fn preferences(request: &Fields, selected: &[&Stored]) -> Vec<u64> {
    let mut found = vec![1; selected.len()];
    for dimension in &DIMENSIONS {
        let names_it = |one: &&Stored| one.selecting.iter().any(|(name, _)| name == dimension.asks);
        if !selected.iter().any(names_it) {
            continue;
        }
        let Some(asked) = request.joined(dimension.asks) else { continue };
        let weights: Option<Vec<Weight>> =
            selected.iter().map(|one| dimension.weight(&asked, &one.fields)).collect();
        for (preference, weight) in found.iter_mut().zip(weights.into_iter().flatten()) {
            *preference *= u64::from(weight);
        }
    }
    found
}

impl Dimension {
    /// Returns the weight of a response. `None` if it does not state its value.
    fn weight(&self, asked: &[u8], response: &Fields) -> Option<Weight> {
        let said = response.joined(self.says);
        let said = said.as_deref().or(self.absent)?;
        let one = |value: &[u8]| (self.weigh)(asked, value).unwrap_or(0);
        // If content is in several languages, one that the client wants is enough. But the client must understand
        // every coding.
        let all = members(said).map(one);
        if self.says == "content-encoding" { all.min() } else { all.max() }
    }
}

/// A member of an Accept field: its name, its parameters before the weight, and the weight.
struct Named<'a> {
    name: &'a [u8],
    parameters: Vec<&'a [u8]>,
    weight: Weight,
}

fn named(list: &[u8]) -> impl Iterator<Item = Named<'_>> {
    members(list).map(|member| {
        let mut pieces = member.split(|byte| *byte == b';').map(trim);
        let name = pieces.next().unwrap_or_default();
        let (mut parameters, mut weight) = (Vec::new(), FULL);
        for piece in pieces {
            match piece {
                [b'q' | b'Q', b'=', value @ ..] => {
                    weight = weight_of(value);
                    break;
                }
                _ => parameters.push(piece),
            }
        }
        Named { name, parameters, weight }
    })
}

/// Reads a weight with at most three digits behind the point. An invalid weight counts as not acceptable.
pub(super) fn weight_of(text: &[u8]) -> Weight {
    let (whole, rest) = match text {
        [whole @ (b'0' | b'1')] => (whole, &[][..]),
        [whole @ (b'0' | b'1'), b'.', rest @ ..] if rest.len() <= 3 => (whole, rest),
        _ => return 0,
    };
    if !rest.iter().all(u8::is_ascii_digit) {
        return 0;
    }
    let mut parts = rest.iter().map(|digit| Weight::from(digit - b'0'));
    let thousandths = [100, 10, 1].iter().map(|unit| unit * parts.next().unwrap_or(0)).sum::<Weight>();
    (Weight::from(whole - b'0') * 1000 + thousandths).min(FULL)
}

/// Returns the weight of the most specific member that matches. `specific` measures how specific a member is.
fn most_specific<'a>(list: &'a [u8], specific: impl Fn(&Named<'a>) -> Option<usize>) -> Option<Weight> {
    let fitting = named(list).filter_map(|one| Some((specific(&one)?, one.weight)));
    fitting.max_by_key(|(specific, _)| *specific).map(|(_, weight)| weight)
}

fn of_type(asked: &[u8], kind: &[u8]) -> Option<Weight> {
    let mut pieces = kind.split(|byte| *byte == b';').map(trim);
    let name = pieces.next().unwrap_or_default();
    let parameters: Vec<&[u8]> = pieces.collect();
    let main = name.split(|byte| *byte == b'/').next().unwrap_or_default();
    most_specific(asked, |one| {
        let has = |wanted: &&[u8]| parameters.iter().any(|own| own.eq_ignore_ascii_case(wanted));
        match one.name {
            b"*/*" => Some(0),
            [range @ .., b'/', b'*'] => range.eq_ignore_ascii_case(main).then_some(1),
            other if other.eq_ignore_ascii_case(name) => {
                one.parameters.iter().all(has).then_some(2 + one.parameters.len())
            }
            _ => None,
        }
    })
}

fn of_language(asked: &[u8], language: &[u8]) -> Option<Weight> {
    most_specific(asked, |one| {
        // Basic filtering: the range is the tag, or its beginning up to a hyphen (RFC 4647 Sec. 3.3.1).
        let begins = language.get(..one.name.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(one.name));
        match one.name {
            b"*" => Some(0),
            _ if begins && matches!(language.get(one.name.len()), None | Some(b'-')) => Some(one.name.len()),
            _ => None,
        }
    })
}

fn of_coding(asked: &[u8], coding: &[u8]) -> Option<Weight> {
    fn plain(name: &[u8]) -> &[u8] {
        match name.split_at_checked(2) {
            Some((b"x-" | b"X-", rest)) => rest,
            _ => name,
        }
    }
    let said = most_specific(asked, |one| match one.name {
        b"*" => Some(0),
        other => plain(other).eq_ignore_ascii_case(plain(coding)).then_some(1),
    });
    said.or_else(|| coding.eq_ignore_ascii_case(b"identity").then_some(UNNAMED))
}
