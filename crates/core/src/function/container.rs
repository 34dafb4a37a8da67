//! The configuration of a function that is a container: an image that implements a proxy protocol.

use crate::carrier::Socks6Dialect;
use crate::socks::v6::{ChainError, Metadata, SocksxChain};
use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::str::FromStr;
use std::sync::Arc;

/// A function in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerSpec {
    /// The image, as the container engine names it. It must already be present.
    pub image: Arc<str>,
    /// Replaces the command of the image. Empty: the image's own command.
    pub command: Vec<String>,
    /// Environment variables, in addition to those of the image.
    pub environment: BTreeMap<String, String>,
    /// The protocol that it implements.
    pub speaks: Spoken,
    /// The TCP port that it listens on, in its own network.
    pub port: u16,
    /// How flows come back from it.
    pub way_back: WayBack,
    /// The fewest containers that run at a time.
    pub instances: u16,
    /// The most containers that run at a time.
    pub replicas_max: u16,
    /// The number of flows for which one container is meant.
    pub flows_per_replica: u32,
    /// How long fewer containers have to be enough before one ends, ms.
    pub shrink_after_ms: u64,
    /// The user that its processes run as.
    pub user: ContainerUser,
    /// Its resource limits.
    pub resources: Resources,
    /// How to check that it works.
    pub probe: Probe,
    /// The interval of probes, ms.
    pub probe_interval_ms: u64,
    /// Time limit for a probe, including the return of its bytes, ms.
    pub probe_timeout_ms: u64,
    /// Time limit from the start of the container to its first successful probe, ms.
    pub start_timeout_ms: u64,
}

/// The user that a container's processes run as, in numbers, because names would belong to the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerUser {
    /// The user id.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
}

impl ContainerUser {
    /// The superuser. A configuration must request it with the word `root`.
    pub const ROOT: Self = Self { uid: 0, gid: 0 };
}

impl Default for ContainerUser {
    /// The default: ids that own no files on Linux.
    fn default() -> Self {
        Self { uid: 65_534, gid: 65_534 }
    }
}

impl fmt::Display for ContainerUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.uid, self.gid)
    }
}

/// Why a text is not a valid user of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContainerUserError {
    /// The text is not two numbers.
    #[error("a container's user is \"UID:GID\" in numbers, or \"root\"")]
    Form,
    /// The text has user id 0 instead of the word `root`.
    #[error("the user id 0 is root, which a container should not need")]
    Root,
}

impl FromStr for ContainerUser {
    type Err = ContainerUserError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "root" {
            return Ok(Self::ROOT);
        }
        let (uid, gid) = text.split_once(':').ok_or(ContainerUserError::Form)?;
        let number = |text: &str| {
            let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            // The kernel uses the highest number for "no id".
            let number = text.parse().ok().filter(|id| is_plain && *id != u32::MAX);
            number.ok_or(ContainerUserError::Form)
        };
        match (number(uid)?, number(gid)?) {
            (0, _) => Err(ContainerUserError::Root),
            (uid, gid) => Ok(Self { uid, gid }),
        }
    }
}

/// The resource limits of a container. In any case its root file system is read-only, and it has no capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Memory, bytes. Default: 128 MiB.
    pub memory_bytes: u64,
    /// CPU time, percent of one core. Default: 100.
    pub cpu_percent: u32,
    /// Number of processes and threads. Default: 64.
    pub pids: u32,
}

impl Default for Resources {
    fn default() -> Self {
        Self { memory_bytes: 128 << 20, cpu_percent: 100, pids: 64 }
    }
}

/// The protocol that tells a container about a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spoken {
    /// RFC 1928.
    Socks5,
    /// The SOCKS6 draft or one of the layouts of `socksx`.
    Socks6(Socks6Dialect),
    /// A PROXY protocol header of version 2 before the flow's bytes.
    ProxyV2,
}

impl fmt::Display for Spoken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Socks5 => "socks5",
            Self::Socks6(Socks6Dialect::Draft) => "socks6",
            Self::Socks6(Socks6Dialect::Socksx) => "socks6+socksx",
            Self::Socks6(Socks6Dialect::Socksx010) => "socks6+socksx010",
            Self::ProxyV2 => "proxy-v2",
        })
    }
}

/// How a flow comes back from a container. This program holds the only sockets in the container's network, so a flow
/// cannot leave it in another way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WayBack {
    /// The container gets an address of this program as the destination, a different one for each flow. Every proxy
    /// supports this.
    Destination,
    /// The container gets the real destination, and this program as the next link of the chain. This uses the
    /// metadata of `socksx`, which functions of the EPI framework follow.
    Link,
}

/// How to check that a container works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Bytes sent through the container must come out unchanged, in both directions, and both ends of the flow, too.
    Echo,
    /// A flow through the container can be established. For functions that change bytes.
    Connect,
}

/// The address that a flow comes back to: in 127.0.0.0/8 of the container's own network, where all these addresses
/// are local.
///
/// The lower 24 bits identify the flow. 0 and 1 are not used: 127.0.0.1 belongs to the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u32);

impl Ticket {
    const MASK: u32 = 0x00ff_ffff;
    /// The number of reserved numbers.
    const RESERVED: u32 = 2;

    /// Makes a ticket from random bits.
    pub const fn from_random(random: u32) -> Self {
        let number = random & Self::MASK;
        Self(if number < Self::RESERVED { number + Self::RESERVED } else { number })
    }

    /// Returns the ticket that this local address represents, if any.
    pub fn from_address(address: Ipv4Addr) -> Option<Self> {
        let number = address.to_bits() & Self::MASK;
        (address.is_loopback() && number >= Self::RESERVED).then_some(Self(number))
    }

    /// Returns the address that a flow with this ticket comes back to.
    pub const fn address(self, port: u16) -> SocketAddrV4 {
        SocketAddrV4::new(Ipv4Addr::from_bits(0x7f00_0000 | self.0), port)
    }
}

/// Returns the metadata that leads a flow through one container and back. It is the metadata of the flow without the
/// keys of a chain. With [`WayBack::Link`], it also has a chain of the container and this program.
///
/// # Errors
/// Fails if the chain is too long, which cannot happen with two links.
pub fn metadata_to(
    came: &[Metadata],
    spec: &ContainerSpec,
    back: SocketAddrV4,
) -> Result<Vec<Metadata>, ChainError> {
    let mut all: Vec<_> =
        came.iter().filter(|entry| !SocksxChain::is_chain_key(entry.key)).cloned().collect();
    if spec.way_back == WayBack::Link {
        let own = SocketAddrV4::new(Ipv4Addr::LOCALHOST, spec.port);
        let hops = [std::net::SocketAddr::from(own).into(), std::net::SocketAddr::from(back).into()];
        if let Some((_, chain)) = SocksxChain::rooted(&hops)?.next()? {
            all.extend(chain.to_metadata());
        }
    }
    Ok(all)
}

/// Returns the metadata to send behind a container. It is the metadata of the flow, with the container's own entries
/// replacing or extending it. The keys of a chain stay those of the flow.
pub fn metadata_from(came: &[Metadata], said: &[Metadata]) -> Vec<Metadata> {
    let news: Vec<_> = said.iter().filter(|entry| !SocksxChain::is_chain_key(entry.key)).collect();
    let kept = came.iter().filter(|entry| !news.iter().any(|new| new.key == entry.key));
    kept.chain(news.iter().copied()).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(way_back: WayBack) -> ContainerSpec {
        ContainerSpec {
            image: "localhost/f:1".into(),
            command: Vec::new(),
            environment: BTreeMap::new(),
            speaks: Spoken::Socks6(Socks6Dialect::Socksx),
            port: 1080,
            way_back,
            instances: 1,
            replicas_max: 1,
            flows_per_replica: 100,
            shrink_after_ms: 30_000,
            user: ContainerUser::default(),
            resources: Resources::default(),
            probe: Probe::Echo,
            probe_interval_ms: 1000,
            probe_timeout_ms: 1000,
            start_timeout_ms: 1000,
        }
    }

    fn entry(key: u16, value: &str) -> Metadata {
        Metadata { key, value: value.to_owned() }
    }

    #[test]
    fn a_container_is_root_only_by_that_word() {
        assert_eq!("65534:65534".parse(), Ok(ContainerUser::default()));
        assert_eq!("1000:0".parse(), Ok(ContainerUser { uid: 1000, gid: 0 }));
        assert_eq!("root".parse(), Ok(ContainerUser::ROOT));
        for zero in ["0:0", "0:1000", "00:0"] {
            assert_eq!(zero.parse::<ContainerUser>(), Err(ContainerUserError::Root), "{zero}");
        }
        for bad in [
            "",
            "1000",
            ":",
            "1000:",
            ":1000",
            "+1:1",
            "-1:1",
            "a:b",
            "1:1:1",
            " 1:1",
            "4294967295:1",
            "4294967296:1",
        ] {
            assert_eq!(bad.parse::<ContainerUser>(), Err(ContainerUserError::Form), "{bad}");
        }
        let user = ContainerUser { uid: 7, gid: 8 };
        assert_eq!(user.to_string().parse(), Ok(user));
    }

    #[test]
    fn tickets_are_addresses_of_the_loopback_and_nothing_else_is() {
        for random in [0, 1, 2, 0x00ff_ffff, 0xffff_ffff, 0x0100_0000, 12_345_678] {
            let ticket = Ticket::from_random(random);
            let address = ticket.address(99);
            assert!(address.ip().is_loopback() && *address.ip() != Ipv4Addr::LOCALHOST, "{address}");
            assert_eq!((Ticket::from_address(*address.ip()), address.port()), (Some(ticket), 99));
        }
        for other in [[127, 0, 0, 1], [127, 0, 0, 0], [10, 0, 0, 7]] {
            assert_eq!(Ticket::from_address(other.into()), None);
        }
    }

    #[test]
    fn a_container_of_the_epi_framework_is_told_that_we_are_its_next_link() {
        let back = Ticket::from_random(0x0001_0203).address(7000);
        let came = [entry(7, "patient"), entry(998, "4"), entry(1004, "socks6://elsewhere:1080")];
        let told = metadata_to(&came, &spec(WayBack::Link), back).unwrap();
        let expected = [
            entry(7, "patient"),
            entry(1000, "socks6://root:1080"),
            entry(1001, "socks6://127.0.0.1:1080"),
            entry(1002, "socks6://127.1.2.3:7000"),
            entry(998, "1"),
            entry(999, "3"),
        ];
        assert_eq!(told, expected);
        assert_eq!(metadata_to(&came, &spec(WayBack::Destination), back).unwrap(), [entry(7, "patient")]);
    }

    #[test]
    fn what_a_container_says_goes_on_but_not_our_own_links() {
        let came = [entry(7, "a"), entry(998, "1"), entry(8, "b")];
        let said = [entry(7, "c"), entry(9, "d"), entry(998, "2"), entry(1001, "socks6://127.0.0.1:1080")];
        let on = metadata_from(&came, &said);
        assert_eq!(on, [entry(998, "1"), entry(8, "b"), entry(7, "c"), entry(9, "d")]);
    }
}
