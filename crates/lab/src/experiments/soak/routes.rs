//! The routes of the experiment: the port that a client asks for decides which carrier and functions its flow gets.

use std::fmt::Write as _;

use super::traffic::Entry;

/// A part that is killed or cut now and then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(super) enum Part {
    /// The program on the far host: SOCKS and HTTP proxy, far end of the tunnel, node of the overlay.
    Far,
    /// The link to the far host.
    Link,
    /// The program in the container of a function.
    Container,
}

impl Part {
    /// Returns its name in tables.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Far => "far program",
            Self::Link => "link to it",
            Self::Container => "container",
        }
    }
}

/// One way to the server.
#[derive(Debug)]
pub(super) struct Route {
    /// The only way in that leads here. `None`: each listener of the gateway.
    pub only: Option<Entry>,
    /// In tables.
    pub name: &'static str,
    /// The server's port that is led this way.
    pub port: u16,
    /// The parts that it needs.
    pub needs: &'static [Part],
    /// The keys of its rules.
    keys: &'static str,
}

impl Route {
    /// Whether this way in leads here.
    pub(super) fn is_of(&self, entry: Entry) -> bool {
        self.only.map_or(entry.is_of_gateway(), |only| only == entry)
    }
}

/// The server's port for datagrams.
pub(super) const DATAGRAMS: u16 = 9100;
/// Added to the server's port, it is the gateway's port that leads there.
pub(super) const OF_GATEWAY: u16 = 1000;

const FAR: &[Part] = &[Part::Far, Part::Link];

const fn route(name: &'static str, port: u16, needs: &'static [Part], keys: &'static str) -> Route {
    Route { only: None, name, port, needs, keys }
}

const fn beside(entry: Entry, name: &'static str, port: u16, keys: &'static str) -> Route {
    Route { only: Some(entry), name, port, needs: &[], keys }
}

/// Without a container.
const ROUTES: [Route; 12] = [
    route("kernel", 9001, &[], "carrier = \"direct\""),
    route("splice", 9002, &[], "carrier = \"direct\"\nkernel = \"never\""),
    route(
        "wire",
        9003,
        &[],
        "carrier = \"direct\"\nkernel = \"never\"\nshunt = { fast_path = \"wire\", after_bytes = 50000 }",
    ),
    route("socks5", 9004, FAR, "carrier = \"socks5://10.77.3.2:1080\""),
    route("socks6", 9005, FAR, "carrier = \"socks6://10.77.3.2:1080\""),
    route("http", 9006, FAR, "carrier = \"http://10.77.3.2:3128\""),
    route("tunnel", 9007, FAR, "carrier = \"tunnel:far\""),
    route("overlay", 9008, FAR, "carrier = \"overlay:far\""),
    route("count, limit", 9009, &[], "carrier = \"direct\"\nchain = [\"count\", \"limit\"]"),
    route("branch, filter, replace", 9010, &[], "carrier = \"direct\"\nchain = [\"branch\", \"replace\"]"),
    route("encrypt, decrypt", 9011, &[], "carrier = \"direct\"\nchain = [\"encrypt\", \"decrypt\"]"),
    route("wasm", 9012, &[], "carrier = \"direct\"\nchain = \"wasm\""),
];

/// With a container.
const CONTAINED: Route = route(
    "container",
    9013,
    &[Part::Container],
    "carrier = \"direct\"\nchain = \"relay\"\non_function_down = \"deny\"",
);

/// Of the programs beside the gateway.
const BESIDE: [Route; 5] = [
    beside(Entry::Engine, "engine, count", 9021, "carrier = \"direct\"\nchain = \"count\""),
    beside(Entry::Engine, "engine, offloaded", 9022, "carrier = \"direct\""),
    beside(Entry::Shunt, "shunt", 9023, "carrier = \"direct\"\nshunt = { after_bytes = 50000 }"),
    beside(Entry::Run, "run", 9024, "carrier = \"direct\""),
    beside(Entry::Run, "run, count", 9025, "carrier = \"direct\"\nchain = \"count\""),
];

/// Returns the routes.
pub(super) fn all(has_container: bool) -> Vec<&'static Route> {
    static ALL: [Route; 12] = ROUTES;
    static LAST: Route = CONTAINED;
    static OTHERS: [Route; 5] = BESIDE;
    ALL.iter().chain(has_container.then_some(&LAST)).chain(&OTHERS).collect()
}

/// Returns the routes of one program: those of the ways in that it has.
pub(super) fn of(routes: &[&'static Route], is_its: impl Fn(Entry) -> bool) -> Vec<&'static Route> {
    routes
        .iter()
        .copied()
        .filter(|route| Entry::ALL.into_iter().any(|entry| is_its(entry) && route.is_of(entry)))
        .collect()
}

/// Returns the rules, the first one later with each version.
pub(super) fn rules(routes: &[&Route], version: u64) -> String {
    let mut ordered = routes.to_vec();
    let turn = version as usize % ordered.len();
    ordered.rotate_left(turn);
    let mut text = String::new();
    for Route { port, keys, .. } in ordered {
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "[[rule]]\nname = \"route{port}\"\nmatch = {{ protocol = \"tcp\", port = {port} }}\n{keys}\n"
        );
    }
    text
}

/// Returns the gateway's reverse listeners.
pub(super) fn reverse(routes: &[&Route]) -> String {
    let mut text = String::new();
    for Route { port, .. } in routes {
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "[[listen]]\nname = \"port{port}\"\nkind = \"reverse\"\naddress = \"10.77.1.2:{}\"\nto = \"10.77.2.2:{port}\"\n",
            port + OF_GATEWAY
        );
    }
    text
}
