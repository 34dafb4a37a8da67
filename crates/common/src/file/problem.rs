//! Problems in a configuration: what is wrong, where, and what to do.

use super::lines::Lines;
use super::redact::redact;
use miette::{Diagnostic, GraphicalReportHandler, GraphicalTheme, LabeledSpan, Severity, SourceCode};
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// One error or warning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    message: String,
    help: String,
    severity: Severity,
    /// The place of the problem, then other places that explain it. Each has the words for its carets.
    labels: Vec<(Range<usize>, String)>,
}

impl Problem {
    /// An error at `span`: what is wrong, and what to do.
    pub fn error(span: Range<usize>, message: impl Into<String>, help: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            help: help.into(),
            severity: Severity::Error,
            labels: vec![(span, "here".to_owned())],
        }
    }

    /// A warning: the setting is valid but probably a mistake.
    pub fn warning(span: Range<usize>, message: impl Into<String>, help: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(span, message, help) }
    }

    /// Adds a second place with a text.
    #[must_use]
    pub fn and(mut self, span: Range<usize>, words: impl Into<String>) -> Self {
        self.labels.push((span, words.into()));
        self
    }

    /// Whether it is an error, not a warning.
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }

    /// The place of the problem.
    pub fn place(&self) -> Option<Range<usize>> {
        self.labels.first().map(|(span, _)| span.clone())
    }

    /// What is wrong.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What to do.
    pub fn help(&self) -> &str {
        &self.help
    }

    /// Removes the part of the message that would show a secret.
    fn without_secrets(mut self, text: &str, shown: &str) -> Self {
        let secret = |span: &Range<usize>| text.get(span.clone()) != shown.get(span.clone());
        if self.labels.first().is_some_and(|(span, _)| secret(span)) {
            self.message = self.message.split(": ").next().unwrap_or_default().to_owned();
        }
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Problem {}

impl Diagnostic for Problem {
    fn severity(&self) -> Option<Severity> {
        Some(self.severity)
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(Box::new(&self.help))
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let label = |(index, (span, words)): (usize, &(Range<usize>, String))| {
            let new =
                if index == 0 { LabeledSpan::new_primary_with_span } else { LabeledSpan::new_with_span };
            new(Some(words.clone()), span.clone())
        };
        Some(Box::new(self.labels.iter().enumerate().map(label)))
    }
}

/// The rejected configuration's errors as text for people. Programs exit with status 2.
#[derive(Clone, Debug)]
pub struct BadConfiguration(String);

impl std::fmt::Display for BadConfiguration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadConfiguration {}

impl From<ConfigError> for BadConfiguration {
    fn from(error: ConfigError) -> Self {
        Self(error.render(false))
    }
}

/// Why a configuration is rejected. `Display` shows one line, [`ConfigError::render`] the places with carets.
#[derive(Clone, Debug)]
pub struct ConfigError {
    name: String,
    /// The text with its secrets replaced by stars.
    text: Lines,
    problems: Vec<Problem>,
}

impl ConfigError {
    /// Errors and warnings of the file `name`; their places are offsets in `text`.
    pub fn new(name: &str, text: &str, mut problems: Vec<Problem>) -> Self {
        let shown = redact(text);
        problems.sort_by_key(|problem| {
            (!problem.is_error(), problem.labels.first().map_or(0, |(span, _)| span.start))
        });
        let problems = problems.into_iter().map(|problem| problem.without_secrets(text, &shown)).collect();
        Self { name: name.to_owned(), text: Lines::new(name, shown), problems }
    }

    /// Warnings of the accepted file `name`, rendered like errors.
    pub fn of_warnings(name: &str, text: &str, warnings: &[Problem]) -> Self {
        Self::new(name, text, warnings.to_vec())
    }

    /// Says that the file cannot be read, and why.
    pub fn unreadable(path: &Path, error: &std::io::Error) -> Self {
        let name = path.display().to_string();
        let help = match error.kind() {
            std::io::ErrorKind::NotFound => {
                "give the file with -c FILE; `sidetrack schema` tells what goes into it"
            }
            std::io::ErrorKind::InvalidData => "the file has to be UTF-8 text",
            _ => "check the permissions of the file and of the folders above it",
        };
        let mut problem = Problem::error(0..0, format!("cannot read {name}: {error}"), help);
        problem.labels.clear();
        Self { text: Lines::new(&name, String::new()), name, problems: vec![problem] }
    }

    /// The problems, errors first, each in the order of the file.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Line and column of a problem, both from 1; columns count characters. `None` if the problem is about the
    /// whole file.
    pub fn line_column(&self, problem: &Problem) -> Option<(usize, usize)> {
        let (span, _) = problem.labels.first()?;
        Some(self.text.line_column(span.start))
    }

    /// The name of the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Renders each problem with its place, carets and help. `colours` is for a terminal.
    pub fn render(&self, colours: bool) -> String {
        let theme = if colours { GraphicalTheme::unicode() } else { GraphicalTheme::unicode_nocolor() };
        let printer = GraphicalReportHandler::new_themed(theme).with_width(110).with_links(false);
        let mut out = String::new();
        for problem in &self.problems {
            let shown = Shown { problem, text: &self.text };
            if printer.render_report(&mut out, &shown).is_err() {
                out.push_str(&problem.message);
            }
            out.push('\n');
        }
        out
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let errors = self.problems.iter().filter(|problem| problem.is_error()).count();
        write!(f, "{}", self.name)?;
        if let Some(first) = self.problems.first() {
            if let Some((line, column)) = self.line_column(first) {
                write!(f, ":{line}:{column}")?;
            }
            write!(f, ": {} ({})", first.message, first.help)?;
        }
        if errors > 1 { write!(f, "; and {} more", errors - 1) } else { Ok(()) }
    }
}

impl std::error::Error for ConfigError {}

/// A problem together with its text.
#[derive(Debug)]
struct Shown<'a> {
    problem: &'a Problem,
    text: &'a Lines,
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problem.fmt(f)
    }
}

impl std::error::Error for Shown<'_> {}

impl Diagnostic for Shown<'_> {
    fn severity(&self) -> Option<Severity> {
        self.problem.severity()
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Diagnostic::help(self.problem)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        Some(self.text)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        Diagnostic::labels(self.problem)
    }
}

/// Returns the known word that `word` most likely means.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let most = (word.chars().count() / 3).clamp(1, 3);
    known
        .into_iter()
        .map(|one| (strsim::damerau_levenshtein(word, one), one))
        .filter(|(distance, one)| *distance <= most || (word.len() >= 3 && one.starts_with(word)))
        .min()
        .map(|(_, one)| one)
}
