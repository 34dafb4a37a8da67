//! `sidetrack bugreport`: a folder with what a maintainer needs, without secrets.

mod redact;

use super::{Printed, check, doctor};
use crate::admin::default_socket;
use crate::config::{AdminAt, Config};
use crate::doctor::Facts;
use anyhow::Context as _;
use clap::Args;
use redact::Secrets;
use std::collections::VecDeque;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

/// Lines of the log that are taken at most: the last ones.
const LOG_LINES: usize = 500;

/// The most bytes of one line of the log.
const LINE_MAX: u64 = 4_096;

/// What the running sidetrack is asked for: the file and the request. Flows are not among them: they name people and servers.
const ASKED: [(&str, &str); 3] =
    [("status.json", "/v1/status"), ("functions.json", "/v1/functions"), ("overlay.json", "/v1/overlay")];

/// Collects what a maintainer needs into a folder: versions, checks of this machine, the configuration without secrets, the state, the log
///
/// Read the files before you send them: names and addresses of hosts are in them.
#[derive(Debug, Args)]
pub struct BugreportArgs {
    /// The configuration [default: ./sidetrack.toml, else /etc/sidetrack/sidetrack.toml, if there is one]
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A file with the log, or "-" for standard input: journalctl -u sidetrack | sidetrack bugreport --log -
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// The folder to make; it must not exist [default: ./sidetrack-bugreport-SECONDS]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// Collects and writes. Call it before any thread is started, because it runs a command.
///
/// # Errors
/// The folder cannot be made or written, or the log cannot be read.
pub fn run(args: &BugreportArgs) -> anyhow::Result<ExitCode> {
    let path = args.config.clone().unwrap_or_else(Config::default_path);
    let config = Config::load(&path).ok();
    let facts = Facts::gather(config.as_ref());
    let (configuration, secrets) = configuration(&path);
    let mut files = vec![
        ("versions.txt", versions(&facts)),
        ("doctor.json", doctor::report(&facts, true, usize::MAX).out),
        (CONFIGURATION, configuration),
        ("check.txt", checked(&path)),
    ];
    let socket = socket(config.as_ref());
    files.extend(ASKED.map(|(name, request)| (name, state(socket.as_deref(), request))));
    if let Some(log) = &args.log {
        let lines = if log.as_os_str() == "-" {
            last_lines(io::stdin().lock())
        } else {
            fs::File::open(log).and_then(|file| last_lines(BufReader::new(file)))
        };
        files.push(("log.txt", lines.with_context(|| format!("cannot read {}", log.display()))?));
    }
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let out = args.out.clone().unwrap_or_else(|| format!("sidetrack-bugreport-{seconds}").into());
    write(&out, &files, &secrets).with_context(|| format!("cannot make {}", out.display()))?;
    let mut text = String::new();
    files.iter().for_each(|(name, _)| text += &format!("{}\n", out.join(name).display()));
    let err = format!(
        "Read these files before you send them. They name hosts and addresses, but no passwords and keys.\n\
         To pack them: tar --create --gzip --file {0}.tar.gz {0}\n",
        out.display()
    );
    Ok(Printed { out: text, err, code: 0 }.print())
}

/// The name of the configuration in the folder: its secrets are removed by their keys.
const CONFIGURATION: &str = "configuration.toml";

/// The files are for this user only. All but the configuration lose what looks like a secret, and the secrets that it had.
fn write(out: &Path, files: &[(&str, String)], secrets: &Secrets) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(out)?;
    for (name, text) in files {
        let mut file =
            fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(out.join(name))?;
        let text = if *name == CONFIGURATION { text.clone() } else { secrets.remove_from(text) };
        io::Write::write_all(&mut file, text.as_bytes())?;
    }
    Ok(())
}

fn versions(facts: &Facts) -> String {
    let system = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let system = system.lines().find_map(|line| line.strip_prefix("PRETTY_NAME=")).unwrap_or("not known");
    let linked = if cfg!(target_env = "musl") { "static, musl" } else { "dynamic" };
    let features = if cfg!(feature = "control") { "control" } else { "none" };
    format!(
        "sidetrack {} ({linked}, {}, features: {features})\nLinux {}\nsystem {}\nuser {}\n",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH,
        facts.kernel,
        system.trim_matches('"'),
        facts.uid,
    )
}

/// The configuration without its secrets. A file that cannot be read or parsed is not shown.
fn configuration(path: &Path) -> (String, Secrets) {
    let shown = fs::read_to_string(path).map_err(|error| format!("{}: {error}\n", path.display()));
    let (text, secrets) = match shown.and_then(|text| redact::configuration(&text)) {
        Ok(found) => found,
        Err(why) => (why.lines().map(|line| format!("# {line}\n")).collect(), Secrets::default()),
    };
    (format!("# {}, without secrets and comments\n{text}", path.display()), secrets)
}

/// The numbers of errors and warnings: their texts show lines of the file, in which there may be a secret.
fn checked(path: &Path) -> String {
    let args = check::CheckArgs { file: Some(path.to_owned()), config: None, json: true };
    let json: serde_json::Value = serde_json::from_str(&check::report(&args, false).out).unwrap_or_default();
    let problems = json["problems"].as_array().cloned().unwrap_or_default();
    let mut text = format!("{} errors and warnings\n", problems.len());
    for problem in problems {
        let line =
            |name: &str| problem[name].as_u64().map_or_else(|| "?".to_owned(), |number| number.to_string());
        text += &format!("{} at line {}, column {}\n", problem["severity"], line("line"), line("column"));
    }
    text
}

fn socket(config: Option<&Config>) -> Option<PathBuf> {
    match config.map(|config| &config.admin.socket) {
        Some(AdminAt::Path(path)) => Some(path.clone()),
        Some(AdminAt::None) => None,
        Some(AdminAt::Default) | None => Some(default_socket()),
    }
}

/// The answer of the running sidetrack, or why there is none.
fn state(socket: Option<&Path>, request: &str) -> String {
    let Some(socket) = socket else {
        return "{\"none\": \"the configuration has no admin socket\"}\n".to_owned();
    };
    let answer: Result<serde_json::Value, String> = super::ask_once(socket, request, &[]);
    let answer = answer.unwrap_or_else(|why| serde_json::json!({ "none": why }));
    serde_json::to_string_pretty(&answer).unwrap_or_default() + "\n"
}

/// The last lines, each of bounded length; bytes that are not UTF-8 are replaced.
fn last_lines(mut log: impl BufRead) -> io::Result<String> {
    let mut lines = VecDeque::new();
    loop {
        let mut line = Vec::new();
        if log.by_ref().take(LINE_MAX).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if lines.len() == LOG_LINES {
            lines.pop_front();
        }
        lines.push_back(String::from_utf8_lossy(&line).into_owned());
    }
    Ok(lines.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_of_a_log_are_taken() {
        let log: String = (0..1_000).map(|number| format!("line {number}\n")).collect();
        let taken = last_lines(log.as_bytes()).expect("read");
        assert_eq!(taken.lines().count(), LOG_LINES);
        assert!(taken.starts_with("line 500\n") && taken.ends_with("line 999\n"));
        let long = vec![b'x'; 5_000];
        assert_eq!(last_lines(&long[..]).expect("read").len(), 5_000, "a long line is cut into parts");
    }
}
