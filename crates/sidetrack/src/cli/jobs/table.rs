//! The jobs, in the order in which `sidetrack help` lists them.

use super::answers::{Kind, Question};
use super::{Job, Makes};

const fn question(key: &'static str, asks: &'static str, default: &'static str, kind: Kind) -> Question {
    Question { key, asks, default, kind }
}

const CHECK: (&str, &str) = ("sidetrack check", "says what is wrong with the file");
const PLAN: (&str, &str) = ("sudo sidetrack plan", "lists every change that 'up' makes to this host");
const UP: (&str, &str) = ("sudo sidetrack up", "runs it until Ctrl-C, and leaves nothing behind");
const FLOWS: (&str, &str) = ("sudo sidetrack flows", "shows the connections");

/// All jobs.
pub(super) const JOBS: [Job; 8] = [
    Job {
        name: "command",
        about: "steer one command through a proxy or by rules, without root",
        questions: &[
            question(
                "proxy",
                "The proxy (socks5://, socks6:// or http://HOST:PORT)",
                "socks5://gateway.example:1080",
                Kind::Text,
            ),
            question(
                "direct",
                "Networks that are reached without it",
                "10.0.0.0/8,172.16.0.0/12,192.168.0.0/16",
                Kind::Texts,
            ),
            question("records", "The file for one line per connection", "./flows.jsonl", Kind::Text),
        ],
        files: &[("sidetrack.toml", include_str!("templates/command.toml"))],
        makes: Makes::Nothing,
        steps: &[
            CHECK,
            ("sidetrack run --config sidetrack.toml -- CMD", "runs CMD by these rules"),
            ("sidetrack run --via socks5://HOST:1080 -- CMD", "does without a file"),
        ],
        example: "run-one-command",
        pages: &["run.md"],
    },
    Job {
        name: "gateway",
        about: "steer the connections of the hosts behind a router",
        questions: &[
            question("clients", "The networks of the clients", "10.0.0.0/8,192.168.0.0/16", Kind::Texts),
            question("ports", "The ports to capture", "80,443", Kind::Numbers),
            question(
                "carrier",
                "How to carry them: direct, or a proxy (socks5://HOST:PORT)",
                "direct",
                Kind::Text,
            ),
        ],
        files: &[("sidetrack.toml", include_str!("templates/gateway.toml"))],
        makes: Makes::Nothing,
        steps: &[CHECK, PLAN, UP, FLOWS],
        example: "router-tproxy",
        pages: &["configuration.md"],
    },
    Job {
        name: "cache",
        about: "an HTTP proxy with a cache and rules",
        questions: &[
            question("address", "The address to listen on", "127.0.0.1:3128", Kind::Text),
            question("memory_bytes", "Bytes of memory for the cache", "268435456", Kind::Number),
            question("blocked", "Hosts to deny", "*.tracking.example", Kind::Texts),
        ],
        files: &[("sidetrack.toml", include_str!("templates/cache.toml"))],
        makes: Makes::Nothing,
        steps: &[
            CHECK,
            ("sidetrack up", "runs it"),
            ("curl --proxy http://127.0.0.1:3128 URL", "tries it"),
            ("sidetrack cache stat", "shows hits and misses"),
        ],
        example: "http-cache",
        pages: &["http.md"],
    },
    Job {
        name: "tls",
        about: "open TLS connections to chosen names, with the consent of the users",
        questions: &[
            question("names", "The domains to open, with all names below", "corp.example", Kind::Texts),
            question("address", "The address to listen on", "127.0.0.1:3128", Kind::Text),
            question("har", "The file for requests (HTTP Archive)", "./requests.har", Kind::Text),
        ],
        files: &[("sidetrack.toml", include_str!("templates/tls.toml"))],
        makes: Makes::Authority,
        steps: &[
            CHECK,
            ("sidetrack ca root --dir ca >root.pem", "gives the certificate that clients must trust"),
            ("sidetrack up", "runs it"),
            ("sidetrack run --tap -- CMD", "does the same for one command"),
        ],
        example: "tls-intercept",
        pages: &["http.md", "run.md"],
    },
    Job {
        name: "overlay",
        about: "connections that survive a failed link or relay, between sites",
        questions: &[
            question("name", "The name of this node", "site-a", Kind::Text),
            question("listen", "The address to listen on", "0.0.0.0:8100", Kind::Text),
            question(
                "address",
                "The address by which the others reach this node",
                "192.0.2.1:8100",
                Kind::Text,
            ),
        ],
        files: &[("sidetrack.toml", include_str!("templates/overlay.toml"))],
        makes: Makes::OverlayKey,
        steps: &[
            CHECK,
            UP,
            ("sudo sidetrack overlay invite NAME", "lets another node join by one line of text"),
            ("sudo sidetrack overlay status", "shows neighbours and links"),
            ("sudo sidetrack overlay path NODE", "shows the path to a node"),
        ],
        example: "overlay",
        pages: &["overlay-protocol.md", "invitations.md"],
    },
    Job {
        name: "shunt",
        about: "move trusted bulk flows past a firewall",
        questions: &[
            question("inside", "The interface towards the inside", "eth0", Kind::Text),
            question("outside", "The interface towards the outside", "eth1", Kind::Text),
            question("after_bytes", "Bytes after which a flow is shunted", "10000000", Kind::Number),
        ],
        files: &[("sidetrack.toml", include_str!("templates/shunt.toml"))],
        makes: Makes::Nothing,
        steps: &[
            CHECK,
            ("sidetrack shunt rules | sudo nft -f -", "adds the rules that the packet filter needs"),
            UP,
            ("sudo sidetrack shunt ls", "shows the flows on the fast path"),
        ],
        example: "shunt",
        pages: &["shunt.md"],
    },
    Job {
        name: "engine",
        about: "a TCP proxy that works on packets, in front of a server",
        questions: &[
            question("address", "The address that clients connect to", "192.0.2.80:443", Kind::Text),
            question("server", "The server", "198.51.100.10:443", Kind::Text),
            question("interfaces", "The interfaces towards clients and server", "eth0", Kind::Texts),
            question("source", "A free address for connections to the server", "198.51.100.80", Kind::Text),
        ],
        files: &[("sidetrack.toml", include_str!("templates/engine.toml"))],
        makes: Makes::Nothing,
        steps: &[CHECK, ("sudo sidetrack doctor", "says what the kernel and the interfaces lack"), UP, FLOWS],
        example: "engine-tls",
        pages: &["engine.md"],
    },
    Job {
        name: "agreement",
        about: "let parties reach each other's data only as they have agreed",
        questions: &[
            question("clients", "The network of our clients", "10.1.0.0/16", Kind::Text),
            question("data", "The network of the other party's data", "10.2.0.0/16", Kind::Text),
            question("purpose", "The purpose of the data flow", "research", Kind::Text),
        ],
        files: &[
            ("sidetrack.toml", include_str!("templates/agreement.toml")),
            ("agreement.toml", include_str!("templates/parties.toml")),
        ],
        makes: Makes::Nothing,
        steps: &[
            CHECK,
            ("sidetrack policy plan agreement.toml", "shows what is allowed, and what is missing"),
            UP,
            ("sudo sidetrack policy apply agreement.toml", "replaces the agreement of the running node"),
        ],
        example: "hospital",
        pages: &["control.md"],
    },
];
