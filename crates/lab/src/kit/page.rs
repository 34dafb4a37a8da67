//! The page of an experiment: Markdown that is printed at the end, and written to a file if one is named.

use std::fmt::{Arguments, Write as _};
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

/// Markdown that grows by lines and tables.
#[derive(Debug, Default)]
pub struct Page(String);

impl Page {
    /// Adds text as it is.
    pub fn text(&mut self, text: Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = self.0.write_fmt(text);
    }

    /// Adds a line.
    pub fn line(&mut self, line: Arguments<'_>) {
        self.text(line);
        self.blank();
    }

    /// Ends the line. After a whole line it adds an empty one.
    pub fn blank(&mut self) {
        self.0.push('\n');
    }

    /// Begins a table with these columns. A name that ends with a colon is that of a column of numbers: they are
    /// aligned to the right, and the colon is not shown.
    pub fn columns<S: AsRef<str>>(&mut self, names: impl IntoIterator<Item = S>) {
        let (mut head, mut rule) = ("|".to_owned(), "|".to_owned());
        for name in names {
            let (name, align) = match name.as_ref().strip_suffix(':') {
                Some(name) => (name, "---:|"),
                None => (name.as_ref(), "---|"),
            };
            head += &if name.is_empty() { " |".to_owned() } else { format!(" {name} |") };
            rule += align;
        }
        self.line(format_args!("{head}\n{rule}"));
    }

    /// Adds a row of the table. ` | ` divides its cells.
    pub fn row(&mut self, cells: Arguments<'_>) {
        self.line(format_args!("| {cells} |"));
    }

    /// Returns the Markdown.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Prints the page, and writes it to `file` if that is given.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn publish(&self, file: Option<&Path>) -> Result<()> {
        print!("{}", self.0);
        match file {
            Some(file) => {
                fs::write(file, &self.0).with_context(|| format!("cannot write {}", file.display()))
            }
            None => Ok(()),
        }
    }
}

/// Returns the exit code of a run.
#[must_use]
pub const fn exit(is_well: bool) -> ExitCode {
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_head_a_rule_and_rows() {
        let mut page = Page::default();
        page.columns(["", "rate, /s:", "remark"]);
        page.row(format_args!("ours | {:.1} | fast", 2.25));
        page.blank();
        page.line(format_args!("The {}.", "end"));
        assert_eq!(
            page.as_str(),
            "| | rate, /s | remark |\n|---|---:|---|\n| ours | 2.2 | fast |\n\nThe end.\n"
        );
        let file = tempfile::NamedTempFile::new().expect("a file");
        page.publish(Some(file.path())).expect("written");
        assert_eq!(fs::read_to_string(file.path()).expect("there"), page.as_str());
    }
}
