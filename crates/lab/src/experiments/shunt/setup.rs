//! The set-ups that are compared.

/// What stands between the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Setup {
    /// Nothing: one wire.
    Direct,
    /// The stateful bridge alone.
    Slow,
    /// The bridge with the shunt by tc.
    Tc,
    /// The bridge with the shunt by XDP.
    Xdp,
    /// A stateful router alone.
    Routed,
    /// The router with the shunt by tc.
    RoutedTc,
    /// Open vSwitch alone, with one entry each way.
    Switch,
    /// The bridge behind Open vSwitch with the shunt by OpenFlow.
    OpenFlow,
}

impl Setup {
    /// All set-ups, in the order of tables.
    pub(super) const ALL: [Self; 8] = [
        Self::Direct,
        Self::Slow,
        Self::Tc,
        Self::Xdp,
        Self::Routed,
        Self::RoutedTc,
        Self::Switch,
        Self::OpenFlow,
    ];
    /// One of each kind of fast path.
    pub(super) const SHUNTED: [Self; 3] = [Self::Tc, Self::Xdp, Self::OpenFlow];
    /// Those of NFShunt's Tables III, V and VI.
    pub(super) const SEED: [Self; 3] = [Self::Direct, Self::Tc, Self::Slow];

    /// Returns its name in tables.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Slow => "bridge, slow path only",
            Self::Tc => "bridge, shunt by tc",
            Self::Xdp => "bridge, shunt by XDP",
            Self::Routed => "router, slow path only",
            Self::RoutedTc => "router, shunt by tc",
            Self::Switch => "Open vSwitch alone",
            Self::OpenFlow => "bridge, shunt by OpenFlow",
        }
    }

    /// Returns the shunt's fast path as in the configuration, if there is a shunt.
    pub(super) const fn fast_path(self) -> Option<&'static str> {
        match self {
            Self::Tc | Self::RoutedTc => Some("tc"),
            Self::Xdp => Some("xdp"),
            Self::OpenFlow => Some("openflow"),
            Self::Direct | Self::Slow | Self::Routed | Self::Switch => None,
        }
    }

    /// Returns true if the host in the middle routes; otherwise it is a bridge.
    pub(super) const fn is_routed(self) -> bool {
        matches!(self, Self::Routed | Self::RoutedTc)
    }

    /// Returns true if all wires end in a switch.
    pub(super) const fn has_switch(self) -> bool {
        matches!(self, Self::Switch | Self::OpenFlow)
    }

    /// Returns true if frames must be as on a wire: XDP and packet sockets do not complete unfinished checksums.
    pub(super) const fn plain_frames(self) -> bool {
        matches!(self, Self::Xdp | Self::Switch | Self::OpenFlow)
    }

    /// Returns the `[shunt]` of a configuration.
    pub(super) fn configuration(self, path: &str, idle_timeout_ms: u64) -> String {
        let switch = match path {
            "openflow" => "[shunt.openflow]\nlisten = [\"192.168.77.1:6653\"]\nswitch = \"192.168.77.2\"\n",
            _ => "",
        };
        let ports: String = [(1, "to-client", 49, 10), (2, "to-server", 50, 11)]
            .map(|(number, interface, fast, slow)| {
                let places = match switch {
                    "" => String::new(),
                    _ => format!("fast_port = {fast}\nslow_port = {slow}\n"),
                };
                format!("[[shunt.port]]\nnumber = {number}\ninterface = \"{interface}\"\n{places}")
            })
            .concat();
        let forwarding = if self.is_routed() { "routed" } else { "bridged" };
        format!(
            "[shunt]\nfast_path = \"{path}\"\nforwarding = \"{forwarding}\"\nidle_timeout_ms = {idle_timeout_ms}\n{switch}{ports}"
        )
    }
}
