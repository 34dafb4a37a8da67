//! Real programs across namespaces: curl and ssh at the client, other proxies and redirectors and ours between, nginx
//! and sshd at the server. Every transfer is compared byte by byte. The proxy's node forwards no packets, so
//! everything that arrives has passed the programs (the first test checks that).
//!
//! Root is needed. Rows whose programs are not installed are skipped, printed and counted; `SIDETRACK_REQUIRE_ALL=1`
//! turns a skip into a failure.

#[allow(dead_code, reason = "each test file uses its part")]
mod support;

use sidetrack_lab::load::Via;
use sidetrack_lab::peers::socksx::{S6, S6_DATA, V0_1_0, V0_1_1};
use sidetrack_lab::peers::{Proxy, Redirecting, Redirector, Unavailable, ours};
use sidetrack_lab::service::Service;
use sidetrack_lab::site::Site;
use support::programs::{Program, Way, World};
use support::{Done, Tally, skip_if_absent};

use Program::{Curl, CurlByName, CurlByNameV6, CurlRefused, CurlV6, Generator, Ssh};

/// What catches a program's connections and sends them to the proxy.
#[derive(Debug, Clone, Copy)]
enum Catch {
    /// Nothing: the program speaks SOCKS itself.
    Itself,
    /// A redirector in the client's node.
    By(Redirector),
    /// Our redirector with several hops: these, then the proxy of the row by this scheme.
    Chain(&'static [(&'static str, Proxy)], &'static str),
    /// `sidetrack run --via SCHEME://PROXY -- PROGRAM`.
    Run(&'static str),
}

/// Programs through one combination.
type Row = (Catch, Proxy, &'static [Program]);

const ALL_CURLS: &[Program] = &[Curl, CurlV6, CurlByName, CurlByNameV6, CurlRefused, Ssh];

/// In SOCKS6 mode the redirector of socksx closes a connection whose first bytes have not arrived when it reads
/// (`try_read_buf` gives EAGAIN). curl therefore fails one time in three, so the client is one that sends at once,
/// many times.
const HASTY: &[Program] = &[Generator(Via::Plain)];

const fn redirect(scheme: &'static str) -> Catch {
    Catch::By(Redirector::Ours { scheme, options: "", waits: true })
}

/// The harness itself: these rows work without Sidetrack.
const PEERS: &[Row] = &[
    (Catch::Itself, Proxy::Dante, &[Curl, CurlByName, CurlRefused, Ssh, Generator(Via::Socks5)]),
    (
        Catch::Itself,
        Proxy::Microsocks,
        &[Curl, CurlV6, CurlByName, CurlByNameV6, Ssh, Generator(Via::Socks5)],
    ),
    (Catch::Itself, Proxy::Socksx(V0_1_0, 5), &[Curl, CurlByName, Ssh]),
    (Catch::Itself, Proxy::Socksx(V0_1_1, 5), &[Curl, CurlByName, Ssh]),
    (Catch::Itself, Proxy::Socksx(V0_1_0, 6), &[Generator(S6), Generator(S6_DATA)]),
    (Catch::Itself, Proxy::Socksx(V0_1_1, 6), &[Generator(S6), Generator(S6_DATA)]),
    (Catch::By(Redirector::Redsocks), Proxy::Dante, &[Curl, Ssh]),
    (Catch::By(Redirector::Socksx(V0_1_0, 5)), Proxy::Dante, &[Curl, Ssh]),
    (Catch::By(Redirector::Socksx(V0_1_1, 5)), Proxy::Dante, &[Curl, Ssh]),
    (Catch::By(Redirector::Socksx(V0_1_0, 6)), Proxy::Socksx(V0_1_0, 6), HASTY),
];

/// Other clients and redirectors, our proxy.
const OUR_PROXY: &[Row] = &[
    (Catch::Itself, Proxy::Ours, ALL_CURLS),
    (
        Catch::Itself,
        Proxy::Ours,
        &[
            Generator(Via::Socks5),
            Generator(Via::Socks6Draft { initial_data: false }),
            Generator(Via::Socks6Draft { initial_data: true }),
            Generator(S6),
            Generator(S6_DATA),
        ],
    ),
    (Catch::By(Redirector::Redsocks), Proxy::Ours, &[Curl, Ssh]),
    (Catch::By(Redirector::Socksx(V0_1_0, 5)), Proxy::Ours, &[Curl, Ssh]),
    (Catch::By(Redirector::Socksx(V0_1_1, 5)), Proxy::Ours, &[Curl, Ssh]),
    (Catch::By(Redirector::Socksx(V0_1_0, 6)), Proxy::Ours, HASTY),
];

/// Unmodified programs, our interception and carriers, other proxies and ours.
const OUR_CLIENT: &[Row] = &[
    (redirect("socks5"), Proxy::Dante, &[Curl, Ssh]),
    (redirect("socks5"), Proxy::Microsocks, &[Curl, CurlV6, Ssh]),
    (redirect("socks5"), Proxy::Socksx(V0_1_0, 5), &[Curl, Ssh]),
    (redirect("socks5"), Proxy::Socksx(V0_1_1, 5), &[Curl, Ssh]),
    (redirect("socks6+socksx010"), Proxy::Socksx(V0_1_0, 6), &[Curl, Ssh]),
    (redirect("socks6+socksx"), Proxy::Socksx(V0_1_1, 6), &[Curl, Ssh]),
    (redirect("socks5"), Proxy::Ours, &[Curl, CurlV6, Ssh]),
    (redirect("socks6"), Proxy::Ours, &[Curl, CurlV6, Ssh]),
    (redirect("socks6+socksx"), Proxy::Ours, &[Curl, CurlV6, Ssh]),
    (Catch::Chain(&[("socks5", Proxy::Dante)], "socks5"), Proxy::Microsocks, &[Curl, Ssh]),
    (Catch::Chain(&[("socks6", Proxy::Ours)], "socks5"), Proxy::Dante, &[Curl, Ssh]),
    (Catch::Chain(&[("socks5", Proxy::Dante)], "socks6"), Proxy::Ours, &[Curl, Ssh]),
    (Catch::Chain(&[("socks6+socksx010", Proxy::Socksx(V0_1_0, 6))], "socks6"), Proxy::Ours, &[Curl, Ssh]),
    (
        Catch::Chain(&[("socks5", Proxy::Dante), ("socks6", Proxy::Ours)], "socks5"),
        Proxy::Microsocks,
        &[Curl, Ssh],
    ),
    (Catch::Run("socks5"), Proxy::Dante, &[Curl, CurlByName, Ssh]),
    (Catch::Run("socks5"), Proxy::Microsocks, &[Curl, CurlV6, CurlByName, CurlByNameV6, Ssh]),
    (Catch::Run("socks6+socksx010"), Proxy::Socksx(V0_1_0, 6), &[Curl, CurlByName, Ssh]),
    (Catch::Run("socks5"), Proxy::Ours, &[Curl, CurlV6, CurlByName, CurlByNameV6, Ssh]),
    (Catch::Run("socks6"), Proxy::Ours, &[Curl, CurlV6, CurlByName, CurlByNameV6, Ssh]),
];

#[test]
fn without_a_redirector_nothing_reaches_the_origin() {
    let mut tally = Tally::default();
    if let Some(site) = support::site(&mut tally) {
        let origin = site.origin().to_string();
        let curl = ["-q", "-sS", "--max-time", "1", &format!("http://{origin}/small")];
        let reached = site.client.run("curl", &curl);
        let result =
            if reached.is_err() { Ok(Done::Ran) } else { Err("the proxy's node forwards packets".into()) };
        tally.note("no way around the proxy", result);
    }
    tally.finish();
}

#[test]
fn peers_work_with_each_other() {
    run(PEERS);
}

#[test]
fn our_proxy_serves_everybody() {
    run(OUR_PROXY);
}

#[test]
fn our_client_side_uses_every_proxy() {
    run(OUR_CLIENT);
}

fn run(rows: &[Row]) {
    let mut tally = Tally::default();
    if let Some(site) = support::site(&mut tally) {
        let world = World::new(&site);
        // For development: only rows whose name contains this, such as "Microsocks".
        let only = std::env::var("SIDETRACK_ONLY").unwrap_or_default();
        for row in rows.iter().filter(|row| format!("{row:?}").contains(&only)) {
            run_row(&world, &site, row, &mut tally);
        }
    }
    tally.finish();
}

/// The programs of a row.
struct Started<'s> {
    proxies: Vec<Service>,
    redirector: Option<Redirecting<'s>>,
    way: Way,
}

impl Started<'_> {
    fn logs(&self) -> String {
        let services = self.proxies.iter().chain(self.redirector.as_ref().map(|running| &running.service));
        services.fold(String::new(), |logs, service| logs + "\n" + &service.log())
    }
}

fn start<'s>(site: &'s Site, catch: Catch, proxy: Proxy) -> Result<Started<'s>, Unavailable> {
    let mut proxies = vec![proxy.start(site)?];
    let gateway = site.proxy_address(proxy.port());
    let (redirector, way) = match catch {
        Catch::Itself => (None, Way::Socks5(gateway)),
        Catch::Run(scheme) => (None, Way::Run(scheme, gateway)),
        Catch::By(redirector) => (Some(redirector.start(site, gateway)?), Way::Redirected),
        Catch::Chain(before, scheme) => {
            for (_, proxy) in before {
                proxies.push(proxy.start(site)?);
            }
            let hop =
                |(scheme, proxy): &(&str, Proxy)| format!("{scheme}://{}", site.proxy_address(proxy.port()));
            let hops: Vec<String> = before.iter().chain([&(scheme, proxy)]).map(hop).collect();
            (Some(Redirecting::by_itself(ours::redirector(site, &hops)?)), Way::Redirected)
        }
    };
    Ok(Started { proxies, redirector, way })
}

fn run_row(world: &World<'_>, site: &Site, row: &Row, tally: &mut Tally) {
    let (catch, proxy, programs) = *row;
    match start(site, catch, proxy) {
        Err(reason) => tally.note(&format!("{catch:?} and {proxy:?}"), skip_if_absent(reason)),
        Ok(started) => {
            for program in programs {
                let result = world.run(*program, started.way).map_err(|failure| failure + &started.logs());
                tally.note(&format!("{program:?} through {catch:?} and {proxy:?}"), result);
            }
        }
    }
}
