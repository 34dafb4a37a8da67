//! The origin of the HTTP experiment: a second nginx beside the site's, in clear and over TLS. It says which answers
//! may be stored, and counts its requests.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::certificate::{self, Pair};
use crate::launch::Placement;
use crate::service::Service;
use crate::site::{ORIGIN_NAME, Site};

/// Port in clear.
pub(super) const PORT: u16 = 8480;
/// Port of TLS: the default port of interceptors.
pub(super) const TLS_PORT: u16 = 443;
const STATUS_PORT: u16 = 8481;
/// Time limit for the origin's counters.
const PATIENCE: Duration = Duration::from_secs(10);

/// Its files: name and bytes. Answers below `/hit/` may be stored for an hour, those below `/miss/` never.
const FILES: &[(&str, usize)] = &[
    ("1k", 1 << 10),
    ("100k", 100 << 10),
    ("10m", 10 << 20),
    // The page of Figs. 8 and 10 of the paper, and two similar ones.
    ("index.html", 6321),
    ("bio.html", 12 << 10),
    ("headshot.jpg", 300 << 10),
];

/// The origin, and the authority of its certificate.
#[derive(Debug)]
pub(super) struct Origin {
    service: Service,
    /// Certificate of an authority: it signed the origin's, and signs for the peers that intercept.
    pub authority: PathBuf,
    /// Its key.
    pub authority_key: PathBuf,
}

impl Origin {
    /// Makes files and certificates, and starts it.
    ///
    /// # Errors
    /// openssl or nginx is missing, or a file cannot be written.
    pub(super) fn start(site: &Site) -> Result<Self> {
        let directory = site.directory.path();
        let root = directory.join("web");
        for folder in ["hit", "miss"] {
            std::fs::create_dir_all(root.join(folder))?;
            for (name, bytes) in FILES {
                std::fs::write(root.join(folder).join(name), "x".repeat(*bytes))?;
            }
        }
        let [authority, authority_key, leaf, leaf_key] =
            ["lab-ca.pem", "lab-ca.key", "origin.pem", "origin.key"].map(|name| directory.join(name));
        let authority_pair = Pair { certificate: authority.clone(), key: authority_key.clone() };
        certificate::make(&[], &authority_pair, "/CN=Sidetrack laboratory")?;
        let issuer = [
            ("-CA", authority.display().to_string()),
            ("-CAkey", authority_key.display().to_string()),
            ("-addext", format!("subjectAltName=DNS:{ORIGIN_NAME}")),
            ("-addext", "basicConstraints=critical,CA:FALSE".to_owned()),
        ];
        let leaf_pair = Pair { certificate: leaf.clone(), key: leaf_key.clone() };
        certificate::make(&issuer, &leaf_pair, &format!("/CN={ORIGIN_NAME}"))?;
        let path = directory.join("web.conf");
        std::fs::write(&path, config(&directory.display().to_string()))?;
        let placement = Placement { nice: Some(-19), ..site.client_placement() };
        let mut command = site.server.command_at("nginx", &placement);
        command.args(["-e", "stderr", "-c"]).arg(&path);
        let mut service = Service::start("web-origin", command, directory)?;
        service.wait_listening(&site.server, STATUS_PORT)?;
        Ok(Self { service, authority, authority_key })
    }

    /// Returns the number of requests since its start.
    ///
    /// # Errors
    /// It does not answer.
    pub(super) fn requests(&self, site: &Site) -> Result<u64> {
        let text = site.server.enter(|| {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, STATUS_PORT));
            let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })?;
        // "server accepts handled requests" and, on the next line, the three numbers.
        let numbers = text.lines().skip_while(|line| !line.contains("requests")).nth(1);
        let requests = numbers.and_then(|line| line.split_whitespace().nth(2)?.parse().ok());
        requests.with_context(|| format!("the origin says of its requests: {text:?}"))
    }

    /// Returns true if it still runs.
    pub(super) fn is_running(&mut self) -> bool {
        self.service.is_running()
    }
}

fn config(directory: &str) -> String {
    format!(
        "daemon off; user root; worker_processes 1; worker_rlimit_nofile 65536;
pid {directory}/web.pid; error_log {directory}/web-error.log warn;
events {{ worker_connections 16000; multi_accept on; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000; keepalive_timeout 3600;
  open_file_cache max=64 inactive=1h; default_type application/octet-stream;
  client_body_temp_path {directory}/web-body; proxy_temp_path {directory}/web-proxy;
  fastcgi_temp_path {directory}/web-fastcgi; uwsgi_temp_path {directory}/web-uwsgi;
  scgi_temp_path {directory}/web-scgi;
  ssl_certificate {directory}/origin.pem; ssl_certificate_key {directory}/origin.key;
  ssl_session_cache shared:tls:1m;
  server {{
    listen {PORT} backlog=8192; listen {TLS_PORT} ssl backlog=8192;
    root {directory}/web;
    location /hit/ {{ add_header Cache-Control \"public, max-age=3600\"; }}
    location /miss/ {{ add_header Cache-Control no-store; }}
  }}
  server {{ listen 127.0.0.1:{STATUS_PORT}; stub_status; }}
}}
"
    )
}
