//! What is wrong with a filter that is being written, and what may come next.

use super::AdminState;
use super::error::ApiError;
use super::flows::Asked;
use axum::Json;
use axum::extract::{Query, State};
use serde::{Deserialize, Serialize};
use sidetrack_core::filter::Filter;

/// Most words that are offered.
const WORDS_MAX: usize = 50;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Question {
    #[serde(default)]
    filter: String,
    /// Where the cursor is, in characters (UTF-16 code units, as browsers count). Left out: at the end.
    at: Option<usize>,
}

/// The answer of `/v1/filter`. Places are in UTF-16 code units.
#[derive(Serialize)]
pub(super) struct Answer {
    is_valid: bool,
    error: Option<Wrong>,
    completion: Offer,
}

#[derive(Serialize)]
struct Wrong {
    message: String,
    from: usize,
    to: usize,
}

#[derive(Serialize)]
struct Offer {
    from: usize,
    words: Vec<String>,
    field: Option<String>,
}

/// The byte at a place.
fn byte_at(text: &str, at: usize) -> usize {
    let mut units = 0;
    let reached = |(_, c): &(usize, char)| {
        let is_there = units >= at;
        units += c.len_utf16();
        is_there
    };
    text.char_indices().find(reached).map_or(text.len(), |(byte, _)| byte)
}

/// The place of a byte.
fn place_of(text: &str, byte: usize) -> usize {
    text.get(..byte).map_or_else(|| text.encode_utf16().count(), |before| before.encode_utf16().count())
}

pub(super) async fn check(
    State(state): State<AdminState>,
    query: Asked<Question>,
) -> Result<Json<Answer>, ApiError> {
    let help = "the path takes filter=… and at=N, the place of the cursor";
    let Query(Question { filter: text, at }) =
        query.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let values = |field: &str| match field {
        "rule" => state.control.policy().rules().iter().map(|rule| rule.name.to_string()).collect(),
        "listener" => state.control.listeners().into_iter().map(|listener| listener.name).collect(),
        _ => Vec::new(),
    };
    let error = Filter::parse(&text).err();
    let mut found = Filter::complete(&text, at.map_or(text.len(), |at| byte_at(&text, at)), values);
    found.words.truncate(WORDS_MAX);
    Ok(Json(Answer {
        is_valid: error.is_none(),
        error: error.map(|error| Wrong {
            from: place_of(&text, error.at.start),
            to: place_of(&text, error.at.end),
            message: error.message,
        }),
        completion: Offer { from: place_of(&text, found.from), words: found.words, field: found.field },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_those_of_a_browser() {
        let text = "aä😀b";
        for (place, byte) in [(0, 0), (1, 1), (2, 3), (4, 7), (5, 8), (9, 8)] {
            assert_eq!(byte_at(text, place), byte, "{place}");
            assert_eq!(place_of(text, byte), place.min(5), "{byte}");
        }
        assert_eq!(place_of(text, 2), 5, "inside of a character");
    }
}
