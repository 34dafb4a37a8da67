//! "Heigh performance proxy", Sec. 3.2: pages by curl, directly, through the proxy and from its cache, with servers
//! at a distance; and its run of ApacheBench.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::origin::{Origin, PORT, TLS_PORT};
use super::programs;
use super::rows::{PROXY_PORT, SIBLING_PORT, Scene};
use crate::kit::{Bar, Bound, Missing, Page};
use crate::link::{Conditions, Kind, Network, Wire};
use crate::progress::Progress;
use crate::service::Service;
use crate::site::{ORIGIN_NAME, Site};
use crate::statistics::Spread;

/// Time limit for a request, in seconds.
const ENDS_WITHIN_S: &str = "20";
/// Maximum ratio of the time without the cache to the direct time.
const UNCACHED_MOST: f64 = 1.03;
/// Maximum time from the cache over http.
const CACHED_MOST_MS: f64 = 1.5;
/// Maximum time from the cache over https, after the TLS handshake.
const CACHED_AFTER_HANDSHAKE_MOST_MS: f64 = 2.0;

/// One page of Fig. 8, and the distance of our server.
struct WebPage {
    scheme: &'static str,
    file: &'static str,
    rtt_ms: u64,
    /// The paper's ratios: page, no cache to direct, cache to direct.
    seed: (&'static str, f64, f64),
}

const PAGES: &[WebPage] = &[
    WebPage {
        scheme: "http",
        file: "index.html",
        rtt_ms: 20,
        seed: ("cs.tufts.edu index.html", 0.88, 0.501),
    },
    WebPage { scheme: "http", file: "bio.html", rtt_ms: 50, seed: ("cs.cmu.edu bio.html", 1.43, 0.240) },
    WebPage {
        scheme: "http",
        file: "headshot.jpg",
        rtt_ms: 200,
        seed: ("cs.cmu.edu headshot.jpg", 1.09, 0.019),
    },
    WebPage { scheme: "https", file: "100k", rtt_ms: 200, seed: ("google.com search", 1.03, 0.083) },
    WebPage { scheme: "https", file: "100k", rtt_ms: 20, seed: ("instagram.com", 1.50, 0.309) },
    WebPage { scheme: "https", file: "100k", rtt_ms: 50, seed: ("youtube.com", 1.21, 0.234) },
];

/// The columns of the paper's Fig. 7, in seconds.
const TIMES: [&str; 6] = ["namelookup", "connect", "appconnect", "pretransfer", "starttransfer", "total"];

/// curl's times of one request, in seconds, in the order of [`TIMES`].
type Times = [f64; 6];

/// First requests of proxies that have just started.
#[derive(Debug, Default)]
struct Firsts {
    /// Nothing is stored, and no connection is open.
    cold: Vec<Times>,
    /// A sibling has the page.
    sibling: Vec<Times>,
}

/// The way of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Direct,
    Proxy,
    Cached,
    /// Through a second proxy, which has the first one as sibling.
    Sibling,
}

impl Way {
    /// Those that are measured in turn.
    const ALL: [Self; 3] = [Self::Direct, Self::Proxy, Self::Cached];

    const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Proxy => "proxy, not stored",
            Self::Cached => "proxy, out of its cache",
            Self::Sibling => "proxy, from its sibling",
        }
    }
}

/// Measures, writes the tables and returns the bars.
///
/// # Errors
/// Links or origin cannot be made. A page that cannot be measured is missing.
pub(super) fn run(
    quick: bool,
    page: &mut Page,
    progress: &Progress,
    missing: &mut Missing,
) -> Result<Vec<Bar>> {
    let launcher = crate::launch::launcher()?;
    let network = Network::new(Kind::Auto, &launcher, 1)?;
    let (site, wires) = Site::emulated(&network)?;
    let scene = Scene { origin: Origin::start(&site)?, site: &site };
    let (requests, fresh) = if quick { (3, 1) } else { (20, 5) };
    page.line(format_args!(
        "### Pages (Figs. 7 and 8)\n\n{requests} times each by curl, in turn; medians. Links: {:?}. The \
         client is beside the proxy, the server at the distance named, directly and from the proxy, which is \
         started anew for each page. What is not stored comes over connections to the server that the proxy \
         has kept. Cold: the first request of a proxy that has just started. Sibling: the first request of a \
         second proxy that has just started, whose sibling has the page; each {fresh} times. Siblings are \
         asked for http only.\n",
        network.kind()
    ));
    page.columns([
        "page of the seed",
        "here",
        "RTT ms:",
        "direct ms:",
        "cold:",
        "not stored:",
        "cached:",
        "sibling:",
        "not stored / direct (seed):",
        "cached / direct (seed):",
    ]);
    let mut bars = Vec::new();
    let mut fig_7 = None;
    for web in PAGES {
        let name = format!("pages: {}", web.seed.0);
        progress.now(&name);
        let times = web.measure(&scene, &wires, requests);
        let Some(times) = missing.note(&name, times, progress) else { continue };
        let firsts = web.firsts(&scene, &wires, fresh);
        let firsts = missing.note(&format!("{name}, cold"), firsts, progress).unwrap_or_default();
        let report = web.report(&times, &firsts, page);
        bars.extend(missing.note(&name, report, progress).unwrap_or_default());
        if web.seed.0.starts_with("instagram") {
            fig_7 = Some(times);
        }
    }
    if let Some(times) = fig_7 {
        figure_7(&times, page);
    }
    let done = apache_bench(&scene, &wires, page);
    missing.note("pages: ab", done, progress);
    Ok(bars)
}

impl WebPage {
    fn measure(&self, scene: &Scene<'_>, wires: &[Wire], requests: usize) -> Result<[Vec<Times>; 3]> {
        // A new proxy for each page: TCP remembers the path of a kept connection, and the path has just changed.
        let _proxy = start_proxy(scene, wires, self.rtt_ms)?;
        // Earlier requests, which do not count, fill the cache and open the kept connections.
        for way in [Way::Proxy, Way::Cached] {
            self.ask(scene, way)?;
        }
        let mut times: [Vec<Times>; 3] = Default::default();
        for _ in 0..requests {
            for (way, times) in Way::ALL.into_iter().zip(&mut times) {
                times.push(self.ask(scene, way)?);
            }
        }
        Ok(times)
    }

    /// Measures the first requests of proxies that have just started.
    fn firsts(&self, scene: &Scene<'_>, wires: &[Wire], count: usize) -> Result<Firsts> {
        let mut firsts = Firsts::default();
        for _ in 0..count {
            let _proxy = start_proxy(scene, wires, self.rtt_ms)?;
            firsts.cold.push(self.ask(scene, Way::Proxy)?);
            if self.scheme == "https" {
                continue;
            }
            // The sibling gets the page.
            self.ask(scene, Way::Cached)?;
            let _second = programs::ours_with_sibling(scene).map_err(|why| anyhow::anyhow!("ours: {why}"))?;
            firsts.sibling.push(self.ask(scene, Way::Sibling)?);
        }
        Ok(firsts)
    }

    /// Fetches one page by curl.
    fn ask(&self, scene: &Scene<'_>, way: Way) -> Result<Times> {
        let port = if self.scheme == "https" { TLS_PORT } else { PORT };
        let folder = if matches!(way, Way::Cached | Way::Sibling) { "hit" } else { "miss" };
        let url = format!("{}://{ORIGIN_NAME}:{port}/{folder}/{}", self.scheme, self.file);
        let format: Vec<String> = TIMES.iter().map(|name| format!("%{{time_{name}}}")).collect();
        let format = format!("%{{http_code}} {}", format.join(" "));
        let there = format!("{ORIGIN_NAME}:{port}:{}", scene.site.client_server.b.v4);
        let listens = if way == Way::Sibling { SIBLING_PORT } else { PROXY_PORT };
        let proxy = format!("http://{}", scene.site.proxy_address(listens));
        let directory = scene.site.directory.path();
        let root = match way {
            Way::Direct => scene.origin.authority.clone(),
            Way::Proxy | Way::Cached | Way::Sibling => directory.join("our-ca/root.pem"),
        };
        let root = root.display().to_string();
        let mut arguments = vec!["-q", "-s", "-o", "/dev/null", "-m", ENDS_WITHIN_S, "-w", &format];
        arguments.extend(["--cacert", &root]);
        arguments.extend(match way {
            Way::Direct => ["--resolve", &there],
            Way::Proxy | Way::Cached | Way::Sibling => ["-x", &proxy],
        });
        arguments.push(&url);
        let said =
            scene.site.client.run("curl", &arguments).with_context(|| format!("{}: {url}", way.name()))?;
        let mut words = said.split_whitespace();
        ensure!(words.next() == Some("200"), "{} gave {said:?} for {url}", way.name());
        let mut times = Times::default();
        for time in &mut times {
            *time = words
                .next()
                .and_then(|word| word.parse().ok())
                .with_context(|| format!("curl said {said:?}"))?;
        }
        Ok(times)
    }

    fn report(&self, times: &[Vec<Times>; 3], firsts: &Firsts, page: &mut Page) -> Result<Vec<Bar>> {
        let [direct, uncached, cached] = times;
        let spread = |values: Vec<f64>| Spread::of(values).context("curl was never asked");
        let total = |times: &[Times]| spread(times.iter().map(|times| times[5] * 1e3).collect());
        let over_direct = |times: &[Times]| {
            let pairs = times.iter().zip(direct);
            spread(pairs.map(|(one, direct)| one[5] / direct[5].max(1e-9)).collect())
        };
        let first = |times: &[Times]| {
            total(times).map_or_else(|_| "-".to_owned(), |all| format!("{:.1}", all.median))
        };
        let (slower, faster) = (over_direct(uncached)?, over_direct(cached)?);
        let (name, seed_slower, seed_faster) = self.seed;
        page.row(format_args!(
            "{name} | {} {} | {} | {:.1} | {} | {:.1} | {:.2} | {} | {:.3} ({seed_slower}) | {:.3} ({seed_faster})",
            self.scheme,
            self.file,
            self.rtt_ms,
            total(direct)?.median,
            first(&firsts.cold),
            total(uncached)?.median,
            total(cached)?.median,
            first(&firsts.sibling),
            slower.median,
            faster.median
        ));
        let is_tls = self.scheme == "https";
        let after_handshake = spread(cached.iter().map(|times| (times[5] - times[2]) * 1e3).collect())?;
        let (what, measured, bound) = if is_tls {
            ("cached, after the local handshake", after_handshake, CACHED_AFTER_HANDSHAKE_MOST_MS)
        } else {
            ("cached", total(cached)?, CACHED_MOST_MS)
        };
        let bar = |what: &str, measured, most, unit| {
            let what = format!("{} {}, {} ms: {what}", self.scheme, self.file, self.rtt_ms);
            Bar::new(what, Ok(measured), Bound::AtMost(most)).unit(unit)
        };
        Ok(vec![bar("not stored / direct", slower, UNCACHED_MOST, ""), bar(what, measured, bound, " ms")])
    }
}

/// Sets the server's distance, and starts the proxy.
fn start_proxy(scene: &Scene<'_>, wires: &[Wire], rtt_ms: u64) -> Result<Vec<Service>> {
    place_server(wires, rtt_ms)?;
    programs::ours_opening(scene).map_err(|why| anyhow::anyhow!("ours: {why}"))
}

/// Sets the server's distance, from the client and from the proxy.
fn place_server(wires: &[Wire], rtt_ms: u64) -> Result<()> {
    let [client_proxy, to_server @ ..] = wires else { return Ok(()) };
    client_proxy.set_both(Conditions::default())?;
    to_server
        .iter()
        .try_for_each(|wire| wire.set_both(Conditions::delayed(Duration::from_millis(rtt_ms) / 2)))
}

fn figure_7(times: &[Vec<Times>; 3], page: &mut Page) {
    page.line(format_args!(
        "\nThe times of instagram.com's page, ms (Fig. 7):\n\n| | {} |",
        TIMES.join(" | ")
    ));
    page.line(format_args!("|---|{}", "---:|".repeat(TIMES.len())));
    for (way, times) in Way::ALL.into_iter().zip(times) {
        let median = |at: usize| {
            Spread::of(times.iter().map(|times| times[at] * 1e3).collect()).map_or(0.0, |all| all.median)
        };
        let values: Vec<String> = (0..TIMES.len()).map(|at| format!("{:.2}", median(at))).collect();
        page.row(format_args!("{} | {}", way.name(), values.join(" | ")));
    }
    page.blank();
}

/// The paper's run: `ab -n 5 -c 3` of the page of Fig. 10, and a longer one.
fn apache_bench(scene: &Scene<'_>, wires: &[Wire], page: &mut Page) -> Result<()> {
    let _proxy = start_proxy(scene, wires, PAGES[0].rtt_ms)?;
    PAGES[0].ask(scene, Way::Cached)?;
    let url = format!("http://{ORIGIN_NAME}:{PORT}/hit/index.html");
    let proxy = scene.site.proxy_address(PROXY_PORT).to_string();
    page.line(format_args!(
        "ApacheBench (Fig. 10; the seed: 54.58 requests/s, 18.3 ms, none failed), the page stored, its \
         server {} ms away:\n",
        PAGES[0].rtt_ms
    ));
    page.columns(["", "requests/s:", "ms each:", "failed:"]);
    for (count, at_once) in [("5", "3"), ("5000", "3")] {
        let said = scene.site.client.run("ab", &["-q", "-n", count, "-c", at_once, "-X", &proxy, &url])?;
        let value = |name: &str| {
            let line = said.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split(':').nth(1)?.split_whitespace().next()).map(str::to_owned)
        };
        let value = |name: &str| value(name).with_context(|| format!("ab does not say {name:?}: {said}"));
        let failed = value("Failed requests")?;
        page.row(format_args!(
            "-n {count} -c {at_once} | {} | {} | {failed}",
            value("Requests per second")?,
            value("Time per request")?
        ));
        ensure!(failed == "0", "ab counted {failed} failed requests");
    }
    page.blank();
    Ok(())
}
