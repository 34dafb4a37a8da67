//! Names that form one segment of a request's path.

use super::api::Submission;
use super::link::No;
use axum::extract::{FromRequestParts, Path, Query};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::IntoResponse;
use serde::Deserialize;
use std::fmt::Write as _;

/// Longest name of an application, bytes.
pub const NAME_MAX: usize = 48;

/// The allowed form of an application's name.
const RULE: &str = "a name has 1 to 48 letters, digits and - _ . and is not . or ..";

/// Checks the name of an application. It must be one path segment that clients and servers keep: both remove `.`
/// and `..` (RFC 3986, Sec. 5.2.4).
///
/// # Errors
/// Says what is wrong, and what a name may be.
pub fn check(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if is_segment(name) && name.len() <= NAME_MAX && name.chars().all(fits) {
        Ok(())
    } else {
        Err(format!("'{}' is not a valid name of an application: {RULE}", name.escape_debug()))
    }
}

/// Returns whether this text can be one segment of a path, once it is escaped.
pub fn is_segment(text: &str) -> bool {
    !matches!(text, "" | "." | "..")
}

/// Escapes a text so that it is one segment of a path (RFC 3986, Sec. 2.1).
///
/// # Errors
/// Fails if no escape makes it one segment: it is empty, `.` or `..`.
pub fn segment(text: &str) -> Result<String, String> {
    if !is_segment(text) {
        return Err(format!("'{text}' cannot be a name: it is empty, . or .."));
    }
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    Ok(escaped)
}

/// The name of an application in a request's path. A request with another text there is rejected.
#[derive(Clone, Debug)]
pub struct Name(pub String);

/// The identity in the query of a request about a submission. Missing: a submission from before there were
/// identities.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    #[serde(default)]
    id: String,
}

impl Identity {
    /// Returns the submission with this name.
    ///
    /// # Errors
    /// Fails if an application cannot have this name.
    pub fn of(self, name: String) -> Result<Submission, No> {
        check(&name).map_err(refused)?;
        Ok(Submission { name, id: self.id })
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Submission {
    type Rejection = axum::response::Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Self::Rejection> {
        let Name(name) = Name::from_request_parts(parts, state).await?;
        let identity = Query::<Identity>::from_request_parts(parts, state).await;
        let Query(identity) = identity.map_err(IntoResponse::into_response)?;
        identity.of(name).map_err(IntoResponse::into_response)
    }
}

/// Rejects a name with status 400.
pub fn refused(error: String) -> No {
    No::new(StatusCode::BAD_REQUEST, error, "correct the name")
}

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = axum::response::Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Self::Rejection> {
        let Path(name) =
            Path::<String>::from_request_parts(parts, state).await.map_err(IntoResponse::into_response)?;
        check(&name).map_err(|error| refused(error).into_response())?;
        Ok(Self(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_segment_of_a_path() {
        for good in ["a", "trial-1", "x.y", "...", ".a", "A_9", &"n".repeat(NAME_MAX)] {
            assert_eq!(check(good), Ok(()), "{good}");
            assert_eq!(segment(good).as_deref(), Ok(good), "nothing to escape");
        }
        for bad in
            ["", ".", "..", "a/b", "../x", "a b", "a%2F", "ä", "a\n", "a?b", "a#", &"n".repeat(NAME_MAX + 1)]
        {
            let error = check(bad).unwrap_err();
            assert!(error.contains(RULE), "{error}");
        }
    }

    #[test]
    fn other_texts_are_escaped_into_one_segment_or_refused() {
        assert_eq!(segment("a/b c?%ä").as_deref(), Ok("a%2Fb%20c%3F%25%C3%A4"));
        for bad in ["", ".", ".."] {
            assert!(segment(bad).is_err(), "'{bad}'");
        }
    }
}
