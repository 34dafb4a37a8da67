//! `sidetrack graph`: draws the functions that flows pass, from a configuration.

use super::Printed;
use crate::config::Config;
use clap::{Args, ValueEnum};
use sidetrack_core::function::FunctionSpec;
use sidetrack_core::function::graph::{Graph, Way, to_text};
use sidetrack_core::policy::{Action, Rule};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// Draws the functions that flows of each rule pass, with branches and where they merge
#[derive(Clone, Debug, Args)]
pub struct GraphArgs {
    /// The configuration [default: ./sidetrack.toml, else /etc/sidetrack/sidetrack.toml]
    #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
    pub config: PathBuf,
    /// Only this rule
    #[arg(long, value_name = "NAME")]
    pub rule: Option<String>,
    /// dot for Graphviz, mermaid for Markdown, svg for browsers, or text
    #[arg(long, value_name = "FORMAT", value_enum, default_value = "text")]
    pub format: Format,
}

/// The form of a drawing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// The DOT language of Graphviz.
    Dot,
    /// A Mermaid flow chart.
    Mermaid,
    /// A picture for browsers (SVG).
    Svg,
    /// Indented text.
    Text,
}

/// Longest text of the conditions of a rule in a drawing, characters.
const CONDITIONS_MAX: usize = 100;

/// Runs the subcommand. Exit code 0; 2 if the configuration is wrong or has no such rule.
///
/// # Errors
/// None of its own.
pub fn run(args: &GraphArgs) -> anyhow::Result<ExitCode> {
    Ok(draw(args, super::colours()).print())
}

/// Returns the drawing.
pub fn draw(args: &GraphArgs, colours: bool) -> Printed {
    let failed = |err| Printed { err, code: 2, ..Printed::default() };
    let config = match Config::load(&args.config) {
        Ok(config) => config,
        Err(error) => return failed(error.render(colours)),
    };
    let rules = config.policy.rules().iter().filter(|rule| match &args.rule {
        Some(name) => *rule.name == **name,
        None => chain_of(rule).is_some(),
    });
    let labels: Vec<_> = rules.map(|rule| (rule, start(rule), end(rule))).collect();
    let ways: Vec<_> = labels
        .iter()
        .map(|(rule, start, end)| Way { start, functions: chain_of(rule).unwrap_or_default(), end })
        .collect();
    if let (Some(name), true) = (&args.rule, ways.is_empty()) {
        return failed(format!("there is no rule '{name}'\n"));
    }
    let (out, err) = match args.format {
        _ if ways.is_empty() => (String::new(), "no rule of this configuration has a chain\n".to_owned()),
        Format::Dot => (Graph::new(&ways).to_dot(), String::new()),
        Format::Mermaid => (Graph::new(&ways).to_mermaid(), String::new()),
        Format::Svg => (Graph::new(&ways).to_svg(), String::new()),
        Format::Text => (to_text(&ways), String::new()),
    };
    Printed { out, err, code: 0 }
}

fn chain_of(rule: &Rule) -> Option<&[Arc<FunctionSpec>]> {
    match &rule.action {
        Action::Carry(carry) => carry.chain.as_ref().map(|chain| &*chain.functions),
        Action::Deny => None,
    }
}

fn start(rule: &Rule) -> String {
    let conditions: Vec<_> = rule.matcher.conditions().iter().map(ToString::to_string).collect();
    let all = if conditions.is_empty() { "all flows".to_owned() } else { conditions.join(", ") };
    let short: String = all.chars().take(CONDITIONS_MAX).collect();
    let more = if short.len() < all.len() { "…" } else { "" };
    format!("rule {}: {short}{more}", rule.name)
}

fn end(rule: &Rule) -> String {
    match &rule.action {
        Action::Carry(carry) => carry.carrier.to_string(),
        Action::Deny => "deny".to_owned(),
    }
}
