//! What is written at the end of a `run`: the summary of `--report`, and the profile of `--learn`.

use super::notices;
use serde::Serialize;
use sidetrack_core::flow::Protocol;
use sidetrack_core::jail::{Account, Counted, Seen};
use std::path::{Path, PathBuf};

/// Where the summary goes, and how.
#[derive(Clone, Debug)]
pub struct Report {
    /// The file. `None`: standard error.
    pub to: Option<PathBuf>,
    /// As one line of JSON.
    pub json: bool,
}

/// The summary as JSON.
#[derive(Serialize)]
struct Summary {
    reached: Vec<Row>,
    refused: Vec<Row>,
    /// Flows to destinations beyond the bound of the table.
    left_out_flows: u64,
}

#[derive(Serialize)]
struct Row {
    host: String,
    /// 0: only the name was asked for.
    port: u16,
    protocol: Protocol,
    program: Option<String>,
    flows: u64,
    bytes_up: u64,
    bytes_down: u64,
}

impl Row {
    fn of((seen, counted): (&Seen, &Counted)) -> Self {
        Self {
            host: seen.host.to_string(),
            port: seen.port,
            protocol: seen.protocol,
            program: seen.program.clone(),
            flows: counted.flows,
            bytes_up: counted.bytes_up,
            bytes_down: counted.bytes_down,
        }
    }

    fn line(&self, what: &str) -> String {
        let port = if self.port == 0 {
            "the name".to_owned()
        } else {
            format!("{} {}", self.protocol.as_str(), self.port)
        };
        let program = self.program.as_deref().unwrap_or("unknown");
        let text = format!(
            "{what} {} ({port}) by {program}: {} times, {} bytes up, {} bytes down",
            self.host, self.flows, self.bytes_up, self.bytes_down
        );
        // A program chooses its name: it must not control the terminal.
        let text: String = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        format!("sidetrack: {text}\n")
    }
}

impl Summary {
    fn of(account: &Account) -> Self {
        let rows =
            |refused| account.rows().filter(move |(seen, _)| seen.refused == refused).map(Row::of).collect();
        Self { reached: rows(false), refused: rows(true), left_out_flows: account.left_out() }
    }

    fn text(&self) -> String {
        let (reached, refused) = (self.reached.len(), self.refused.len());
        let mut text = format!("sidetrack: {reached} destinations reached, {refused} refused\n");
        text.extend(self.reached.iter().map(|row| row.line("reached")));
        text.extend(self.refused.iter().map(|row| row.line("refused")));
        if self.left_out_flows > 0 {
            text.push_str(&format!("sidetrack: {} flows to other destinations\n", self.left_out_flows));
        }
        text
    }
}

/// Writes the summary and the profile. What cannot be written is printed: the command has ended already.
pub(super) fn write(account: &Account, report: Option<&Report>, learn: Option<&Path>) {
    if let Some(report) = report {
        let summary = Summary::of(account);
        let text = match report.json {
            // It has nothing that JSON cannot express.
            true => serde_json::to_string(&summary).unwrap_or_default() + "\n",
            false => summary.text(),
        };
        match &report.to {
            Some(path) => write_file("--report", path, &text),
            None => notices::write(&text),
        }
    }
    if let Some(path) = learn {
        write_file("--learn", path, &account.profile());
    }
}

fn write_file(option: &str, path: &Path, text: &str) {
    if let Err(error) = std::fs::write(path, text) {
        notices::write(&format!("sidetrack: cannot write {option} {}: {error}\n", path.display()));
    }
}
