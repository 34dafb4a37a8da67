//! Copies files by the real scp to a real sshd.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::scene::{PACKETS, PACKETS_RELIABLE, PLAIN, Scene, TARGET};
use crate::launch::{Placement, find_program};
use crate::peers::Absent;
use crate::service::Service;
use crate::topology::Node;

const PORT: u16 = 22;
/// Files of the keys.
const KEY: &str = "scp-key";
const HOST_KEY: &str = "scp-host-key";
/// Time limit for a copy, in seconds.
const ENDS_WITHIN_S: &str = "100";
/// sshd needs /run/sshd; a private /run avoids changing the host's.
const PRIVATE_RUN: &str = "mount -t tmpfs lab /run && mkdir -m 0755 /run/sshd && exec \"$2\" -D -e -f \"$1\"";

/// The way of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copied {
    /// Plain TCP along the hops with this congestion control.
    Plain(&'static str),
    /// Over the overlay, its payload only.
    Payload,
    /// As whole packets that the source's node catches where they are sent (`at = "local"`).
    Local,
    /// As whole packets of a host without any software of ours, which the source's node forwards.
    Router,
}

impl Copied {
    /// Returns its name in the tables.
    pub(super) fn name(self) -> String {
        match self {
            Self::Plain(congestion) => format!("TCP {congestion}"),
            Self::Payload => "ours".to_owned(),
            Self::Local => "ours, packets, local".to_owned(),
            Self::Router => "ours, packets, router".to_owned(),
        }
    }
}

/// sshd at the target and at the host behind it, and files at the source and at the host behind it.
pub(super) struct Copies<'s> {
    scene: &'s Scene,
    /// The servers; they end with this value.
    _sshd: [Service; 2],
}

impl<'s> Copies<'s> {
    /// Starts the servers.
    ///
    /// # Errors
    /// ssh is not installed.
    pub(super) fn new(scene: &'s Scene) -> Result<Self> {
        let directory = scene.directory().path();
        keys(directory)?;
        let (_, right, behind) = scene.hosts()?;
        let at_target = [(TARGET, PORT), (PLAIN, PORT), (PACKETS, PACKETS_RELIABLE)];
        let sshd = [sshd(directory, scene.target(), &at_target)?, sshd(directory, right, &[(behind, PORT)])?];
        Ok(Self { scene, _sshd: sshd })
    }

    /// Copies a file of this size in bytes. Returns the Mb/s from the start of scp to its end.
    ///
    /// # Errors
    /// scp fails, or the file that arrived has another length.
    pub(super) fn copy(&self, copied: Copied, bytes: u64) -> Result<f64> {
        let (left, _, behind) = self.scene.hosts()?;
        let (from, to, port) = match copied {
            Copied::Plain(congestion) => {
                self.scene.route_plain(congestion)?;
                (self.scene.source(), PLAIN, PORT)
            }
            Copied::Payload => (self.scene.source(), TARGET, PORT),
            Copied::Local => (self.scene.source(), PACKETS, PACKETS_RELIABLE),
            Copied::Router => (left, behind, PORT),
        };
        let to = SocketAddr::from((to, port));
        copy(self.scene.directory().path(), from, to, bytes).with_context(|| copied.name())
    }
}

/// Makes the keys of client and server in a folder.
///
/// # Errors
/// ssh is not installed.
pub(super) fn keys(directory: &Path) -> Result<()> {
    for name in [KEY, HOST_KEY] {
        let mut command = Command::new("ssh-keygen");
        command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(directory.join(name));
        let made = command.status().context("ssh-keygen is missing (openssh-client)")?;
        ensure!(made.success(), "ssh-keygen failed");
    }
    Ok(())
}

/// Copies a file of this size in bytes from a node to a server, with the keys of [`keys`]. Returns the Mb/s from the start of
/// scp to its end.
///
/// # Errors
/// scp fails, or the file that arrived has another length.
pub(super) fn copy(directory: &Path, from: &Node, to: SocketAddr, bytes: u64) -> Result<f64> {
    let (file, there) = (directory.join("scp-file"), directory.join("scp-arrived"));
    std::fs::File::create(&file)?.set_len(bytes)?;
    let _ = std::fs::remove_file(&there);
    let mut command = from.command("timeout");
    command.args([ENDS_WITHIN_S, "scp", "-q", "-F", "none", "-c", "aes128-gcm@openssh.com", "-P"]);
    command.arg(to.port().to_string()).arg("-i").arg(directory.join(KEY));
    for option in
        ["BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
    {
        command.args(["-o", option]);
    }
    command.arg(&file).arg(format!("root@{}:{}", to.ip(), there.display()));
    let began = Instant::now();
    let output = command.stdin(Stdio::null()).output()?;
    let seconds = began.elapsed().as_secs_f64();
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "scp: {}", said.trim());
    let arrived = std::fs::metadata(&there).context("the file did not arrive")?.len();
    ensure!(arrived == bytes, "{arrived} of {bytes} bytes arrived");
    Ok(bytes as f64 * 8.0 / seconds / 1e6)
}

/// Starts sshd at these addresses of a host, with the keys of [`keys`].
///
/// # Errors
/// sshd is not installed, or does not start.
pub(super) fn sshd(directory: &Path, node: &Node, addresses: &[(Ipv4Addr, u16)]) -> Result<Service> {
    let name = format!("sshd-{}", node.name());
    let config = directory.join(format!("{name}.conf"));
    let mut text = format!(
        "HostKey {0}/{HOST_KEY}\nAuthorizedKeysFile {0}/{KEY}.pub\nPidFile none\n\
         PermitRootLogin prohibit-password\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n\
         LogLevel ERROR\nSubsystem sftp internal-sftp\n",
        directory.display()
    );
    for (address, port) in addresses {
        let _ = writeln!(text, "ListenAddress {address}:{port}");
    }
    std::fs::write(&config, text)?;
    let program =
        find_program("sshd").ok_or_else(|| Absent("sshd is not installed (openssh-server)".to_owned()))?;
    let mut command = node.command_at("unshare", &Placement::default());
    command.args(["--mount", "--", "sh", "-c", PRIVATE_RUN, "-"]).arg(&config).arg(program);
    let mut sshd = Service::start(&name, command, directory)?;
    sshd.wait_listening(node, PORT)?;
    Ok(sshd)
}
