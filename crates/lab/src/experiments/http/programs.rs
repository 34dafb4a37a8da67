//! All programs with generated configurations: one worker, 256 MiB of memory for the cache, no log.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use super::origin;
use super::rows::{PROXY_PORT, SIBLING_PORT, Scene};
use crate::peers::{Unavailable, bare, configured, installed, ours};
use crate::service::Service;
use crate::site::ORIGIN_NAME;

type Started = Result<Vec<Service>, Unavailable>;

/// Maximum size of a stored answer, in bytes, for all programs.
const OBJECT_BYTES: u64 = 32 << 20;
/// Memory of the cache in bytes, for all programs.
const MEMORY_BYTES: u64 = 256 << 20;

/// nginx with `proxy_cache`: files in the page cache, connections to the origin kept.
pub(super) fn nginx(scene: &Scene<'_>) -> Started {
    let (listen, directory) =
        (scene.site.proxy_address(PROXY_PORT), scene.site.directory.path().display().to_string());
    let origin = origin_address(scene);
    let config = format!(
        "daemon off; user root; worker_processes 1; worker_rlimit_nofile 65536;
pid {directory}/cache.pid; error_log {directory}/cache-error.log warn;
events {{ worker_connections 16000; multi_accept on; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000; keepalive_timeout 3600;
  client_body_temp_path {directory}/cache-body; proxy_temp_path {directory}/cache-proxy;
  fastcgi_temp_path {directory}/cache-fastcgi; uwsgi_temp_path {directory}/cache-uwsgi;
  scgi_temp_path {directory}/cache-scgi;
  proxy_cache_path {directory}/cache-files levels=1:2 keys_zone=stored:16m max_size=1g inactive=1h use_temp_path=off;
  upstream origin {{ server {origin}; keepalive 64; keepalive_requests 1000000000; }}
  server {{
    listen {listen} backlog=8192;
    location / {{
      proxy_pass http://origin; proxy_http_version 1.1; proxy_set_header Connection \"\";
      proxy_set_header Host {ORIGIN_NAME}; proxy_cache stored;
    }}
  }}
}}
"
    );
    Ok(vec![configured(scene.site, "nginx", &config, &["-e", "stderr", "-c"], PROXY_PORT)?])
}

/// The limit: the smallest program that passes bytes on, without HTTP.
pub(super) fn limit(scene: &Scene<'_>) -> Started {
    let site = scene.site;
    let origin = SocketAddr::from((site.proxy_server.b.v4, origin::PORT));
    Ok(vec![bare::between(site, site.proxy_address(PROXY_PORT), origin)?])
}

/// HAProxy with its cache in memory, one thread.
pub(super) fn haproxy(scene: &Scene<'_>) -> Started {
    let (listen, origin) = (scene.site.proxy_address(PROXY_PORT), origin_address(scene));
    let config = format!(
        "global
  nbthread 1
  maxconn 9000
cache stored
  total-max-size {}
  max-object-size {OBJECT_BYTES}
  max-age 3600
defaults
  mode http
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  http-reuse always
listen web
  bind {listen} backlog 8192
  http-request cache-use stored
  http-response cache-store stored
  server origin {origin}
",
        MEMORY_BYTES >> 20
    );
    Ok(vec![configured(scene.site, "haproxy", &config, &["-db", "-f"], PROXY_PORT)?])
}

/// Varnish, storage in memory.
pub(super) fn varnish(scene: &Scene<'_>) -> Started {
    let site = scene.site;
    installed("varnishd")?;
    let directory = site.directory.path();
    let mut command = site.proxy.command_at("varnishd", &site.proxy_placement());
    command.args(["-F", "-j", "none", "-a", &site.proxy_address(PROXY_PORT).to_string()]);
    command.args(["-b", &origin_address(scene), "-s", &format!("malloc,{MEMORY_BYTES}")]);
    command.args(["-p", "thread_pools=1", "-n"]).arg(directory.join("varnish"));
    listening(scene, "varnish", command)
}

/// Traffic Server, one thread, answers from its memory.
pub(super) fn traffic_server(scene: &Scene<'_>) -> Started {
    let site = scene.site;
    installed("traffic_server")?;
    let home = fresh_folder(scene, "traffic-server")?;
    for folder in ["etc", "cache", "run", "log", "var"] {
        std::fs::create_dir(home.join(folder))?;
    }
    let folder = home.display();
    let etc = home.join("etc");
    let root = home.join("runroot.yaml");
    std::fs::write(
        &root,
        format!(
            "prefix: {folder}\nexec_prefix: /usr\nbindir: /usr/bin\nsbindir: /usr/sbin\nsysconfdir: {folder}/etc\n\
             datadir: {folder}/cache\nincludedir: /usr/include\nlibdir: /usr/lib/trafficserver\n\
             libexecdir: /usr/lib/trafficserver/modules\nlocalstatedir: {folder}/var\nruntimedir: {folder}/run\n\
             logdir: {folder}/log\ncachedir: {folder}/cache\n"
        ),
    )?;
    let allow = "ip_allow:\n  - {apply: in, ip_addrs: 0/0, action: allow, methods: ALL}\n";
    for (name, text) in [
        ("storage.config", format!("{folder}/cache {}M\n", (MEMORY_BYTES >> 20) + 64)),
        ("plugin.config", String::new()),
        ("logging.yaml", "logging: {}\n".to_owned()),
        ("ip_allow.yaml", allow.to_owned()),
        ("remap.config", format!("map / http://{}/\n", origin_address(scene))),
        ("records.config", traffic_server_records()),
    ] {
        std::fs::write(etc.join(name), text)?;
    }
    let mut command = site.proxy.command_at("traffic_server", &site.proxy_placement());
    command.arg(format!("--run-root={}", root.display()));
    listening(scene, "traffic-server", command)
}

fn traffic_server_records() -> String {
    let numbers = [
        ("exec_thread.autoconfig", 0),
        ("exec_thread.limit", 1),
        ("accept_threads", 0),
        ("task_threads", 1),
        ("cache.threads_per_disk", 1),
        ("cache.ram_cache.size", MEMORY_BYTES),
        ("cache.ram_cache_cutoff", OBJECT_BYTES),
        ("log.logging_enabled", 0),
        ("http.cache.http", 1),
    ];
    let numbers: String =
        numbers.iter().map(|(name, value)| format!("CONFIG proxy.config.{name} INT {value}\n")).collect();
    format!(
        "{numbers}CONFIG proxy.config.http.server_ports STRING {PROXY_PORT}\n\
         CONFIG proxy.config.admin.user_id STRING #-1\n"
    )
}

/// Squid: `-N`, memory only.
pub(super) fn squid(scene: &Scene<'_>) -> Started {
    start_squid(scene, &squid_program()?, "", "")
}

/// Squid that intercepts TLS: it peeks at the hello, then bumps; two helper processes make the leaf certificates,
/// which are cached.
pub(super) fn squid_bumping(scene: &Scene<'_>) -> Started {
    let program = squid_program()?;
    let maker = program.ancestors().nth(2).map(|usr| usr.join("lib/squid/security_file_certgen"));
    let absent = || Unavailable::Absent("Squid with OpenSSL is not there; bench/peers.sh unpacks it".into());
    let maker = maker.filter(|maker| maker.is_file()).ok_or_else(absent)?;
    let both = scene.site.directory.path().join("squid-ca.pem");
    let origin = &scene.origin;
    std::fs::write(
        &both,
        [std::fs::read(&origin.authority_key)?, std::fs::read(&origin.authority)?].concat(),
    )?;
    let folder = fresh_folder(scene, "squid-leaves")?;
    let leaves = folder.join("db");
    run(std::process::Command::new(&maker).args(["-c", "-s"]).arg(&leaves).args(["-M", "8MB"]))?;
    give_to_squid(&folder)?;
    let config = format!(
        "sslcrtd_program {} -s {} -M 8MB\nsslcrtd_children 2 startup=2\nacl hello at_step SslBump1\n\
         ssl_bump peek hello\nssl_bump bump all\ntls_outgoing_options cafile={}\n",
        maker.display(),
        leaves.display(),
        origin.authority.display()
    );
    let bump = format!(
        " ssl-bump tls-cert={} generate-host-certificates=on dynamic_cert_mem_cache_size=8MB",
        both.display()
    );
    start_squid(scene, &program, &bump, &config)
}

/// Squid built with OpenSSL, which `bench/peers.sh` unpacks: Debian's other package has no `ssl_bump`.
fn squid_program() -> Result<PathBuf, Unavailable> {
    let peers = std::env::var_os("SIDETRACK_PEERS").map(PathBuf::from).or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
        Some(cache.join("sidetrack/peers"))
    });
    let unpacked = peers.map(|peers| peers.join("squid-openssl/usr/sbin/squid"));
    unpacked
        .filter(|path| path.is_file())
        .ok_or_else(|| Unavailable::Absent("squid-openssl is not there; bench/peers.sh unpacks it".into()))
}

fn start_squid(scene: &Scene<'_>, program: &Path, port_options: &str, more: &str) -> Started {
    let site = scene.site;
    let home = fresh_folder(scene, "squid")?;
    let (folder, listen) = (home.display(), site.proxy_address(PROXY_PORT));
    let config = format!(
        "http_port {listen}{port_options}\n{more}http_access allow all\n\
         cache_mem {} MB\nmaximum_object_size_in_memory {} KB\naccess_log none\ncache_log {folder}/cache.log\n\
         pid_filename {folder}/pid\ncoredump_dir {folder}\nvisible_hostname proxy.lab\nmax_filedescriptors 20000\n\
         mime_table /usr/share/squid/mime.conf\nhosts_file {}\nshutdown_lifetime 0 seconds\npinger_enable off\n\
         client_idle_pconn_timeout 1 hour\n",
        MEMORY_BYTES >> 20,
        OBJECT_BYTES >> 10,
        site.directory.path().join("hosts").display(),
    );
    let path = home.join("squid.conf");
    std::fs::write(&path, config)?;
    give_to_squid(&home)?;
    let mut command = site.proxy.command_at(&program.display().to_string(), &site.proxy_placement());
    // Its shared memory has its name, so that it does not collide with other Squids of this machine.
    command.args(["-N", "-n", &format!("lab{}", std::process::id()), "-f"]).arg(&path);
    listening(scene, "squid", command)
}

/// mitmdump without HTTP/2 and without output.
pub(super) fn mitmproxy(scene: &Scene<'_>) -> Started {
    installed("mitmdump")?;
    let site = scene.site;
    let home = fresh_folder(scene, "mitmproxy")?;
    let origin = &scene.origin;
    let both = [std::fs::read(&origin.authority_key)?, std::fs::read(&origin.authority)?].concat();
    std::fs::write(home.join("mitmproxy-ca.pem"), both)?;
    let mut command = site.proxy_command("mitmdump");
    command.args(["--quiet", "--listen-host", &site.proxy_address(PROXY_PORT).ip().to_string()]);
    command.args(["--listen-port", &PROXY_PORT.to_string(), "--set", "http2=false"]);
    command.args(["--set", &format!("confdir={}", home.display())]);
    command.args(["--set", &format!("ssl_verify_upstream_trusted_ca={}", origin.authority.display())]);
    listening(scene, "mitmproxy", command)
}

/// Ours as a forward proxy with a cache.
pub(super) fn ours(scene: &Scene<'_>) -> Started {
    Listener { keys: &our_cache(), ..Listener::PLAIN }.start(scene)
}

/// Ours as a forward proxy without one.
pub(super) fn ours_without_cache(scene: &Scene<'_>) -> Started {
    Listener::PLAIN.start(scene)
}

/// Ours as a reverse proxy of the origin, with a cache.
pub(super) fn ours_for_origin(scene: &Scene<'_>) -> Started {
    let keys = format!("to = \"{}\"\n{}", origin_address(scene), our_cache());
    Listener { keys: &keys, ..Listener::PLAIN }.start(scene)
}

/// Ours, intercepting TLS, with a cache.
pub(super) fn ours_opening(scene: &Scene<'_>) -> Started {
    let authority = scene.site.directory.path().join("our-ca");
    if !authority.is_dir() {
        let mut command = std::process::Command::new(ours::program()?);
        run(command.args(["ca", "init", "--any-name", "--dir"]).arg(&authority))?;
    }
    let tables = format!(
        "[tap]\nca = \"{}\"\ntrust = \"{}\"\n",
        authority.display(),
        scene.origin.authority.display()
    );
    let keys = format!("{}tap = true\n", our_cache());
    Listener { keys: &keys, tables: &tables, ..Listener::PLAIN }.start(scene)
}

/// Ours as a second forward proxy, which has the first one as sibling.
pub(super) fn ours_with_sibling(scene: &Scene<'_>) -> Started {
    let (listen, first) = (scene.site.proxy_address(SIBLING_PORT), scene.site.proxy_address(PROXY_PORT));
    let config = format!(
        "[[listen]]\nkind = \"http\"\naddress = \"{listen}\"\ncache = {{ memory_bytes = {MEMORY_BYTES}, object_bytes = \
         {OBJECT_BYTES}, siblings = [\"{first}\"] }}\n{}",
        ours::rule("carrier = \"direct\"")
    );
    Ok(vec![ours::start(scene.site, &scene.site.proxy, "sibling", &config, SIBLING_PORT)?])
}

fn our_cache() -> String {
    format!("cache = {{ memory_bytes = {MEMORY_BYTES}, object_bytes = {OBJECT_BYTES} }}\n")
}

/// Ours with one `http` listener.
pub(super) struct Listener<'a> {
    /// Further keys of the listener.
    pub keys: &'a str,
    /// Further tables.
    pub tables: &'a str,
    /// Keys of the one rule.
    pub rule: &'a str,
}

impl Listener<'_> {
    /// A forward proxy for everything.
    const PLAIN: Self = Self { keys: "", tables: "", rule: "carrier = \"direct\"" };

    /// Starts it.
    pub(super) fn start(&self, scene: &Scene<'_>) -> Started {
        let Self { keys, tables, rule } = self;
        let (listen, rule) = (scene.site.proxy_address(PROXY_PORT), ours::rule(rule));
        let config = format!("{tables}[[listen]]\nkind = \"http\"\naddress = \"{listen}\"\n{keys}{rule}");
        Ok(vec![ours::start(scene.site, &scene.site.proxy, "http", &config, PROXY_PORT)?])
    }
}

/// Squid refuses to run as root: its folder is given to Debian's user for it, below folders that this user may enter.
fn give_to_squid(folder: &Path) -> anyhow::Result<()> {
    let scratch = folder.parent().context("a folder lies in the scratch space")?;
    std::fs::set_permissions(scratch, std::fs::Permissions::from_mode(0o711))?;
    run(std::process::Command::new("chown").args(["-R", "proxy"]).arg(folder))
}

/// Runs a short command to its end.
fn run(command: &mut std::process::Command) -> anyhow::Result<()> {
    let output = command.output().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    ensure!(
        output.status.success(),
        "{:?} failed: {}",
        command.get_program(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

fn origin_address(scene: &Scene<'_>) -> String {
    format!("{}:{}", scene.site.proxy_server.b.v4, origin::PORT)
}

/// Makes an empty folder of this name in the scratch space.
fn fresh_folder(scene: &Scene<'_>, name: &str) -> anyhow::Result<PathBuf> {
    let path = scene.site.directory.path().join(name);
    if path.is_dir() {
        std::fs::remove_dir_all(&path).with_context(|| format!("cannot empty {}", path.display()))?;
    }
    std::fs::create_dir(&path)?;
    Ok(path)
}

fn listening(scene: &Scene<'_>, name: &str, command: std::process::Command) -> Started {
    let mut service = Service::start(name, command, scene.site.directory.path())?;
    service.wait_listening(&scene.site.proxy, PROXY_PORT)?;
    Ok(vec![service])
}
