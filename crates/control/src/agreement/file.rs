//! Reading the file of an agreement.

use super::cedar::{Cedar, WhenError};
use super::check::{Check, Checked};
use super::raw;
use sidetrack_common::agreement::Book;
use sidetrack_common::file::{ConfigError, Problem, parse};
use sidetrack_core::agreement::Agreement;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// Where the keys are documented, for messages.
const KEYS: &str = "docs/control.md";

/// Reads a file. Agreements that are not valid at `now` are left out.
///
/// # Errors
/// Lists all errors in the file with their places, or says why the file cannot be read.
pub fn load(path: &Path, now: SystemTime) -> Result<Book, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|error| ConfigError::unreadable(path, &error))?;
    read(&path.display().to_string(), &text, now)
}

/// Reads a text; `name` is the file name for messages.
///
/// # Errors
/// Lists all errors in the text with their places.
pub fn read(name: &str, text: &str, now: SystemTime) -> Result<Book, ConfigError> {
    let refused = |problems| ConfigError::new(name, text, problems);
    let file: raw::File = parse(text, KEYS).map_err(refused)?;
    let mut check = Check { file: &file, now, problems: Vec::new() };
    let checked = check.check();
    let problems = check.problems;
    let Some(Checked { facts, labels, clauses, purposes, next_change }) = checked else {
        return Err(refused(problems));
    };
    let (places, clauses): (Vec<_>, Vec<_>) = clauses.into_iter().unzip();
    let names = clauses.iter().map(|clause| clause.name.clone()).collect();
    let reasoner = Cedar::new(&facts, &labels, clauses).map_err(|wrong| {
        let problem = |error: &WhenError| when_problem(&file, text, &places, error);
        refused(wrong.iter().map(problem).collect())
    })?;
    let agreement = Agreement::new(facts, Arc::new(reasoner));
    Ok(Book::new(text, agreement, names, purposes, next_change))
}

/// Reports an error in a condition, at its place in the file.
fn when_problem(file: &raw::File, text: &str, places: &[usize], error: &WhenError) -> Problem {
    let raw = places.get(error.agreement).and_then(|place| file.agreement.get(*place));
    let when = raw.and_then(|raw| raw.when.as_ref());
    let span = when
        .map(sidetrack_common::file::At::span)
        .or_else(|| raw.map(sidetrack_common::file::At::span))
        .unwrap_or(0..0);
    // Offsets in the condition are valid in the file only if it is written without escapes.
    let inside = error.span.clone().and_then(|inner| {
        let written = text.get(span.clone())?;
        let begins = span.start + written.find(when?.as_str())?;
        Some(begins + inner.start..begins + inner.end)
    });
    let message = format!("the condition cannot be understood: {}", error.message);
    Problem::error(inside.unwrap_or(span), message, "docs/control.md says what a condition can speak of")
}
