//! `sidetrack ca`: makes the authority that signs certificates for intercepted TLS connections.

use crate::config::tap::{KEY_FILE, ROOT_FILE, SIGNING_FILE, authority};
use crate::tls::{Scope, tap_authority};
use anyhow::Context;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The longest validity of an authority in days: ten years.
const DAYS_MAX: i64 = 3650;

/// Creates the certificate authority that signs for intercepted TLS connections.
#[derive(Clone, Debug, clap::Args)]
pub struct CaArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// Creates a root and an authority below it that can sign only for these names; the root's key is destroyed
    Init {
        /// The folder to create
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// A domain it may sign for, with all names below, or a network such as 10.0.0.0/8; can be repeated
        #[arg(
            long = "name",
            value_name = "DOMAIN",
            required_unless_present = "any_name",
            conflicts_with = "any_name"
        )]
        names: Vec<String>,
        /// It may sign for every name (not for addresses): a thief of its key can pose as any server to its clients
        #[arg(long)]
        any_name: bool,
        /// Days until it expires
        #[arg(long, default_value_t = 825, value_parser = clap::value_parser!(u32).range(1..=DAYS_MAX))]
        days: u32,
    },
    /// Prints the certificate that clients must trust
    Root {
        /// The folder of the authority
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

/// Runs the subcommand.
///
/// # Errors
/// What could not be made, written or read.
pub fn run(args: &CaArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        Command::Init { dir, names, any_name, days } => {
            let scopes = if *any_name {
                vec![Scope::AnyName]
            } else {
                names.iter().map(|name| scope(name)).collect::<anyhow::Result<_>>()?
            };
            println!("{}", init(&folder(dir.as_deref())?, &scopes, *days)?);
        }
        Command::Root { dir } => {
            let folder = folder(dir.as_deref())?;
            let read = std::fs::read_to_string(folder.join(ROOT_FILE));
            print!("{}", read.with_context(|| format!("cannot read {}", folder.join(ROOT_FILE).display()))?);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The authority's folder. Default: /etc/sidetrack/ca for root, otherwise sidetrack/ca in the folder of the user's
/// configuration.
///
/// # Errors
/// The folder of the user's configuration is not known.
pub fn folder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    if nix::unistd::geteuid().is_root() {
        return Ok(PathBuf::from("/etc/sidetrack/ca"));
    }
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".config"));
    let config =
        config.or_else(home).context("neither XDG_CONFIG_HOME nor HOME is set: name the folder (--dir)")?;
    Ok(config.join("sidetrack/ca"))
}

/// Parses a domain or a network.
pub(super) fn scope(text: &str) -> anyhow::Result<Scope> {
    if let Ok(net) = text.parse() {
        return Ok(Scope::Net(net));
    }
    let name = text.trim_start_matches("*.");
    let is_name = !name.contains('*') && rustls::pki_types::DnsName::try_from(name).is_ok();
    match name.parse() {
        Ok(name) if is_name => Ok(Scope::Below(name)),
        _ => anyhow::bail!("'{text}' is neither a domain (corp.example) nor a network (10.0.0.0/8)"),
    }
}

/// Makes an authority in a new folder; returns text that says how to use it.
///
/// # Errors
/// A file exists already, or cannot be written.
pub fn init(folder: &Path, scopes: &[Scope], days: u32) -> anyhow::Result<String> {
    let made = tap_authority(scopes, days)?;
    let mut builder = std::fs::DirBuilder::new();
    builder
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    write(&folder.join(KEY_FILE), 0o600, &made.signing_key_pem)?;
    write(&folder.join(SIGNING_FILE), 0o644, &made.signing_pem)?;
    write(&folder.join(ROOT_FILE), 0o644, &made.root_pem)?;
    authority(folder).context("what was written cannot be read back")?;
    let folder = folder.display();
    Ok(format!(
        "{folder}/{ROOT_FILE}: what clients are to trust. Its key is destroyed; nobody can sign with it any more\n\
         {folder}/{KEY_FILE}: signs for hosts; keep it to yourself\n\
         in the configuration: [tap] with ca = \"{folder}\", and tap = true at a listener\n\
         for one command:      sidetrack run --tap --ca {folder} -- COMMAND"
    ))
}

/// Writes a new file. An existing one is never overwritten, so that no authority is lost by mistake.
fn write(path: &Path, mode: u32, text: &str) -> anyhow::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create_new(true).mode(mode).open(path);
    let mut file = file.with_context(|| format!("cannot make {}", path.display()))?;
    file.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
}
