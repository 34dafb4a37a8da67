//! The configuration: what a good file becomes, and every error message with its carets.

use sidetrack::config::{Config, OnCrash, RecordTo, SecretFile, Surroundings};
use std::io;
use std::path::{Path, PathBuf};

/// A machine with two users and two files.
struct Machine;

impl Surroundings for Machine {
    fn uid_of(&self, name: &str) -> Option<u32> {
        [("root", 0), ("etl", 1001)].iter().find(|(user, _)| *user == name).map(|(_, uid)| *uid)
    }

    fn secret_file(&self, path: &str) -> io::Result<SecretFile> {
        match path {
            "gw.pass" => Ok(SecretFile { text: "ops:from-file\n".to_owned(), world_readable: false }),
            "open.pass" => Ok(SecretFile { text: "hunter2\n".to_owned(), world_readable: true }),
            _ => Err(io::Error::new(io::ErrorKind::NotFound, "No such file or directory (os error 2)")),
        }
    }

    fn resolve(&self, path: &str) -> PathBuf {
        Path::new("/etc/sidetrack").join(path)
    }
}

fn load(text: &str) -> Result<Config, String> {
    Config::from_text_in("sidetrack.toml", text, &Machine).map_err(|error| error.render(false))
}

const FULL: &str = r#"
version = 1
workers = 2
on_crash = "closed"
default = "deny"

[admin]
socket = "run/admin.sock"
metrics = "127.0.0.1:9465"

[record]
to = "./flows.jsonl"
recent = 10

[limits]
max_flows = 1000
max_flows_per_client = 50
idle_timeout_ms = 60000
lifetime_ms = 3600000
connect_timeout_ms = 5000
handshake_timeout_ms = 4000
first_bytes_ms = 50
buffer_bytes = 16384

[set]
research = ["10.20.0.0/16", "fd20::/16"]

[[listen]]
kind = "socks"
address = ["127.0.0.1:1080", "[::1]:1080"]
accept_proxy_protocol = "10.0.0.0/8"
users = [{ user = "ann", password = "secret" }, { user = "bob", password_file = "open.pass" }]
dialect = "draft"

[[listen]]
name = "web"
kind = "reverse"
address = "*:8080"
names = { "a.example" = "10.0.0.2:443", "*.b.example" = "10.0.0.3:443", "*.c.b.example" = "10.0.0.4:443" }
default = "fallback.example:443"

[[listen]]
name = "db"
kind = "reverse"
address = "127.0.0.1:5432"
to = "10.0.0.9:5432"

[[listen]]
kind = "redirect"
forwarded = true
interfaces = "eth1"
dst = ["@research", "203.0.113.0/24"]
except = "203.0.113.7"
ports = [22, "5000-5010"]
users = ["etl", 1002]
cgroup = "/system.slice/vendor.service"

[[listen]]
kind = "tproxy"
interfaces = ["eth2"]

[[rule]]
name = "ehr"
match = { from = "10.1.0.0/16", to = "@research", port = 5432, listener = ["redirect", "tproxy"], intercept = "redirect", process = "etl", user = "etl" }
carrier = ["socks5://a:p%40ss@gw:1080", "socks6://b:1081"]
resolve = "local"
metadata = { 1000 = "x", 7 = "y" }
initial_data_wait_ms = 20

[[rule]]
name = "named"
match = { host = ["*.example.nl", "example.nl"], socks_user = "ann" }
carrier = "socks5://gw"
credentials_file = "gw.pass"
dial = "name"

[[rule]]
name = "moved"
match = { port = ["1000-2000", 3000] }
carrier = "direct"
to = "10.9.9.9:99"
keep_client_address = true
proxy_protocol = 2
idle_timeout_ms = 1
lifetime_ms = 2
connect_timeout_ms = 3
tfo = true
mptcp = true
kernel = "never"

[[rule]]
name = "no-telnet"
match = { port = 23 }
action = "deny"

[[test]]
flow = { src = "10.1.0.5", dst = "10.20.3.4:5432", listener = "redirect", process = "etl", user = "etl" }
expect = { rule = "ehr", carrier = ["socks5://gw:1080", "socks6://b:1081"] }

[[test]]
flow = { dst = "192.0.2.1:443", listener = "socks", host = "www.example.nl", socks_user = "ann" }
expect = { rule = "named", action = "carry" }

[[test]]
flow = { listener = "db" }
expect = { rule = "default", action = "deny" }
"#;

#[test]
fn a_full_file_becomes_what_it_says() {
    let config = load(FULL).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((config.version, config.workers, config.on_crash), (1, 2, OnCrash::Closed));
    assert_eq!(config.admin.socket.as_deref(), Some(Path::new("/etc/sidetrack/run/admin.sock")));
    assert_eq!(config.admin.metrics, Some("127.0.0.1:9465".parse().unwrap()));
    assert_eq!(config.record.to, RecordTo::File("/etc/sidetrack/./flows.jsonl".into()));
    assert_eq!(config.record.recent, 10);
    insta::assert_debug_snapshot!("full_limits", config.limits);
    let names: Vec<_> = config.listeners.iter().map(|listener| &*listener.name).collect();
    assert_eq!(names, ["socks", "web", "db", "redirect", "tproxy"]);
    insta::assert_debug_snapshot!("full_listeners", config.listeners);
    insta::assert_debug_snapshot!("full_policy", config.policy);
    assert_eq!(config.tests.len(), 3);
    let warnings: Vec<_> = config.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings, ["every user of this machine can read 'open.pass'"]);
}
