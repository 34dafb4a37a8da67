//! `sidetrack help`: how a job is done, or the help of a command.

use super::table::JOBS;
use super::{Job, find, names};
use crate::cli::Printed;
use crate::cli::wrap::{USUAL_WIDTH, push_wrapped, width};
use clap::{Args, Command};
use std::fmt::Write as _;
use std::process::ExitCode;

/// Says how a job is done, or explains a command
#[derive(Args, Clone, Debug)]
pub struct HelpArgs {
    /// A job, or a command with its subcommands; without it, all of them
    #[arg(value_name = "JOB|COMMAND")]
    pub words: Vec<String>,
}

/// Runs the subcommand. `command` is the whole command line.
///
/// # Errors
/// There is neither such a job nor such a command.
pub fn run(command: Command, args: &HelpArgs) -> anyhow::Result<ExitCode> {
    Ok(report(command, args, width().min(100))?.print())
}

/// Returns the output of the subcommand, in lines of at most `width` columns.
///
/// # Errors
/// There is neither such a job nor such a command.
pub fn report(mut command: Command, args: &HelpArgs, width: usize) -> anyhow::Result<Printed> {
    let out = match args.words.as_slice() {
        [] => format!("{}\n{}", command.render_long_help(), all(width)),
        words => match words.first().and_then(|name| find(name)) {
            Some(job) if words.len() == 1 => of(job, &command, width),
            _ => of_command(command, words)?,
        },
    };
    Ok(Printed { out, ..Printed::default() })
}

/// The long help of a subcommand.
fn of_command(mut command: Command, words: &[String]) -> anyhow::Result<String> {
    command.build();
    let mut found = &mut command;
    for word in words {
        let path = found.get_name().to_owned();
        found = found.find_subcommand_mut(word).ok_or_else(|| {
            anyhow::anyhow!(
                "'{path}' has no command '{word}', and no job has this name; jobs are {}",
                names()
            )
        })?;
    }
    Ok(found.render_long_help().to_string())
}

/// The list of all jobs.
fn all(width: usize) -> String {
    let mut out =
        String::from("Jobs (sidetrack help JOB says how, sidetrack init JOB writes a configuration):\n");
    for job in &JOBS {
        push_wrapped(&mut out, &format!("  {:<14}", job.name), job.about, 16, width);
    }
    out
}

/// How a job is done.
fn of(job: &Job, command: &Command, width: usize) -> String {
    let mut out = String::new();
    push_wrapped(&mut out, &format!("{}: ", job.name), job.about, 2, width);
    out.push('\n');
    let init = format!("sidetrack init {}", job.name);
    step(&mut out, &init, "asks, and writes a commented configuration", width);
    for (command, does) in job.steps {
        step(&mut out, command, does, width);
    }
    out.push_str("\nQuestions of init, and the keys of --set KEY=VALUE:\n");
    for question in job.questions {
        push_wrapped(&mut out, &format!("  {:<14}", question.key), question.asks, 16, width);
    }
    let _ = writeln!(out, "\nExample with real traffic: examples/{}/run.sh", job.example);
    let pages: Vec<_> = job.pages.iter().map(|page| format!("docs/{page}")).collect();
    let _ = writeln!(out, "Reference: {}", pages.join(", "));
    if command.find_subcommand(job.name).is_some() {
        let _ = writeln!(out, "Commands: sidetrack {} --help", job.name);
    }
    out.push_str("Packages have both in /usr/share/doc/sidetrack.\n");
    out
}

/// The commands after `init`, each with what it does.
pub(super) fn steps(job: &Job) -> String {
    let mut out = String::new();
    job.steps.iter().for_each(|(command, does)| step(&mut out, command, does, USUAL_WIDTH));
    out
}

fn step(out: &mut String, command: &str, does: &str, width: usize) {
    /// Columns of a command, so that what it does fits beside it.
    const COMMAND: usize = 34;
    if command.len() > COMMAND {
        let _ = writeln!(out, "  {command}");
        push_wrapped(out, &" ".repeat(COMMAND + 4), does, COMMAND + 4, width);
    } else {
        push_wrapped(out, &format!("  {command:<COMMAND$}  "), does, COMMAND + 4, width);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn text(words: &[&str]) -> anyhow::Result<String> {
        let named = |name: &'static str| Command::default().name(name);
        let overlay = named("overlay").subcommand(named("key").about("Makes a key"));
        let command = named("sidetrack").subcommand(overlay);
        let args = HelpArgs { words: words.iter().map(|word| (*word).to_owned()).collect() };
        report(command, &args, USUAL_WIDTH).map(|printed| printed.out)
    }

    #[test]
    fn every_job_is_listed_and_fits_the_width() {
        let all = text(&[]).expect("listed");
        for job in &JOBS {
            assert!(all.contains(job.name), "{}", job.name);
            let of = text(&[job.name]).expect("explained");
            assert!(of.lines().all(|line| line.len() <= USUAL_WIDTH), "{of}");
        }
    }

    #[test]
    fn examples_and_pages_that_jobs_name_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for job in &JOBS {
            assert!(root.join("examples").join(job.example).join("run.sh").exists(), "{}", job.example);
            assert!(job.pages.iter().all(|page| root.join("docs").join(page).exists()), "{:?}", job.pages);
        }
    }

    #[test]
    fn a_command_is_explained_and_an_unknown_word_is_named() {
        assert!(text(&["overlay", "key"]).expect("explained").contains("Makes a key"));
        let error = text(&["overlay", "keys"]).expect_err("unknown").to_string();
        assert!(error.contains("'overlay' has no command 'keys'") && error.contains("gateway"), "{error}");
    }
}
