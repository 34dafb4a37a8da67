//! The configurations that are killed: one for each kind of change that `up` makes to a host.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;

/// Where the client's connections come in on the gateway, for [`Setup::Wire`].
pub(super) const DOOR_PORT: u16 = 8080;
/// After this number of bytes a fast path takes a flow.
const FAST_AFTER_BYTES: u32 = 10_000;
/// How long flows may go on after SIGTERM, in milliseconds.
const DRAIN_MS: u32 = 20;

/// What runs when it is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(super) enum Setup {
    /// An nftables table, policy rules and routes; a crash lets traffic pass.
    Open,
    /// The same; a crash blocks traffic.
    Closed,
    /// A port whose flows the kernel takes over: BPF programs and sockets under repair.
    Wire,
    /// The shunt with BPF programs (tc), beside the operator's own rules.
    Shunt,
}

impl Setup {
    /// All of them, in the order of tables.
    pub(super) const ALL: [Self; 4] = [Self::Open, Self::Closed, Self::Wire, Self::Shunt];

    /// Returns its name in tables.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Open => "redirect and tproxy",
            Self::Closed => "redirect and tproxy, closed",
            Self::Wire => "reverse on the wire",
            Self::Shunt => "shunt by tc",
        }
    }

    /// Returns true if traffic is blocked after a crash.
    pub(super) const fn is_closed(self) -> bool {
        matches!(self, Self::Closed)
    }

    /// Returns true if BPF programs stay after a crash, with the flows that the kernel has.
    pub(super) const fn is_pinned(self) -> bool {
        matches!(self, Self::Wire)
    }

    /// Returns the file, with everything of its own in `folder`. A reload changes it from version 0 to version 1.
    pub(super) fn configuration(
        self,
        folder: &Path,
        gateway: SocketAddr,
        server: SocketAddr,
        version: u16,
    ) -> String {
        let default = if self == Self::Shunt { "direct" } else { "deny" };
        let on_crash = if self.is_closed() { "closed" } else { "open" };
        let head = format!(
            "version = 1\nworkers = 1\ndefault = \"{default}\"\non_crash = \"{on_crash}\"\n[admin]\nsocket = \"{}/admin.sock\"\n\
             [record]\nto = \"none\"\n[limits]\ndrain_ms = {DRAIN_MS}\n",
            folder.display()
        );
        head + &match self {
            Self::Open | Self::Closed => steered(server, version),
            Self::Wire => wired(gateway, server, version),
            Self::Shunt => shunted(server, version),
        }
    }
}

fn steered(server: SocketAddr, version: u16) -> String {
    let (ip, port, other) = (server.ip(), server.port(), 100 + version);
    format!(
        "[[listen]]\nname = \"out\"\nkind = \"redirect\"\ndst = \"{ip}\"\nports = {port}\n\
         [[listen]]\nname = \"router\"\nkind = \"tproxy\"\ninterfaces = [\"link1\"]\nports = [{port}, {other}]\n\
         [[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n\
         [[rule]]\nname = \"ours\"\nmatch = {{ listener = [\"out\", \"router\"] }}\ncarrier = \"direct\"\nkernel = \"never\"\n\
         [[rule]]\nname = \"others\"\ncarrier = \"direct\"\n"
    )
}

fn wired(gateway: SocketAddr, server: SocketAddr, version: u16) -> String {
    let mut text = String::new();
    for port in gateway.port()..=gateway.port() + version {
        let address = SocketAddr::new(gateway.ip(), port);
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "[[listen]]\nname = \"port{port}\"\nkind = \"reverse\"\naddress = \"{address}\"\nto = \"{server}\"\n"
        );
    }
    text + &format!(
        "[[rule]]\nname = \"large\"\ncarrier = \"direct\"\nkernel = \"never\"\n\
         shunt = {{ fast_path = \"wire\", after_bytes = {FAST_AFTER_BYTES} }}\n"
    )
}

fn shunted(server: SocketAddr, version: u16) -> String {
    // A reload does not change `[shunt]`, nor what the rules ask of it.
    let listener = "[[listen]]\nname = \"more\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n";
    let more = if version == 0 { "" } else { listener };
    format!(
        "{more}[shunt]\nforwarding = \"routed\"\nidle_timeout_ms = 600000\n\
         [[shunt.port]]\nnumber = 1\ninterface = \"link1\"\n[[shunt.port]]\nnumber = 2\ninterface = \"link2\"\n\
         [[rule]]\nname = \"bulk\"\nmatch = {{ to = \"{}\", port = {} }}\ncarrier = \"direct\"\n\
         shunt = {{ after_bytes = {FAST_AFTER_BYTES} }}\n",
        server.ip(),
        server.port()
    )
}
