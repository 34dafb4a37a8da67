//! nginx as a TCP relay (module `stream`) and as the reverse proxy of the EPI paper.

use std::net::SocketAddr;
use std::path::Path;

use super::{RELAY_PORT, Start, Unavailable, configured, relay, started};
use crate::site::Site;

/// The path of the module in Debian's package; on other systems it may be built in.
const MODULE: &str = "/usr/lib/nginx/modules/ngx_stream_module.so";

/// Returns the configuration of one worker with one server of the module `stream`.
fn stream_config(
    site: &Site,
    server: impl FnOnce(SocketAddr, SocketAddr) -> String,
) -> Result<String, Unavailable> {
    if !Path::new(MODULE).is_file() {
        return Err(Unavailable::Absent(
            "libnginx-mod-stream is not installed; bench/peers.sh installs it".into(),
        ));
    }
    let (listen, origin) = (site.proxy_address(RELAY_PORT), site.origin());
    let directory = site.directory.path().display();
    let server = server(listen, origin);
    Ok(format!(
        "load_module {MODULE};
daemon off; user root; worker_processes 1; worker_rlimit_nofile 65536;
pid {directory}/nginx-stream.pid; error_log {directory}/nginx-stream-error.log warn;
events {{ worker_connections 19990; multi_accept on; }}
stream {{ server {{ {server} }} }}
"
    ))
}

/// One worker, `proxy_pass` to the origin.
pub(super) fn stream(site: &Site) -> Start<'_> {
    let config = stream_config(site, |listen, origin| {
        format!("listen {listen} backlog=8192; tcp_nodelay on; proxy_timeout 1h; proxy_pass {origin};")
    })?;
    let service = configured(site, "nginx", &config, &["-e", "stderr", "-c"], RELAY_PORT)?;
    Ok(relay(site, service))
}

/// One worker, datagrams to the origin.
pub(super) fn datagrams(site: &Site) -> Start<'_> {
    let config = stream_config(site, |listen, origin| {
        format!("listen {listen} udp; proxy_timeout 60s; proxy_pass {origin};")
    })?;
    let mut service = started(site, "nginx", &config, &["-e", "stderr", "-c"])?;
    service.wait_bound(&site.proxy, RELAY_PORT)?;
    Ok(relay(site, service))
}

/// One worker, HTTP, a new connection to the server for each request: the EPI paper's `Connection: Close`.
pub(super) fn http_close(site: &Site) -> Start<'_> {
    let (listen, origin) = (site.proxy_address(RELAY_PORT), site.origin());
    let directory = site.directory.path().display();
    let config = format!(
        "daemon off; user root; worker_processes 1; worker_rlimit_nofile 65536;
pid {directory}/nginx-http.pid; error_log {directory}/nginx-http-error.log warn;
events {{ worker_connections 19990; multi_accept on; }}
http {{
  access_log off; keepalive_requests 1000000000; keepalive_timeout 3600;
  client_body_temp_path {directory}/body-http; proxy_temp_path {directory}/proxy-http;
  fastcgi_temp_path {directory}/fastcgi-http; uwsgi_temp_path {directory}/uwsgi-http;
  scgi_temp_path {directory}/scgi-http;
  server {{ listen {listen} backlog=8192;
    location / {{ proxy_pass http://{origin}; proxy_set_header Connection close; }} }}
}}
"
    );
    let service = configured(site, "nginx", &config, &["-e", "stderr", "-c"], RELAY_PORT)?;
    Ok(relay(site, service))
}
