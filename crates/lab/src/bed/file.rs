//! The file of a test bed.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};

/// The first of the ports that a test bed uses, unless the file names another.
const FIRST_PORT: u16 = 42080;
/// Number of ports from the first one on.
const PORTS: u16 = 4;

/// What a host does in the experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It sends requests.
    Client,
    /// It runs the proxies.
    Proxy,
    /// It answers requests.
    Server,
}

impl Role {
    /// All roles, in the order of [`TestBed::hosts`].
    pub const ALL: [Self; 3] = [Self::Client, Self::Proxy, Self::Server];
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Client => "client",
            Self::Proxy => "proxy",
            Self::Server => "server",
        })
    }
}

/// How a host is reached by ssh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSpec {
    /// Its role.
    pub role: Role,
    /// Name or address for ssh; also a name of the user's ssh configuration.
    pub ssh: String,
    /// Port of sshd; none: as ssh is configured.
    pub port: Option<u16>,
    /// User to log in as; none: as ssh is configured.
    pub user: Option<String>,
    /// File with the private key; none: as ssh is configured.
    pub key: Option<PathBuf>,
    /// File with the keys of the hosts; none: as ssh is configured.
    pub known_hosts: Option<PathBuf>,
}

/// A checked file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestBed {
    /// Client, proxy, server.
    pub hosts: [HostSpec; 3],
    /// The proxy's address that the client dials.
    pub proxy_for_client: IpAddr,
    /// The server's address that the client dials.
    pub server_for_client: IpAddr,
    /// The server's address that the proxy dials.
    pub server_for_proxy: IpAddr,
    /// The first of four ports, which have to be free on proxy and server.
    pub first_port: u16,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawBed {
    first_port: Option<u16>,
    #[serde(default)]
    host: Vec<RawHost>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawHost {
    role: Role,
    ssh: String,
    port: Option<u16>,
    user: Option<String>,
    key: Option<PathBuf>,
    known_hosts: Option<PathBuf>,
    #[serde(default)]
    reached_at: ReachedAt,
}

/// Addresses of the data plane, by the host that dials.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReachedAt {
    client: Option<IpAddr>,
    proxy: Option<IpAddr>,
}

impl TestBed {
    /// Reads and checks a file. Its folder is the base of relative paths in it.
    ///
    /// # Errors
    /// The file cannot be read, has an unknown or a missing key, or its values do not fit; the message names the place.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let base = path.parent().unwrap_or(Path::new("."));
        Self::parse(&text, base).with_context(|| format!("{} is not a test bed", path.display()))
    }

    fn parse(text: &str, base: &Path) -> Result<Self> {
        let raw: RawBed = toml::from_str(text)?;
        let first_port = raw.first_port.unwrap_or(FIRST_PORT);
        ensure!(
            first_port > 0 && first_port <= u16::MAX - PORTS + 1,
            "first_port = {first_port}: {PORTS} ports from there on are used, 1 to 65535"
        );
        for host in &raw.host {
            check(host, base)?;
        }
        let find = |role: Role| {
            let mut found = raw.host.iter().filter(|host| host.role == role);
            let host = found.next().with_context(|| {
                format!("no host has role = \"{role}\"; a test bed has a client, a proxy and a server")
            })?;
            ensure!(found.next().is_none(), "two hosts have role = \"{role}\"");
            Ok(host)
        };
        let [client, proxy, server] = [find(Role::Client)?, find(Role::Proxy)?, find(Role::Server)?];
        let none = &client.reached_at;
        ensure!(
            none.client.is_none() && none.proxy.is_none(),
            "host \"client\": no other host dials it; remove reached_at"
        );
        ensure!(
            proxy.reached_at.proxy.is_none(),
            "host \"proxy\": it does not dial itself; remove reached_at.proxy"
        );
        Ok(Self {
            proxy_for_client: address(proxy, proxy.reached_at.client, Role::Client)?,
            server_for_client: address(server, server.reached_at.client, Role::Client)?,
            server_for_proxy: address(server, server.reached_at.proxy, Role::Proxy)?,
            hosts: [client, proxy, server].map(|host| spec(host, base)),
            first_port,
        })
    }
}

/// Returns the address of a host for `by`: the one in the file, otherwise that of ssh, if it is an address.
fn address(host: &RawHost, given: Option<IpAddr>, by: Role) -> Result<IpAddr> {
    given.or_else(|| host.ssh.parse().ok()).ok_or_else(|| {
        anyhow!(
            "host \"{}\": ssh = \"{}\" is a name; say at which address the {by} reaches it: \
             reached_at = {{ {by} = \"ADDRESS\" }}",
            host.role,
            host.ssh
        )
    })
}

fn check(host: &RawHost, base: &Path) -> Result<()> {
    let role = host.role;
    // ssh would read a leading dash as an option.
    for (key, value) in [("ssh", Some(&host.ssh)), ("user", host.user.as_ref())] {
        let Some(value) = value else { continue };
        if value.is_empty() || value.starts_with('-') || value.contains(char::is_whitespace) {
            bail!("host \"{role}\": {key} = {value:?} is not a name");
        }
    }
    ensure!(host.port != Some(0), "host \"{role}\": port = 0 is not a port; use 1 to 65535");
    for (key, file) in [("key", &host.key), ("known_hosts", &host.known_hosts)] {
        let Some(file) = file else { continue };
        let file = base.join(file);
        ensure!(file.is_file(), "host \"{role}\": {key}: there is no file {}", file.display());
    }
    Ok(())
}

fn spec(host: &RawHost, base: &Path) -> HostSpec {
    let below = |file: &Option<PathBuf>| file.as_ref().map(|file| base.join(file));
    HostSpec {
        role: host.role,
        ssh: host.ssh.clone(),
        port: host.port,
        user: host.user.clone(),
        key: below(&host.key),
        known_hosts: below(&host.known_hosts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = r#"
first_port = 5000
[[host]]
role = "server"
ssh = "server.lab"
reached_at = { client = "10.3.0.2", proxy = "fd77::2" }
[[host]]
role = "client"
ssh = "client.lab"
user = "lab"
port = 2222
[[host]]
role = "proxy"
ssh = "10.1.0.2"
"#;

    #[test]
    fn a_file_is_read_in_any_order_and_addresses_of_ssh_serve() {
        let bed = TestBed::parse(WHOLE, Path::new("/beds")).expect("valid");
        assert_eq!(bed.hosts.each_ref().map(|host| host.role), Role::ALL);
        assert_eq!((bed.hosts[0].port, bed.hosts[0].user.as_deref()), (Some(2222), Some("lab")));
        assert_eq!(bed.proxy_for_client, "10.1.0.2".parse::<IpAddr>().expect("valid"));
        assert_eq!(bed.server_for_proxy, "fd77::2".parse::<IpAddr>().expect("valid"));
        assert_eq!(bed.first_port, 5000);
    }

    #[test]
    fn a_bad_file_is_told_with_its_place() {
        let error = |from: &str, to: &str| {
            assert!(WHOLE.contains(from), "{from}");
            let text = WHOLE.replace(from, to);
            format!("{:#}", TestBed::parse(&text, Path::new("/beds")).expect_err(to))
        };
        for (from, to, expected) in [
            ("role = \"proxy\"", "role = \"client\"", "two hosts have role = \"client\""),
            ("role = \"proxy\"", "role = \"relay\"", "unknown variant `relay`"),
            ("[[host]]\nrole = \"proxy\"\nssh = \"10.1.0.2\"\n", "", "no host has role = \"proxy\""),
            ("ssh = \"10.1.0.2\"", "ssh = \"proxy.lab\"", "reached_at = { client = \"ADDRESS\" }"),
            ("ssh = \"10.1.0.2\"", "", "missing field `ssh`"),
            ("ssh = \"10.1.0.2\"", "ssh = \"-oProxyCommand=x\"", "is not a name"),
            ("\"10.3.0.2\"", "\"10.3.0\"", "line 6"),
            ("port = 2222", "port = 0", "port = 0 is not a port"),
            ("port = 2222", "prot = 2222", "unknown field `prot`"),
            ("port = 2222", "key = \"absent\"", "there is no file /beds/absent"),
            ("port = 2222", "reached_at = { proxy = \"10.0.0.1\" }", "no other host dials it"),
            ("first_port = 5000", "first_port = 65533", "4 ports from there on"),
        ] {
            let text = error(from, to);
            assert!(text.contains(expected), "{to}: {text}");
        }
        let twice = format!("{WHOLE}[[host]]\nrole = \"proxy\"\nssh = \"10.1.0.3\"\n");
        let text = format!("{:#}", TestBed::parse(&twice, Path::new("/")).expect_err("two proxies"));
        assert!(text.contains("two hosts have role = \"proxy\""), "{text}");
    }
}
