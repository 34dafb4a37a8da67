//! `sidetrack-shell`: a login shell whose programs reach what root has written for this user.
//!
//! The name of the program decides: login(1), su(1) and sshd(8) execute `/usr/bin/sidetrack-shell`, a link to `sidetrack`, as `-sidetrack-shell`
//! without arguments or with `-c COMMAND`. The file of the user has the options of `run` and the real shell, which gets the arguments. Without
//! a right file there is no shell.

use super::run::{self, OWN_FAILURE, RunArgs};
use anyhow::Context;
use clap::Parser;
use serde::Deserialize;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The name of the program.
pub const NAME: &str = "sidetrack-shell";

/// The folder of the users' files. Users must be able to read them, and `/etc/sidetrack` is closed to them.
const FOLDER: &str = "/etc/sidetrack-shell.d";

/// Most bytes of a file.
const FILE_MAX_BYTES: u64 = 64 * 1024;

/// What a user's file says.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Account {
    /// The real shell.
    #[serde(default = "bash")]
    shell: PathBuf,
    /// Options of `sidetrack run`, each word as one text.
    options: Vec<String>,
}

fn bash() -> PathBuf {
    "/bin/bash".into()
}

/// The options of a file with the real shell behind them.
#[derive(Parser)]
#[command(name = "sidetrack-shell", disable_help_flag = true)]
struct Line {
    #[command(flatten)]
    run: RunArgs,
}

/// Whether the program was executed as a login shell: by this name, with or without the dash of login(1) before it.
pub fn is_meant(name: &OsStr) -> bool {
    let name = name.as_bytes();
    let base = name.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    base.strip_prefix(b"-").unwrap_or(base) == NAME.as_bytes()
}

/// Runs the user's real shell with the arguments of this program, the name first.
pub fn run(arguments: &[OsString]) -> ExitCode {
    let (name, rest) =
        arguments.split_first().map(|(name, rest)| (name.as_os_str(), rest)).unwrap_or_default();
    match read().and_then(|account| line(&account, name, rest)) {
        Ok((args, login)) => run::run_as_login(&args, login),
        Err(error) => {
            // Standard error may be closed, which must not cause a panic.
            let _ = writeln!(io::stderr(), "{NAME}: {error:#}");
            ExitCode::from(OWN_FAILURE)
        }
    }
}

/// What the real shell gets beside the options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Login {
    /// The name that it is executed with.
    pub name: OsString,
    /// Its path, for programs that ask which shell the user has.
    pub shell: PathBuf,
}

/// Reads the file of the user who runs this program.
fn read() -> anyhow::Result<Account> {
    let id = nix::unistd::getuid();
    let user = nix::unistd::User::from_uid(id).ok().flatten();
    let user = user.with_context(|| format!("there is no user with the id {id}"))?.name;
    anyhow::ensure!(
        !user.contains('/') && !user.starts_with('.'),
        "the name of the user cannot be a file's: {user}"
    );
    let path = Path::new(FOLDER).join(format!("{user}.toml"));
    let text = trusted(&path).with_context(|| format!("no shell for {user}: {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("no shell for {user}: {}", path.display()))
}

/// Reads a file that only root can change.
fn trusted(path: &Path) -> anyhow::Result<String> {
    let of_root = |meta: &std::fs::Metadata, what| {
        anyhow::ensure!(
            meta.uid() == 0 && meta.mode() & 0o022 == 0,
            "the {what} must belong to root, and only root may write it"
        );
        Ok(())
    };
    let file = File::open(path)?;
    let meta = file.metadata()?;
    anyhow::ensure!(meta.is_file(), "this is no file");
    of_root(&meta, "file")?;
    of_root(&path.parent().unwrap_or(Path::new("/")).metadata()?, "folder")?;
    let mut text = String::new();
    file.take(FILE_MAX_BYTES + 1).read_to_string(&mut text)?;
    anyhow::ensure!(text.len() as u64 <= FILE_MAX_BYTES, "the file is longer than {FILE_MAX_BYTES} bytes");
    Ok(text)
}

/// The options with the real shell and its arguments as command.
fn line(account: &Account, name: &OsStr, rest: &[OsString]) -> anyhow::Result<(RunArgs, Login)> {
    let Account { shell, options } = account;
    anyhow::ensure!(shell.is_absolute(), "shell: {} is no absolute path", shell.display());
    anyhow::ensure!(
        shell.file_name().is_some_and(|name| name != NAME),
        "shell: {} is this program: name the real shell",
        shell.display()
    );
    let command: Vec<OsString> =
        [shell.clone().into_os_string()].into_iter().chain(rest.iter().cloned()).collect();
    let words = [NAME.into()].into_iter().chain(options.iter().map(OsString::from));
    let words = words.chain([OsString::from("--")]).chain(command.iter().cloned());
    let parsed = Line::try_parse_from(words).map_err(|error| {
        let text = error.to_string();
        anyhow::anyhow!("options: {}", text.lines().next().unwrap_or_default().trim_start_matches("error: "))
    })?;
    // A word without an option before it would be the command.
    anyhow::ensure!(
        parsed.run.command == command,
        "options: only options of `sidetrack run`, and their values, may stand there"
    );
    Ok((parsed.run, Login { name: name_of(shell, name), shell: shell.clone() }))
}

/// The name of the real shell, with the dash of a login shell if we have it.
fn name_of(shell: &Path, name: &OsStr) -> OsString {
    if !name.as_bytes().starts_with(b"-") {
        return shell.into();
    }
    let base = shell.file_name().unwrap_or_default();
    OsString::from_vec([b"-", base.as_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(text: &str) -> Result<Account, String> {
        toml::from_str(text).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn the_name_decides() {
        for name in ["sidetrack-shell", "-sidetrack-shell", "/usr/bin/sidetrack-shell"] {
            assert!(is_meant(OsStr::new(name)), "{name}");
        }
        for name in ["sidetrack", "-sidetrack", "", "-", "/sidetrack-shell/sidetrack", "sidetrack-shell2"] {
            assert!(!is_meant(OsStr::new(name)), "{name}");
        }
    }

    #[test]
    fn the_real_shell_gets_the_arguments_and_the_name_of_a_login_shell() {
        let account = account("options = ['--allow', 'a.example', '--unix', 'deny']").unwrap();
        let rest = ["-c", "scp -t --jail ."].map(OsString::from);
        let (args, login) = line(&account, OsStr::new("-sidetrack-shell"), &rest).unwrap();
        assert_eq!(args.command, ["/bin/bash", "-c", "scp -t --jail ."]);
        assert_eq!((args.jail.allow, args.jail.jail), (vec!["a.example".to_owned()], false));
        assert_eq!(login, Login { name: "-bash".into(), shell: "/bin/bash".into() });
        let (_, login) = line(&account, OsStr::new("sidetrack-shell"), &[]).unwrap();
        assert_eq!(login.name, "/bin/bash");
    }

    #[test]
    fn a_wrong_file_gives_no_shell() {
        for text in ["", "shell = '/bin/sh'", "options = []\nshel = '/bin/sh'", "options = '--jail'"] {
            assert!(account(text).is_err(), "{text}");
        }
        for (text, wrong) in [
            ("options = ['--jali']", "unexpected argument '--jali'"),
            ("options = ['--help']", "--help"),
            ("options = ['env']", "only options"),
            ("options = ['--jail', '--', 'env']", "only options"),
            ("options = ['--allow']", "--allow"),
            ("options = []\nshell = 'bash'", "no absolute path"),
            ("options = []\nshell = '/usr/bin/sidetrack-shell'", "name the real shell"),
        ] {
            let error = line(&account(text).unwrap(), OsStr::new("-sidetrack-shell"), &[]);
            let error = format!("{:#}", error.map(|_| ()).unwrap_err());
            assert!(error.contains(wrong), "{text}: {error}");
        }
    }
}
