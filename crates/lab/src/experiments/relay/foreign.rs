//! Connections of other programs on the host of the measured program: the kernel reports theirs, too.

use std::cell::RefCell;
use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};

use crate::kit::Timing;
use crate::launch::{self, Placement};
use crate::load::{Generator, Report, Spec, Via, Work};
use crate::peers::Unavailable;
use crate::service::Service;
use crate::site::{SMALL_FILE, Site};
use crate::statistics::Spread;

/// The port of the foreign nginx.
const PORT: u16 = 9090;
/// Connections at a time: enough for the rate, however little CPU time the measured program leaves.
const CONNECTIONS: u32 = 64;
/// Time limit for the start of the measured program; the load begins before and ends after it.
const START_MS: u64 = 1000;

/// An nginx in the proxy's node, and the results of its load.
#[derive(Debug)]
pub(crate) struct Foreign {
    _nginx: Service,
    per_second: u32,
    seen: RefCell<Vec<Report>>,
}

impl Foreign {
    /// Starts nginx.
    ///
    /// # Errors
    /// It is not installed or does not start.
    pub(crate) fn start(site: &Site, per_second: u32) -> Result<Self> {
        launch::find_program("nginx").context("the foreign load needs nginx; bench/peers.sh installs it")?;
        let directory = site.directory.path().display().to_string();
        let config = format!(
            "daemon off; user root; worker_processes 1; worker_rlimit_nofile 65536;
pid {directory}/foreign.pid; error_log {directory}/foreign-error.log warn;
events {{ worker_connections 16000; multi_accept on; }}
http {{
  access_log off; open_file_cache max=16 inactive=1h;
  client_body_temp_path {directory}/foreign-body; proxy_temp_path {directory}/foreign-proxy;
  fastcgi_temp_path {directory}/foreign-fastcgi; uwsgi_temp_path {directory}/foreign-uwsgi;
  scgi_temp_path {directory}/foreign-scgi;
  server {{ listen 127.0.0.1:{PORT} backlog=8192; root {directory}/www; }}
}}
"
        );
        let path = site.directory.path().join("foreign.conf");
        std::fs::write(&path, config)?;
        let mut command = site.proxy.command_at("nginx", &placement(site));
        command.args(["-e", "stderr", "-c"]).arg(&path);
        let mut nginx = Service::start("foreign", command, site.directory.path())?;
        nginx.wait_listening(&site.proxy, PORT)?;
        Ok(Self { _nginx: nginx, per_second, seen: RefCell::default() })
    }

    /// Takes a sample while the foreign load runs.
    ///
    /// # Errors As for the sample, or the foreign load cannot be made.
    pub(crate) fn beside<T>(
        &self,
        site: &Site,
        timing: Timing,
        take: impl FnOnce() -> Result<T, Unavailable>,
    ) -> Result<T, Unavailable> {
        let address = SocketAddr::from(([127, 0, 0, 1], PORT));
        let spec = Spec {
            work: Work::NewConnection,
            connections: CONNECTIONS,
            dial: address,
            via: Via::Plain,
            destination: address,
            authority: None,
            tls: false,
            path: SMALL_FILE.to_owned(),
            fast_open: false,
            warmup_ms: 50,
            window_ms: timing.warmup_ms + timing.window_ms + START_MS,
            max_requests: u64::MAX,
            per_second: Some(self.per_second),
        };
        let program = crate::load::program(&site.launcher)?;
        let mut generator = Generator::start(site.proxy.command_at(program, &placement(site)), &spec)?;
        generator.wait_window()?;
        let taken = take();
        let report = generator.report()?;
        let checked = || -> Result<()> {
            ensure!(report.requests > 0, "the foreign load had no answer: {:?}", report.errors);
            Ok(())
        };
        checked()?;
        self.seen.borrow_mut().push(report);
        taken
    }

    /// Returns the reached rates, for the report.
    pub(crate) fn sentence(&self) -> String {
        let seen = self.seen.borrow();
        let median = |value: fn(&Report) -> f64| {
            Spread::of(seen.iter().map(value).collect()).map_or(0.0, |spread| spread.median)
        };
        format!(
            "\nBeside: {} connections per second asked of an nginx in the proxy's namespace by another program there, on the proxy's CPU, at \
             ordinary priority; reached {:.0} (median), p99 {:.1} ms. Ours wrote a record line for each flow, and a sample in which the \
             kernel reported lost events counts as failed.\n",
            self.per_second,
            median(Report::rate),
            median(|report| report.p99_ns as f64 / 1e6),
        )
    }
}

/// On the proxy's CPU, like any program there.
fn placement(site: &Site) -> Placement {
    Placement { nice: Some(0), ..site.proxy_placement() }
}
