//! Orders to the keeper: plain values of limited size. An order has no configuration, no file name, no port of a listener and
//! no mark: ports come from the listeners' descriptors, and the keeper chooses the marks. An attacker who has taken over the
//! main process can send any order. So every list has a limit, and values that are not canonical are rejected.

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use sidetrack_core::net::{IpNet, IpSet, PortSet};
use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;

/// Most listener addresses.
pub const LISTENERS_MAX: usize = 4096;

/// Most redirects, and as many transparent listeners and kernel paths.
pub const PARTS_MAX: usize = 4096;

/// Most selectors of one part.
pub(super) const SELECTORS_MAX: usize = 4096;

/// Most networks and port ranges in one list, and in a whole order.
pub const RANGES_MAX: usize = 1 << 18;

/// Most users, cgroups or interfaces of one selector.
pub const NAMES_MAX: usize = 1024;

/// Bytes of an interface name (IFNAMSIZ without its NUL).
const INTERFACE_MAX: usize = 15;

/// What the kernel must do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// Whether the rules stay after a crash and block traffic.
    pub closed: bool,
    /// The number of the first kernel path.
    pub first_path: u16,
    /// Destinations that are never steered.
    pub spare: Nets,
    /// The seconds without a datagram after which a flow of UDP is over that the kernel forwards without us.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datagram_idle_s: Option<u32>,
    /// Whether replies for sockets that are bound to a client's address are delivered to these sockets.
    pub divert_answers: bool,
    /// Both ends of the operator's SSH session: connections to them are never steered.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "at_most::<_, _, 2>")]
    pub session: Vec<SocketAddr>,
    /// Connections that are redirected.
    #[serde(deserialize_with = "at_most::<_, _, PARTS_MAX>")]
    pub redirects: Vec<Redirected>,
    /// Connections that transparent listeners get.
    #[serde(deserialize_with = "at_most::<_, _, PARTS_MAX>")]
    pub tproxies: Vec<Transparent>,
    /// Connections that the kernel forwards without us.
    #[serde(deserialize_with = "at_most::<_, _, PARTS_MAX>")]
    pub paths: Vec<Alone>,
}

impl Order {
    /// The number of networks and port ranges in it.
    pub fn ranges(&self) -> usize {
        let redirects = self.redirects.iter().flat_map(|one| [&one.local, &one.forwarded]);
        let tproxies = self.tproxies.iter().flat_map(|one| [&one.selected, &one.local]);
        let paths = self.paths.iter().flat_map(|path| match path {
            Alone::Direct { local, forwarded, .. } => vec![local, forwarded],
            Alone::Dnat { .. } => vec![],
        });
        let selected = redirects.chain(tproxies).chain(paths).flatten();
        let count = |one: &Selected| {
            one.sources.0.nets().len() + one.destinations.0.nets().len() + one.ports.0.ranges().count()
        };
        selected.map(count).sum::<usize>() + self.spare.0.nets().len()
    }
}

/// Connections that are redirected to a listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Redirected {
    /// The index of the listener among the proved ones.
    pub listener: usize,
    /// Connections of this host's own processes.
    #[serde(deserialize_with = "at_most::<_, _, SELECTORS_MAX>")]
    pub local: Vec<Selected>,
    /// Connections of other hosts.
    #[serde(deserialize_with = "at_most::<_, _, SELECTORS_MAX>")]
    pub forwarded: Vec<Selected>,
    /// The number of the queue in which their opening segments wait first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<u16>,
}

/// Connections, or datagrams, that a transparent listener gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transparent {
    /// The index of the listener among the proved ones. Its protocol says what it gets.
    pub listener: usize,
    /// Which connections of other hosts it gets.
    #[serde(deserialize_with = "at_most::<_, _, SELECTORS_MAX>")]
    pub selected: Vec<Selected>,
    /// Which datagrams of this host's own processes it gets; of UDP only.
    #[serde(
        default,
        deserialize_with = "at_most::<_, _, SELECTORS_MAX>",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub local: Vec<Selected>,
    /// Whether it gets only datagrams of connections that it had before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_known: bool,
    /// The number of the queue in which their opening segments wait first; of TCP only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<u16>,
}

/// Connections that the kernel forwards without us.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Alone {
    /// They go to their original destination.
    Direct {
        /// Datagrams of UDP are meant instead of connections.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        datagrams: bool,
        /// Connections of this host's own processes.
        #[serde(deserialize_with = "at_most::<_, _, SELECTORS_MAX>")]
        local: Vec<Selected>,
        /// Connections of other hosts.
        #[serde(deserialize_with = "at_most::<_, _, SELECTORS_MAX>")]
        forwarded: Vec<Selected>,
        /// Whether the server sees an address of this host as the client.
        masquerade: bool,
    },
    /// Connections to a listener go to this server.
    Dnat {
        /// The index of the listener among the proved ones.
        listener: usize,
        /// The server.
        server: SocketAddr,
        /// Whether the server sees an address of this host as the client.
        masquerade: bool,
    },
}

/// Selects connections; an empty list matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Selected {
    /// Client networks.
    pub sources: Nets,
    /// Destination networks.
    pub destinations: Nets,
    /// Destination ports.
    pub ports: Ports,
    /// Users.
    #[serde(deserialize_with = "at_most::<_, _, NAMES_MAX>")]
    pub users: Vec<u32>,
    /// Cgroups: identifier and level.
    #[serde(deserialize_with = "at_most::<_, _, NAMES_MAX>")]
    pub cgroups: Vec<(u64, u8)>,
    /// Interfaces.
    #[serde(deserialize_with = "at_most::<_, _, NAMES_MAX>")]
    pub interfaces: Vec<Interface>,
    /// Whether connections to this host match, too.
    pub to_this_host: bool,
}

/// Networks, written `"192.0.2.0/24"`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nets(pub IpSet);

/// Port ranges, both ends included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports(pub PortSet);

/// The name of a network interface, 1 to 15 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Interface(pub String);

impl Serialize for Nets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.nets().iter().map(ToString::to_string))
    }
}

impl<'de> Deserialize<'de> for Nets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let nets = at_most::<D, Net, RANGES_MAX>(deserializer)?;
        Ok(Self(nets.into_iter().map(|net| net.0).collect()))
    }
}

impl Serialize for Ports {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.ranges())
    }
}

impl<'de> Deserialize<'de> for Ports {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let ranges = at_most::<D, (u16, u16), RANGES_MAX>(deserializer)?;
        if ranges.iter().any(|(first, last)| first > last) {
            return Err(de::Error::custom("a port range ends before it begins"));
        }
        Ok(Self(ranges.into_iter().collect()))
    }
}

impl<'de> Deserialize<'de> for Interface {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        if name.is_empty() || name.len() > INTERFACE_MAX {
            return Err(de::Error::custom("not an interface name"));
        }
        Ok(Self(name))
    }
}

/// One network, parsed without a copy of its text.
struct Net(IpNet);

impl<'de> Deserialize<'de> for Net {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Net;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a network")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Net, E> {
                // The parser's error quotes its input; this one must not.
                text.parse().map(Net).map_err(|_| E::custom("not a network"))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// Reads a list of at most `MOST` values. Memory grows with the values; an announced length is not trusted.
fn at_most<'de, D: Deserializer<'de>, T: Deserialize<'de>, const MOST: usize>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    struct List<T, const MOST: usize>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for List<T, MOST> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MOST}")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut values = Vec::new();
            while let Some(value) = list.next_element()? {
                if values.len() == MOST {
                    return Err(de::Error::custom(format_args!("more than {MOST} in a list")));
                }
                values.push(value);
            }
            Ok(values)
        }
    }
    deserializer.deserialize_seq(List::<T, MOST>(PhantomData))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The exact form of an order. If it changes, two versions of the program do not understand each other.
    const GOLDEN: &str = r#"{"closed":true,"first_path":7,"spare":["192.0.2.0/24","2001:db8::/32"],"divert_answers":true,"redirects":[{"listener":0,"local":[{"sources":[],"destinations":["10.0.0.0/8"],"ports":[[80,80],[8000,8100]],"users":[1000],"cgroups":[[42,2]],"interfaces":[],"to_this_host":true}],"forwarded":[]}],"tproxies":[{"listener":1,"selected":[{"sources":[],"destinations":[],"ports":[],"users":[],"cgroups":[],"interfaces":["eth0"],"to_this_host":false}]}],"paths":[{"Direct":{"local":[],"forwarded":[],"masquerade":true}},{"Dnat":{"listener":2,"server":"[2001:db8::9]:443","masquerade":false}}]}"#;

    fn order() -> Order {
        let nets = |texts: &[&str]| Nets(texts.iter().flat_map(|text| text.parse::<IpNet>()).collect());
        Order {
            closed: true,
            first_path: 7,
            session: vec![],
            spare: nets(&["192.0.2.0/24", "2001:db8::/32"]),
            datagram_idle_s: None,
            divert_answers: true,
            redirects: vec![Redirected {
                listener: 0,
                local: vec![Selected {
                    destinations: nets(&["10.0.0.0/8"]),
                    ports: Ports([(80, 80), (8000, 8100)].into_iter().collect()),
                    users: vec![1000],
                    cgroups: vec![(42, 2)],
                    to_this_host: true,
                    ..Selected::default()
                }],
                forwarded: vec![],
                hold: None,
            }],
            tproxies: vec![Transparent {
                listener: 1,
                selected: vec![Selected {
                    interfaces: vec![Interface("eth0".into())],
                    ..Selected::default()
                }],
                local: vec![],
                only_known: false,
                hold: None,
            }],
            paths: vec![
                Alone::Direct { datagrams: false, local: vec![], forwarded: vec![], masquerade: true },
                Alone::Dnat { listener: 2, server: "[2001:db8::9]:443".parse().unwrap(), masquerade: false },
            ],
        }
    }

    fn read(text: &str) -> Result<Order, serde_json::Error> {
        serde_json::from_str(text)
    }

    #[test]
    fn the_golden_form_is_written_and_read() {
        assert_eq!(serde_json::to_string(&order()).unwrap(), GOLDEN);
        assert_eq!(read(GOLDEN).unwrap(), order());
    }

    #[test]
    fn every_part_of_it_alone_is_refused() {
        for end in 0..GOLDEN.len() {
            assert!(read(&GOLDEN[..end]).is_err(), "{end}");
        }
        for start in 1..GOLDEN.len() {
            assert!(read(&GOLDEN[start..]).is_err(), "{start}");
        }
        assert!(read(&format!("{GOLDEN}{GOLDEN}")).is_err(), "two");
    }

    #[test]
    fn values_that_are_none_are_refused_and_not_quoted() {
        let wrong = [
            ("192.0.2.0/24", "192.0.2.1/24"),
            ("192.0.2.0/24", "root:$6$secret:19000"),
            ("[80,80]", "[81,80]"),
            ("[80,80]", "[80,65536]"),
            ("[1000]", "[-1]"),
            ("[42,2]", "[42,256]"),
            ("\"eth0\"", "\"sixteen-bytes-xx\""),
            ("\"eth0\"", "\"\""),
            ("\"listener\":0", "\"listener\":-1"),
            ("[2001:db8::9]:443", "secret.example:443"),
            ("\"first_path\":7", "\"first_path\":65536"),
            ("\"closed\":true", "\"closed\":true,\"text\":\"secret\""),
            ("\"closed\":true,", ""),
        ];
        for (from, to) in wrong {
            let text = GOLDEN.replacen(from, to, 1);
            assert_ne!(text, GOLDEN);
            assert!(read(&text).is_err(), "{text}");
        }
        let error = read(&GOLDEN.replace("192.0.2.0/24", "root:$6$secret")).unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn lists_have_their_bounds() {
        let users = |count: usize| {
            let users: Vec<_> = (0..count).map(|user| user.to_string()).collect();
            GOLDEN.replace("\"users\":[1000]", &format!("\"users\":[{}]", users.join(",")))
        };
        assert!(read(&users(NAMES_MAX)).is_ok());
        assert!(read(&users(NAMES_MAX + 1)).is_err());
        let part = r#"{"Direct":{"local":[],"forwarded":[],"masquerade":true}}"#;
        let paths = |count: usize| GOLDEN.replace(part, &vec![part; count].join(","));
        assert!(read(&paths(PARTS_MAX - 1)).is_ok());
        assert!(read(&paths(PARTS_MAX + 1)).is_err());
    }
}
