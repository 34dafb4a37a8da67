//! `sidetrack tunnel`: keys and certificates for both ends of a tunnel.

use super::invite::tunnel as invite;
use crate::tls::{self, Made, Pin};
use anyhow::Context;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The longest validity of a certificate in days: a hundred years.
const DAYS_MAX: i64 = 36_500;

/// Creates keys and certificates for both ends of a tunnel.
#[derive(Clone, Debug, clap::Args)]
pub struct TunnelArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// Creates a key and certificate for one end, in one file: the `identity` of the configuration
    Key {
        /// The name of this end in rules and records of the other end: a DNS name
        #[arg(long)]
        name: String,
        /// The authority that signs it (the private file of `sidetrack tunnel ca`). Without it the certificate is
        /// self-signed, and the other end must pin the key
        #[arg(long, value_name = "FILE")]
        ca: Option<PathBuf>,
        /// Days until the certificate expires; a pinned key is trusted after that, too
        #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=DAYS_MAX))]
        days: u32,
        /// The file to write [default: NAME.pem]
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Creates an authority that signs the keys of both ends: CA.pem is public, keep CA-private.pem secret
    Ca {
        /// Days until the authority and all certificates that it signed expire
        #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=DAYS_MAX))]
        days: u32,
        /// The folder and the beginning of both file names
        #[arg(long, value_name = "PATH", default_value = "ca")]
        out: PathBuf,
    },
    Invite(invite::InviteArgs),
    Join(invite::JoinArgs),
    /// Prints the pin of a certificate, for `pins` at the other end
    Pin {
        /// A file with a certificate in PEM
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
}

/// Runs the subcommand.
///
/// # Errors
/// What could not be read, made or written.
pub fn run(args: &TunnelArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        Command::Key { name, ca, days, out } => {
            let out = out.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.pem")));
            println!("{}", key(name, ca.as_deref(), *days, &out)?);
        }
        Command::Ca { days, out } => println!("{}", ca(*days, out)?),
        Command::Invite(args) => return invite::invite(args),
        Command::Join(args) => return invite::join(args),
        Command::Pin { files } => {
            for file in files {
                println!("{}", pin(file)?);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes a key; returns text that says how to use it.
///
/// # Errors
/// The name is not a DNS name, the authority was not made by us, or a file cannot be read or written.
pub fn key(name: &str, ca: Option<&Path>, days: u32, out: &Path) -> anyhow::Result<String> {
    let made = match ca {
        None => tls::self_signed(name, days)?,
        Some(file) => {
            let authority =
                std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
            tls::signed(name, days, &authority).with_context(|| file.display().to_string())?
        }
    };
    write_private(out, &made)?;
    let pin = Pin::of_pem(&made.certificate_pem).map_err(anyhow::Error::msg)?;
    let other = match ca {
        None => format!("at the other end:  pins = [\"{pin}\"]"),
        Some(_) => "at the other end:  ca = \"ca.pem\" (the public file of the authority)".to_owned(),
    };
    Ok(format!("here:              identity = \"{}\"\n{other}", out.display()))
}

/// Makes an authority; returns text with the names of its files.
///
/// # Errors
/// A file cannot be written.
pub fn ca(days: u32, out: &Path) -> anyhow::Result<String> {
    let with = |end: &str| {
        let mut name = out.as_os_str().to_owned();
        name.push(end);
        PathBuf::from(name)
    };
    let (public, private) = (with(".pem"), with("-private.pem"));
    let made = tls::authority(days)?;
    write_private(&private, &made)?;
    write(&public, 0o644, &made.certificate_pem)?;
    Ok(format!(
        "{}: at both ends, ca = \"…\"\n{}: signs keys (sidetrack tunnel key --ca {}); keep it to yourself",
        public.display(),
        private.display(),
        private.display()
    ))
}

/// Returns the pin of the first certificate in a file.
///
/// # Errors
/// There is none, or the file cannot be read.
pub fn pin(file: &Path) -> anyhow::Result<Pin> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    Pin::of_pem(&text).map_err(|error| anyhow::anyhow!("{}: {error}", file.display()))
}

fn write_private(path: &Path, made: &Made) -> anyhow::Result<()> {
    write(path, 0o600, &made.identity_pem())
}

/// Writes a new file. An existing one is never overwritten, so that no key is lost by mistake.
fn write(path: &Path, mode: u32, text: &str) -> anyhow::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create_new(true).mode(mode).open(path);
    let mut file = file.with_context(|| format!("cannot make {}", path.display()))?;
    file.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
}
