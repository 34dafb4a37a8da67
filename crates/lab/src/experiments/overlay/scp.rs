//! Files by the real scp to a real sshd.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::scene::{PLAIN, Scene, TARGET};
use crate::launch::{Placement, find_program};
use crate::service::Service;

const PORT: u16 = 22;
/// Every copy ends after so many seconds.
const ENDS_WITHIN_S: &str = "100";
/// sshd wants /run/sshd; a private /run leaves the host's alone.
const PRIVATE_RUN: &str = "mount -t tmpfs lab /run && mkdir -m 0755 /run/sshd && exec \"$2\" -D -e -f \"$1\"";

/// sshd at the target, and a file at the source.
pub struct Copies<'s> {
    scene: &'s Scene,
    key: PathBuf,
    file: PathBuf,
    bytes: u64,
    /// Ends with the copies.
    _sshd: Service,
}

impl<'s> Copies<'s> {
    /// Starts sshd.
    ///
    /// # Errors
    /// ssh is not installed.
    pub fn new(scene: &'s Scene, bytes: u64) -> Result<Self> {
        let directory = scene.directory().path();
        let (key, host_key) = (directory.join("scp-key"), directory.join("scp-host-key"));
        for path in [&key, &host_key] {
            let made =
                Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path).status();
            ensure!(made.context("ssh-keygen is missing (openssh-client)")?.success(), "ssh-keygen failed");
        }
        let config = directory.join("scp-sshd.conf");
        let text = format!(
            "Port {PORT}\nListenAddress {TARGET}\nListenAddress {PLAIN}\nHostKey {}\nAuthorizedKeysFile {}.pub\n\
             PidFile none\nPermitRootLogin prohibit-password\nStrictModes no\nUsePAM no\n\
             PasswordAuthentication no\nLogLevel ERROR\nSubsystem sftp internal-sftp\n",
            host_key.display(),
            key.display()
        );
        std::fs::write(&config, text)?;
        let sshd = find_program("sshd").context("sshd is missing (openssh-server)")?;
        let mut command = scene.target().command_at("unshare", &Placement::default());
        command.args(["--mount", "--", "sh", "-c", PRIVATE_RUN, "-"]).arg(&config).arg(sshd);
        let mut sshd = Service::start("sshd", command, directory)?;
        sshd.wait_listening(scene.target(), PORT)?;
        let file = directory.join("scp-file");
        std::fs::File::create(&file)?.set_len(bytes)?;
        Ok(Self { scene, key, file, bytes, _sshd: sshd })
    }

    /// Copies the file; Mb/s with everything, from the start of scp to its end.
    ///
    /// # Errors
    /// scp fails, or the file that arrived has another length.
    pub fn copy(&self, to: Ipv4Addr) -> Result<f64> {
        let there = self.scene.directory().path().join("scp-arrived");
        let _ = std::fs::remove_file(&there);
        let mut command = self.scene.source().command("timeout");
        command.args([ENDS_WITHIN_S, "scp", "-q", "-F", "none", "-c", "aes128-gcm@openssh.com", "-i"]);
        command.arg(&self.key);
        for option in
            ["BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        {
            command.args(["-o", option]);
        }
        command.arg(&self.file).arg(format!("root@{to}:{}", there.display()));
        let began = Instant::now();
        let output = command.stdin(Stdio::null()).output()?;
        let seconds = began.elapsed().as_secs_f64();
        ensure!(output.status.success(), "scp: {}", String::from_utf8_lossy(&output.stderr).trim());
        let arrived = std::fs::metadata(&there).context("the file did not arrive")?.len();
        ensure!(arrived == self.bytes, "{arrived} of {} bytes arrived", self.bytes);
        Ok(self.bytes as f64 * 8.0 / seconds / 1e6)
    }
}
