//! Sidetrack with chains: functions inside the process, functions in containers, and the rows to compare them with:
//! further hops, and the smallest program that copies bytes.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::anyhow;

use super::ours::{rule, start};
use super::{Class, Peer, RELAY_PORT, Start, Unavailable, relay};
use crate::engine::Engine;
use crate::site::Site;

/// Time limit until containers are healthy.
const READY_WITHIN: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Port of the second relay of ours in a pair.
const SECOND_PORT: u16 = 9081;

/// The functions inside the process, in the order in which longer chains add them: two that only count bytes (the
/// kernel may move their flows), then two that read the bytes, then the same again.
const FUNCTIONS: &str = "[function.f1]\nkind = \"count\"\n\
    [function.f2]\nkind = \"limit\"\nbytes_per_second = 1000000000000\n\
    [function.f3]\nkind = \"filter\"\ndeny_words = [\"a word that nobody says\"]\n\
    [function.f4]\nkind = \"replace\"\nreplace = [{ find = \"another such word\", with = \"\" }]\n\
    [function.f5]\nkind = \"count\"\n\
    [function.f6]\nkind = \"limit\"\nbytes_per_second = 1000000000000\n\
    [function.f7]\nkind = \"filter\"\ndeny_words = [\"a third one of these\"]\n\
    [function.f8]\nkind = \"replace\"\nreplace = [{ find = \"and a fourth one\", with = \"\" }]\n";

/// Keys of a container: Sidetrack itself as a SOCKS6 proxy, so that the function costs exactly one relay.
pub const CONTAINER: &str = "kind = \"container\"\nimage = \"localhost/relay:1\"\nspeaks = \"socks6\"\npids = 4096\n\
    memory_bytes = 1073741824\ncpu_percent = 400\ncommand = [\"/program\", \"up\", \"-c\", \"/relay.toml\"]\n";

/// The configuration of Sidetrack in the container.
pub const RELAY_CONFIG: &str = "version = 1\nworkers = 1\ndefault = \"direct\"\n[admin]\nsocket = \"none\"\n[record]\nto = \"none\"\n\
    [[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:1080\"\n";

const fn row(name: &'static str, class: Class, start: for<'s> fn(&'s Site) -> Start<'s>) -> Peer {
    Peer { name, is_ours: true, class, start }
}

/// Processor time of each container of [`REPLICAS`], per cent of one core.
pub const REPLICA_CPU_PERCENT: u32 = 10;

/// A function in one container, and in several among which its flows are divided.
pub const REPLICAS: &[Peer] = &[
    row("1 replica", Class::OneHop, replicas::<1>),
    row("2 replicas", Class::OneHop, replicas::<2>),
    row("4 replicas", Class::OneHop, replicas::<4>),
];

/// Returns all rows: chains of functions inside the process, containers, further relays of ours, and the limits of
/// copying.
pub const CHAINS: &[Peer] = &[
    row("chain of 0", Class::OneHop, inside::<0>),
    row("chain of 1", Class::OneHop, inside::<1>),
    row("chain of 2", Class::OneHop, inside::<2>),
    row("chain of 3", Class::OneHop, inside::<3>),
    row("chain of 4", Class::OneHop, inside::<4>),
    row("chain of 5", Class::OneHop, inside::<5>),
    row("chain of 6", Class::OneHop, inside::<6>),
    row("chain of 7", Class::OneHop, inside::<7>),
    row("chain of 8", Class::OneHop, inside::<8>),
    row("1 container", Class::OneHop, containers::<1>),
    row("2 containers", Class::OneHop, containers::<2>),
    row("1 further relay", Class::Pair, further_relay),
    bare("bare copy, 64 KiB", |site| super::bare::reverse_by(site, 64 << 10)),
    bare("bare copy, 256 KiB", |site| super::bare::reverse_by(site, 256 << 10)),
];

/// How many of [`FUNCTIONS`] only count: longer chains read the bytes.
pub const COUNTING: usize = 2;

/// The smallest program that reads every byte and writes it on, by the size of its buffer: the lower bound for flows
/// whose bytes a program must read.
pub const BARE_COPIES: [&str; 2] = ["bare copy, 64 KiB", "bare copy, 256 KiB"];

const fn bare(name: &'static str, start: for<'s> fn(&'s Site) -> Start<'s>) -> Peer {
    Peer { name, is_ours: false, class: Class::Limit, start }
}

fn listener(port: u16, site: &Site, to: SocketAddr) -> String {
    format!("[[listen]]\nkind = \"reverse\"\naddress = \"{}\"\nto = \"{to}\"\n", site.proxy_address(port))
}

/// Through the first `N` of [`FUNCTIONS`].
fn inside<const N: usize>(site: &Site) -> Start<'_> {
    let names: Vec<_> = (1..=N).map(|number| format!("\"f{number}\"")).collect();
    let chain = if N == 0 { String::new() } else { format!("chain = [{}]\n", names.join(", ")) };
    let rule = rule(&format!("carrier = \"direct\"\nkernel = \"never\"\n{chain}"));
    let config = format!("{}{rule}{FUNCTIONS}", listener(RELAY_PORT, site, site.origin()));
    Ok(relay(site, start(site, &site.proxy, "chain", &config, RELAY_PORT)?))
}

/// Through `N` containers.
fn containers<const N: usize>(site: &Site) -> Start<'_> {
    let cpu = site.proxy_placement().cpu.unwrap_or(0);
    let engine = Engine::shared(&super::ours::program()?, cpu).map_err(Unavailable::Absent)?;
    let names: Vec<_> = (1..=N).map(|number| format!("\"c{number}\"")).collect();
    let functions: String = (1..=N).map(|number| format!("[function.c{number}]\n{CONTAINER}")).collect();
    through(site, engine, &names.join(", "), &functions)
}

/// Through one of `N` containers of one function.
fn replicas<const N: usize>(site: &Site) -> Start<'_> {
    let cpu = site.proxy_placement().cpu.unwrap_or(0);
    let engine = Engine::shared(&super::ours::program()?, cpu).map_err(Unavailable::Absent)?;
    let keys = CONTAINER.replace("cpu_percent = 400", &format!("cpu_percent = {REPLICA_CPU_PERCENT}"));
    through(site, engine, "\"pool\"", &format!("[function.pool]\n{keys}instances = {N}\n"))
}

/// Starts a node whose flows pass these functions.
fn through<'s>(site: &'s Site, engine: &Engine, names: &str, functions: &str) -> Start<'s> {
    let chain = format!("chain = [{names}]\non_function_down = \"deny\"\n");
    let rule = rule(&format!("carrier = \"direct\"\nkernel = \"never\"\n{chain}"));
    let config = format!(
        "[containers]\nengine = \"{}\"\n{}{rule}{functions}",
        engine.socket().display(),
        listener(RELAY_PORT, site, site.origin())
    );
    let service = start(site, &site.proxy, "chain", &config, RELAY_PORT)?;
    // It listens before its containers are well.
    let until = Instant::now() + READY_WITHIN;
    while !service.log().contains("ready") {
        if Instant::now() > until {
            return Err(Unavailable::Failed(anyhow!("its containers are not ready: {}", service.log())));
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    Ok(relay(site, service))
}

/// Two relays of ours, one behind the other.
fn further_relay(site: &Site) -> Start<'_> {
    let plain = rule("carrier = \"direct\"\nkernel = \"never\"");
    let second = format!("{}{plain}", listener(SECOND_PORT, site, site.origin()));
    let second = start(site, &site.proxy, "second", &second, SECOND_PORT)?;
    let first = format!("{}{plain}", listener(RELAY_PORT, site, site.proxy_address(SECOND_PORT)));
    let mut running = relay(site, start(site, &site.proxy, "first", &first, RELAY_PORT)?);
    running.services.push(second);
    Ok(running)
}
