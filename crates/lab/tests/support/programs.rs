//! The programs that a person would use, run in the client's node against the origin.

use std::fs::{self, File};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sidetrack_lab::launch::{Placement, find_program};
use sidetrack_lab::load::{Spec, Via, Work};
use sidetrack_lab::peers::ours;
use sidetrack_lab::service::Service;
use sidetrack_lab::site::{ORIGIN_NAME, ORIGIN_NAME_V6, SMALL_FILE, SSH_PORT, Site};

use super::{Done, Failure, skip_if_absent};

/// Time limit for every run of a program, in seconds.
const ENDS_WITHIN_S: &str = "120";
/// Bytes moved and compared.
const PAYLOAD_BYTES: usize = 3_000_017;
/// Its name at the origin.
const PAYLOAD_FILE: &str = "payload";

/// The way of the program's connection.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Way {
    /// The program is not configured: it is redirected.
    Redirected,
    /// The program itself speaks SOCKS5 to this proxy.
    Socks5(SocketAddr),
    /// `sidetrack run --via CARRIER` in front of the program.
    Run(&'static str, SocketAddr),
}

/// A client program and what it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Program {
    /// curl fetches by IPv4 address.
    Curl,
    /// curl fetches by IPv6 address.
    CurlV6,
    /// curl gives the proxy the name.
    CurlByName,
    /// curl gives the proxy a name that has an IPv6 address only.
    CurlByNameV6,
    /// curl requests a port without a listener, and must fail.
    CurlRefused,
    /// ssh sends a file through `cat`: the server speaks first, bytes go both ways.
    Ssh,
    /// The lab's own generator speaks this to the proxy.
    Generator(Via),
}

/// The fetched payload, and the server side of ssh.
pub(crate) struct World<'s> {
    site: &'s Site,
    payload: Vec<u8>,
    key: PathBuf,
    /// The sshd; it ends with this value.
    _sshd: Option<Service>,
}

impl<'s> World<'s> {
    /// Puts a payload at the origin, and starts sshd if it is installed.
    pub(crate) fn new(site: &'s Site) -> Self {
        let payload = noise(PAYLOAD_BYTES);
        let directory = site.directory.path();
        fs::write(directory.join("www").join(PAYLOAD_FILE), &payload).expect("the origin's folder is ours");
        let key = directory.join("key");
        let sshd = find_program("sshd").map(|_| start_sshd(site, &key));
        Self { site, payload, key, _sshd: sshd }
    }

    /// Runs a program and compares the received bytes with the sent ones.
    pub(crate) fn run(&self, program: Program, way: Way) -> Result<Done, Failure> {
        let origin = self.site.proxy_server.b;
        match program {
            Program::Curl => self.curl(way, &origin.v4.to_string(), false),
            Program::CurlV6 => self.curl(way, &format!("[{}]", origin.v6), false),
            Program::CurlByName => self.curl(way, ORIGIN_NAME, true),
            Program::CurlByNameV6 => self.curl(way, ORIGIN_NAME_V6, true),
            Program::CurlRefused => self.refused(way),
            Program::Ssh => self.ssh(way),
            Program::Generator(via) => self.generate(way, via),
        }
    }

    fn curl(&self, way: Way, host: &str, by_name: bool) -> Result<Done, Failure> {
        let url = format!("http://{host}/{PAYLOAD_FILE}");
        let mut command = match self.command("curl", way)? {
            Ok(command) => command,
            Err(done) => return Ok(done),
        };
        command.args(["-q", "-sS", "-g", "--fail", "--max-time", ENDS_WITHIN_S]);
        if let Way::Socks5(proxy) = way {
            command.arg(if by_name { "--socks5-hostname" } else { "--socks5" }).arg(proxy.to_string());
        }
        command.arg(url).stdin(Stdio::null());
        self.compare(command)
    }

    fn refused(&self, way: Way) -> Result<Done, Failure> {
        let Way::Socks5(proxy) = way else {
            return Err("only a program that speaks SOCKS sees the refusal".into());
        };
        const NOBODY_LISTENS: u16 = 81;
        const CURLE_PROXY: i32 = 97;
        let mut command = match self.command("curl", way)? {
            Ok(command) => command,
            Err(done) => return Ok(done),
        };
        command.args(["-q", "-sS", "--max-time", ENDS_WITHIN_S, "--socks5", &proxy.to_string()]);
        command.arg(format!("http://{}:{NOBODY_LISTENS}/", self.site.origin().ip())).stdin(Stdio::null());
        let output = command.output().map_err(|error| error.to_string())?;
        if output.status.code() == Some(CURLE_PROXY) {
            return Ok(Done::Ran);
        }
        Err(format!(
            "curl ended with {} and not with 97: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        ))
    }

    fn ssh(&self, way: Way) -> Result<Done, Failure> {
        if self._sshd.is_none() {
            return Ok(Done::Skipped("sshd is not installed".into()));
        }
        let mut command = match self.command("ssh", way)? {
            Ok(command) => command,
            Err(done) => return Ok(done),
        };
        command.args(["-F", "none", "-i"]).arg(&self.key);
        for option in [
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "BatchMode=yes",
            "ConnectTimeout=60",
            "LogLevel=ERROR",
        ] {
            command.args(["-o", option]);
        }
        if let Way::Socks5(proxy) = way {
            if find_program("nc").is_none() {
                return Ok(Done::Skipped("nc is not installed".into()));
            }
            command.args(["-o", &format!("ProxyCommand=nc -X 5 -x {proxy} %h %p")]);
        }
        let payload = File::open(self.payload_path()).map_err(|error| error.to_string())?;
        command.arg(format!("root@{}", self.site.origin().ip())).arg("cat").stdin(payload);
        self.compare(command)
    }

    fn generate(&self, way: Way, via: Via) -> Result<Done, Failure> {
        let dial = match way {
            Way::Socks5(proxy) => proxy,
            Way::Redirected => self.site.origin(),
            Way::Run(..) => return Err("the generator does not run behind sidetrack run".into()),
        };
        let spec = Spec {
            work: Work::NewConnection,
            connections: 4,
            dial,
            via,
            destination: self.site.origin(),
            authority: None,
            tls: false,
            path: SMALL_FILE.into(),
            fast_open: false,
            warmup_ms: 0,
            window_ms: 120_000,
            max_requests: 200,
            per_second: None,
        };
        let mut generator = self.site.generate(&spec).map_err(|error| error.to_string())?;
        let report =
            generator.wait_window().and_then(|()| generator.report()).map_err(|error| error.to_string())?;
        // A connection that a redirector closes is its own loss (see HASTY). The answers of a proxy must be correct
        // every time.
        let lost = if via == Via::Plain { 0 } else { report.error_count() };
        if report.requests + report.error_count() >= spec.max_requests && report.requests > 0 && lost == 0 {
            return Ok(Done::Ran);
        }
        Err(format!("{} answers of {}, failures {:?}", report.requests, spec.max_requests, report.errors))
    }

    /// Returns the command for a program in the client's node, bounded in time, behind `sidetrack run` if requested.
    fn command(&self, program: &str, way: Way) -> Result<Result<Command, Done>, Failure> {
        if find_program(program).is_none() {
            return Ok(Err(Done::Skipped(format!("{program} is not installed"))));
        }
        let mut command = self.site.client.command("timeout");
        command.args(["-k", "2", ENDS_WITHIN_S]);
        if let Way::Run(scheme, gateway) = way {
            match ours::program_with_run() {
                Ok(sidetrack) => command.arg(sidetrack),
                Err(unavailable) => return skip_if_absent(unavailable).map(Err),
            };
            command.args(["run", "--via", &format!("{scheme}://{gateway}"), "--"]);
        }
        command.arg(program);
        Ok(Ok(command))
    }

    /// Runs a command whose standard output must be the payload.
    fn compare(&self, mut command: Command) -> Result<Done, Failure> {
        let path = self.site.directory.path().join("received");
        let received = File::create(&path).map_err(|error| error.to_string())?;
        let child = command.stdout(received).stderr(Stdio::piped()).spawn();
        let output =
            child.and_then(std::process::Child::wait_with_output).map_err(|error| error.to_string())?;
        let received = fs::read(&path).map_err(|error| error.to_string())?;
        if output.status.success() && received == self.payload {
            return Ok(Done::Ran);
        }
        let errors = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(format!(
            "{}, {} of {} bytes, the same up to byte {}: {errors}",
            output.status,
            received.len(),
            self.payload.len(),
            received.iter().zip(&self.payload).take_while(|(a, b)| a == b).count()
        ))
    }

    fn payload_path(&self) -> PathBuf {
        self.site.directory.path().join("www").join(PAYLOAD_FILE)
    }
}

/// Bytes without a pattern, always the same (xorshift64*).
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 56) as u8
    };
    (0..length).map(|_| next()).collect()
}

fn start_sshd(site: &Site, key: &Path) -> Service {
    let directory = site.directory.path();
    let host_key = directory.join("host-key");
    for path in [key, &host_key] {
        let status =
            Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path).status();
        assert!(status.expect("ssh-keygen comes with ssh").success());
    }
    let config = directory.join("sshd.conf");
    let listen = [IpAddr::V4(site.proxy_server.b.v4), IpAddr::V6(site.proxy_server.b.v6)];
    let text = format!(
        "Port {SSH_PORT}\nListenAddress {}\nListenAddress {}\nHostKey {}\nAuthorizedKeysFile {}.pub\nPidFile none\n\
         PermitRootLogin prohibit-password\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nLogLevel ERROR\n",
        listen[0],
        listen[1],
        host_key.display(),
        key.display()
    );
    fs::write(&config, text).expect("the site's folder is ours");
    // sshd needs /run/sshd; a private /run avoids changing the host's.
    const PRIVATE_RUN: &str =
        "mount -t tmpfs lab /run && mkdir -m 0755 /run/sshd && exec /usr/sbin/sshd -D -e -f \"$1\"";
    let placement = Placement { netns: None, cpu: Some(0), nice: None };
    let mut command = site.server.command_at("unshare", &placement);
    command.args(["--mount", "--", "sh", "-c", PRIVATE_RUN, "-"]).arg(&config);
    let mut sshd = Service::start("sshd", command, directory).expect("sshd can be started");
    sshd.wait_listening(&site.server, SSH_PORT).expect("sshd listens");
    sshd
}
