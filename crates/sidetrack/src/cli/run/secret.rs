//! `run --secret`: reads the secrets, and makes a placeholder for each.

use crate::intercept::run::Mode;
use anyhow::Context;
use sidetrack_core::placeholder::{Named, Secret, Secrets, Source, Wanted, placeholder};
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The secrets, and what the command sees of them.
pub(super) struct ReadSecrets {
    /// For the requests of the command.
    pub secrets: Arc<Secrets>,
    /// The placeholders as variables. Variables that hold a secret are removed.
    pub env: Vec<(OsString, Option<OsString>)>,
    /// The files of secrets, and the placeholder that the command reads there.
    pub covered_files: Vec<(PathBuf, Vec<u8>)>,
}

/// Reads the secrets of the command line. `None`: there are none.
///
/// # Errors
/// An argument is wrong, or a secret cannot be read or used. No error shows a part of a secret.
pub(super) fn read(texts: &[String], mode: Mode) -> anyhow::Result<Option<ReadSecrets>> {
    if texts.is_empty() {
        return Ok(None);
    }
    anyhow::ensure!(
        mode == Mode::Isolated,
        "--secret does not go with --mode cgroup, where the command is root as we are and could read our memory: leave --mode out"
    );
    let (mut all, mut removed) = (Vec::<Named>::new(), Vec::new());
    let mut covered_files = Vec::new();
    for text in texts {
        let Wanted { name, source, hosts } = text.parse().context("--secret")?;
        anyhow::ensure!(
            all.iter().all(|other| other.name != name),
            "--secret: {name} is given twice; for several hosts, write them with commas: {name}=…@HOST,HOST"
        );
        let bytes = match &source {
            Source::File(path) => {
                file(path).with_context(|| format!("--secret {name}: cannot read {path}"))?
            }
            Source::Variable(variable) => sidetrack_sys::process::environment(variable)
                .with_context(|| format!("--secret {name}: the variable {variable} is not set"))?
                .into_vec(),
        };
        let of = match &source {
            Source::File(path) => path,
            Source::Variable(variable) => variable,
        };
        let secret = Secret::new(bytes)
            .map_err(|error| anyhow::anyhow!("--secret {name}: {of} cannot be used: {error}"))?;
        let placeholder = placeholder(sidetrack_sys::random::bytes());
        match source {
            Source::File(path) => covered_files.extend(covered(&path, &placeholder)),
            Source::Variable(variable) => removed.push((variable.into(), None)),
        }
        all.push(Named { name, placeholder, secret, hosts });
    }
    let variable = |one: &Named| (one.name.clone().into(), Some(one.placeholder.clone().into()));
    let env = removed.into_iter().chain(all.iter().map(variable)).collect();
    Ok(Some(ReadSecrets { secrets: Arc::new(Secrets::new(&all)), env, covered_files }))
}

/// Reads a file, or a bit more of it than a secret may have.
fn file(path: &str) -> std::io::Result<Vec<u8>> {
    let most = Secret::MAX + 3;
    // Room for all: a buffer that grows leaves copies behind.
    let mut bytes = Vec::with_capacity(most + 1);
    std::fs::File::open(path)?.take(most as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What covers the file of a secret. A pipe or a device is read once and needs no cover.
fn covered(path: &str, placeholder: &str) -> Option<(PathBuf, Vec<u8>)> {
    let real = Path::new(path).canonicalize().ok().filter(|real| real.is_file())?;
    Some((real, format!("{placeholder}\n").into_bytes()))
}
