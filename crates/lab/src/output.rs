//! Where an experiment writes its figures: `results.json`, CSV tables and SVG plots in the folder of `--out`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

/// A folder for results, created at the first write; or none.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Output {
    /// Write results.json, CSV and SVG into this folder, too.
    #[arg(long = "out", value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

impl Output {
    /// Writes results into `folder`.
    #[must_use]
    pub fn to(folder: &Path) -> Self {
        Self { folder: Some(folder.to_owned()) }
    }

    /// Writes `results.json`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn json(&self, results: &impl Serialize) -> Result<()> {
        self.json_named("results", results)
    }

    /// Writes `NAME.json`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn json_named(&self, name: &str, results: &impl Serialize) -> Result<()> {
        self.write(&format!("{name}.json"), || Ok(serde_json::to_string_pretty(results)? + "\n"))
    }

    /// Writes `NAME.csv` (RFC 4180).
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn csv(&self, name: &str, header: &[&str], rows: &[Vec<String>]) -> Result<()> {
        self.write(&format!("{name}.csv"), || {
            let header: Vec<String> = header.iter().map(|cell| (*cell).to_owned()).collect();
            Ok(std::iter::once(&header).chain(rows).map(|row| csv_line(row)).collect())
        })
    }

    /// Writes `NAME.svg`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn svg(&self, name: &str, plot: impl FnOnce() -> String) -> Result<()> {
        self.write(&format!("{name}.svg"), || Ok(plot()))
    }

    fn write(&self, name: &str, content: impl FnOnce() -> Result<String>) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let path = folder.join(name);
        fs::write(&path, content()?).with_context(|| format!("cannot write {}", path.display()))
    }
}

fn csv_line(row: &[String]) -> String {
    let quoted = |cell: &String| {
        if cell.contains([',', '"', '\n', '\r']) {
            format!("\"{}\"", cell.replace('"', "\"\""))
        } else {
            cell.clone()
        }
    };
    row.iter().map(quoted).collect::<Vec<_>>().join(",") + "\r\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_where_asked_and_nowhere_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let output = Output::to(&folder.path().join("new"));
        output.csv("t", &["a", "b"], &[vec!["1,5".into(), "say \"x\"".into()]]).expect("written");
        output.json(&[1, 2]).expect("written");
        let read = |name: &str| fs::read_to_string(folder.path().join("new").join(name)).expect("there");
        assert_eq!(read("t.csv"), "a,b\r\n\"1,5\",\"say \"\"x\"\"\"\r\n");
        assert_eq!(read("results.json").split_whitespace().collect::<String>(), "[1,2]");
        Output::default().json(&[1]).expect("nothing to do");
    }
}
