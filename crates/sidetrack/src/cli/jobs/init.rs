//! `sidetrack init`: asks some questions and writes a commented configuration for a job.

use super::answers::{Answers, Question, fill};
use super::{Job, Makes, find, names};
use crate::cli::{Printed, ca, check, overlay};
use anyhow::Context;
use clap::Args;
use std::fs;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use toml::Value;

/// Days for which a new authority is valid.
const AUTHORITY_DAYS: u32 = 825;

/// Writes a commented configuration for a job
///
/// It asks some questions, each with a default, and checks what it writes. `sidetrack help` lists the jobs.
#[derive(Args, Clone, Debug)]
pub struct InitArgs {
    /// The job: command, gateway, cache, tls, overlay, shunt, engine or agreement
    #[arg(value_name = "JOB")]
    pub job: String,
    /// The folder to write into
    #[arg(short, long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// An answer, so that the question is not asked; several times. `sidetrack help JOB` lists the keys
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Takes the default answer to every other question
    #[arg(short, long)]
    pub yes: bool,
    /// Replaces files that exist
    #[arg(long)]
    pub force: bool,
}

/// Runs the subcommand: asks on standard error, and writes files.
///
/// # Errors
/// The job or a key is not known, an answer is missing or wrong, a file exists or cannot be written.
pub fn run(args: &InitArgs) -> anyhow::Result<ExitCode> {
    let job =
        find(&args.job).with_context(|| format!("there is no job '{}'; jobs are {}", args.job, names()))?;
    let given = given(job, &args.set)?;
    let answers = if args.yes || job.questions.iter().all(|question| given.contains_key(question.key)) {
        with_defaults(job, given)?
    } else {
        anyhow::ensure!(
            io::stdin().is_terminal(),
            "there is no terminal to ask: give answers with --set KEY=VALUE ({}), or take the defaults with --yes",
            job.questions.iter().map(|question| question.key).collect::<Vec<_>>().join(", ")
        );
        ask(job, given, &mut io::stdin().lock(), &mut io::stderr())?
    };
    Ok(write(job, answers, &args.dir, args.force)?.print())
}

/// Reads `--set KEY=VALUE`.
fn given(job: &Job, set: &[String]) -> anyhow::Result<Answers> {
    let read = |text: &String| {
        let (key, value) =
            text.split_once('=').with_context(|| format!("--set '{text}' is not KEY=VALUE"))?;
        let question = job.questions.iter().find(|question| question.key == key);
        let question = question.with_context(|| {
            let keys: Vec<_> = job.questions.iter().map(|question| question.key).collect();
            format!("'{}' has no question '{key}'; its keys are {}", job.name, keys.join(", "))
        })?;
        Ok((key.to_owned(), question.read(value)?))
    };
    set.iter().map(read).collect()
}

fn with_defaults(job: &Job, mut answers: Answers) -> anyhow::Result<Answers> {
    for question in job.questions {
        if !answers.contains_key(question.key) {
            answers.insert(question.key.to_owned(), question.read(question.default)?);
        }
    }
    Ok(answers)
}

/// Asks what is not answered yet. An empty line is the default answer; a wrong answer is asked again.
///
/// # Errors
/// The input ends, or cannot be read.
fn ask(
    job: &Job,
    mut answers: Answers,
    input: &mut impl BufRead,
    out: &mut impl Write,
) -> anyhow::Result<Answers> {
    for question in job.questions {
        while !answers.contains_key(question.key) {
            write!(out, "{} [{}]: ", question.asks, question.default)?;
            out.flush()?;
            let mut line = String::new();
            anyhow::ensure!(
                input.read_line(&mut line)? > 0,
                "the input ended before every question was answered"
            );
            match question.read(or_default(question, &line)) {
                Ok(value) => drop(answers.insert(question.key.to_owned(), value)),
                Err(error) => writeln!(out, "  {error:#}")?,
            }
        }
    }
    Ok(answers)
}

fn or_default<'a>(question: &Question, line: &'a str) -> &'a str
where
    'static: 'a,
{
    if line.trim().is_empty() { question.default } else { line }
}

/// Makes what the job needs, writes its files and checks the configuration. If it is wrong, nothing that this call wrote stays,
/// except a key or an authority.
///
/// # Errors
/// A file exists (unless `force`) or cannot be written, or the configuration is wrong.
fn write(job: &Job, mut answers: Answers, folder: &Path, force: bool) -> anyhow::Result<Printed> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let paths: Vec<PathBuf> = job.files.iter().map(|(name, _)| folder.join(name)).collect();
    if let Some(path) = paths.iter().find(|path| !force && path.exists()) {
        anyhow::bail!("{} exists: name another folder (--dir), or replace it (--force)", path.display());
    }
    derived(job, &mut answers);
    match job.makes {
        Makes::Nothing => {}
        Makes::OverlayKey => {
            let public = overlay::key(&folder.join("overlay.key"))?;
            answers.insert("public_key".to_owned(), Value::String(public));
        }
        Makes::Authority => authority(&folder.join("ca"), &answers)?,
    }
    let texts: Vec<String> =
        job.files.iter().map(|(_, template)| fill(template, &answers)).collect::<anyhow::Result<_>>()?;
    let before: Vec<Option<Vec<u8>>> = paths.iter().map(|path| fs::read(path).ok()).collect();
    for (path, text) in paths.iter().zip(&texts) {
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let checked =
        check::report(&check::CheckArgs { file: Some(paths[0].clone()), config: None, json: false }, false);
    if checked.code != 0 {
        for (path, before) in paths.iter().zip(before) {
            let _ = match before {
                Some(text) => fs::write(path, text),
                None => fs::remove_file(path),
            };
        }
        anyhow::bail!(
            "with these answers the configuration is wrong, so it was not written:\n{}",
            checked.err.trim_end()
        );
    }
    let mut out: String = paths.iter().map(|path| format!("wrote {}\n", path.display())).collect();
    out.push_str("\nNext:\n");
    out.push_str(&super::help::steps(job));
    Ok(Printed { out, err: checked.err, code: 0 })
}

/// Adds answers that follow from others.
fn derived(job: &Job, answers: &mut Answers) {
    if job.name == "gateway" {
        // Only the kernel of this host can send from a client's address.
        let direct = answers.get("carrier").and_then(Value::as_str) == Some("direct");
        answers.insert("keep".to_owned(), Value::Boolean(direct));
    }
    if let Some(name) = answers.get("name").and_then(Value::as_str) {
        let bare =
            name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_');
        let key = if bare { name.to_owned() } else { Value::String(name.to_owned()).to_string() };
        answers.insert("name_key".to_owned(), Value::String(key));
    }
}

/// Makes the authority, unless there is one.
fn authority(folder: &Path, answers: &Answers) -> anyhow::Result<()> {
    if folder.exists() {
        return Ok(());
    }
    let names =
        answers.get("names").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    let scopes = names.map(ca::scope).collect::<anyhow::Result<Vec<_>>>()?;
    ca::init(folder, &scopes, AUTHORITY_DAYS).map(drop)
}

#[cfg(test)]
mod tests {
    use super::super::table::JOBS;
    use super::*;

    #[test]
    fn every_job_writes_a_valid_configuration_from_its_defaults() {
        for job in &JOBS {
            let folder = tempfile::tempdir().expect("a folder");
            let answers = with_defaults(job, Answers::new()).expect("defaults");
            let printed = write(job, answers, folder.path(), false)
                .unwrap_or_else(|error| panic!("{}: {error:#}", job.name));
            assert!(printed.err.is_empty(), "{}: {}", job.name, printed.err);
            let again =
                write(job, with_defaults(job, Answers::new()).expect("defaults"), folder.path(), false);
            assert!(again.expect_err("it exists").to_string().contains("--force"), "{}", job.name);
        }
    }

    #[test]
    fn a_wrong_answer_leaves_no_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let job = find("gateway").expect("the job");
        let answers = given(job, &["clients=10.0.0.1/8".to_owned()]).expect("read");
        let error = write(job, with_defaults(job, answers).expect("answers"), folder.path(), false)
            .expect_err("wrong");
        assert!(error.to_string().contains("10.0.0.1/8"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 0);
    }

    #[test]
    fn questions_are_asked_until_they_are_answered() {
        let job = find("cache").expect("the job");
        let mut out = Vec::new();
        let answers =
            ask(job, Answers::new(), &mut &b"\nmany\n4096\n*.example\n"[..], &mut out).expect("answered");
        assert_eq!(answers["address"].as_str(), Some("127.0.0.1:3128"));
        assert_eq!(answers["memory_bytes"].as_integer(), Some(4096));
        let text = String::from_utf8(out).expect("text");
        assert!(text.contains("'many' is not a whole number"), "{text}");
        let ended = ask(job, Answers::new(), &mut &b"\n"[..], &mut Vec::new());
        assert!(ended.expect_err("it ended").to_string().contains("ended"));
    }

    #[test]
    fn unknown_keys_are_named() {
        let error = given(find("cache").expect("the job"), &["adress=x".to_owned()]).expect_err("unknown");
        assert!(error.to_string().contains("address"), "{error}");
    }
}
