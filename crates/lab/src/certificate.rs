//! Certificates for the programs of an experiment.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// Where a certificate and its key are.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    /// The certificate, in PEM.
    pub certificate: PathBuf,
    /// Its private key, in PEM.
    pub key: PathBuf,
}

impl Pair {
    /// `NAME.pem` and `NAME.key` in a folder.
    pub(crate) fn at(folder: &Path, name: &str) -> Self {
        Self { certificate: folder.join(format!("{name}.pem")), key: folder.join(format!("{name}.key")) }
    }

    /// Writes both into one file beside them, as our listeners take them.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub(crate) fn in_one_file(&self) -> Result<PathBuf> {
        let both = self.certificate.with_extension("both.pem");
        let text = std::fs::read_to_string(&self.certificate)? + &std::fs::read_to_string(&self.key)?;
        std::fs::write(&both, text)?;
        Ok(both)
    }
}

/// Makes a new P-256 key with a certificate, self-signed or as `more` says: options of `openssl req` with their values.
///
/// # Errors
/// openssl is missing or fails.
pub(crate) fn make(more: &[(&str, String)], pair: &Pair, subject: &str) -> Result<()> {
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
    command
        .args(["-days", "30", "-subj", subject])
        .arg("-keyout")
        .arg(&pair.key)
        .arg("-out")
        .arg(&pair.certificate);
    for (option, value) in more {
        command.args([option, &value.as_str()]);
    }
    let output = command.output().context("openssl is missing; bench/peers.sh installs it")?;
    ensure!(output.status.success(), "openssl failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
