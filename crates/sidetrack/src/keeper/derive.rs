//! Converts between steering and orders: the main process writes an order, and the keeper derives its work from it.

use super::order::{
    Alone, Interface, LISTENERS_MAX, Nets, Order, PARTS_MAX, Ports, RANGES_MAX, Redirected, Selected,
    Transparent,
};
use crate::steer::{OWN_MARK, Path, Steer, mark_rules};
use sidetrack_core::flow::Protocol;
use sidetrack_core::net::IpSet;
use sidetrack_sys::nfqueue::HOLD_NUMBERS;
use sidetrack_sys::nft::{
    CgroupMatch, Except, HoldQueue, KernelPath, KernelRoute, Lifetime, Redirect, Selector, Steering, TProxy,
};
use sidetrack_sys::route::MarkRule;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// A listener whose existence was proved by its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proved {
    /// Its address.
    pub address: SocketAddr,
    /// Its transport protocol.
    pub protocol: Protocol,
    /// Whether it accepts connections for addresses of other hosts (IP_TRANSPARENT).
    pub transparent: bool,
}

impl Proved {
    /// Returns its address, if it has this protocol.
    fn of(&self, protocol: Protocol) -> Result<SocketAddr, String> {
        let is_it = self.protocol == protocol;
        is_it.then_some(self.address).ok_or_else(|| format!("{} is of another protocol", self.address))
    }
}

impl Proved {
    /// Fails if connections of this host do not reach it.
    fn listens_on_loopback(&self) -> Result<(), String> {
        let ip = self.address.ip();
        let loopback = [Ipv4Addr::LOCALHOST.into(), IpAddr::from(Ipv6Addr::LOCALHOST)];
        if ip.is_unspecified() || loopback.contains(&ip) {
            return Ok(());
        }
        Err(format!(
            "connections of this host are redirected to loopback, where {} does not listen; listen on 127.0.0.1, [::1], \
             0.0.0.0 or [::]",
            self.address
        ))
    }
}

/// What the keeper does for an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// The rules.
    pub steering: Steering,
    /// The policy routing that tproxy needs.
    pub mark_rules: Vec<MarkRule>,
    /// The lifetime of the rules.
    pub lifetime: Lifetime,
}

impl Order {
    /// Makes the order for this steering. `bound` are the listeners, in the order in which they will be proved.
    ///
    /// # Errors
    /// The steering needs a listener that is missing, or exceeds a limit of the keeper.
    pub fn of(steer: &Steer, bound: &[(Protocol, SocketAddr)]) -> Result<Self, String> {
        let steering = &steer.steering;
        if bound.len() > LISTENERS_MAX {
            return Err(format!(
                "{} listener addresses: at most {LISTENERS_MAX} can be steered to",
                bound.len()
            ));
        }
        let parts = [steering.redirects.len(), steering.tproxies.len(), steering.kernel_paths.len()];
        if parts.iter().any(|part| *part > PARTS_MAX) {
            return Err(format!(
                "more than {PARTS_MAX} rules of one kind for the kernel: use fewer listeners or rules"
            ));
        }
        let at = |protocol: Protocol, port: u16, v6: bool| {
            let is_it = |(its, address): &(Protocol, SocketAddr)| {
                *its == protocol && address.port() == port && address.is_ipv6() == v6
            };
            let place = bound.iter().position(is_it);
            place.ok_or_else(|| format!("no listener on port {port}"))
        };
        let redirects = steering.redirects.iter().map(|redirect| {
            Ok(Redirected {
                listener: at(Protocol::Tcp, redirect.port, redirect.v6)?,
                local: written(&redirect.local),
                forwarded: written(&redirect.forwarded),
                hold: redirect.hold.map(|hold| hold.number),
            })
        });
        let tproxies = steering.tproxies.iter().map(|tproxy| {
            let listener = at(tproxy.protocol, tproxy.port, tproxy.v6)?;
            let hold = tproxy.hold.map(|hold| hold.number);
            let (selected, local) = (written(&tproxy.selectors), written(&tproxy.local));
            Ok(Transparent { listener, selected, local, only_known: tproxy.only_known, hold })
        });
        let paths = steering.kernel_paths.iter().map(|path| match &path.route {
            KernelRoute::Direct { local, forwarded, masquerade } => Ok(Alone::Direct {
                datagrams: path.protocol == Protocol::Udp,
                local: written(local),
                forwarded: written(forwarded),
                masquerade: *masquerade,
            }),
            KernelRoute::Dnat { pairs, masquerade } => {
                // A path is identified by its connection mark, so each pair is a path of its own.
                let [(from, server)] = pairs.as_slice() else { return Err("a path without a server".into()) };
                let listener = bound.iter().position(|bound| *bound == (path.protocol, *from));
                let listener = listener.ok_or_else(|| format!("no listener on {from}"))?;
                Ok(Alone::Dnat { listener, server: *server, masquerade: *masquerade })
            }
        });
        let order = Self {
            closed: steer.lifetime == Lifetime::SocketThenOrphan,
            first_path: Path::number_of_first(steer.first_path),
            spare: Nets(steering.except.destinations.clone()),
            datagram_idle_s: steering.datagram_idle_s,
            divert_answers: steering.divert_answers,
            session: steer.session.clone(),
            redirects: redirects.collect::<Result<_, String>>()?,
            tproxies: tproxies.collect::<Result<_, String>>()?,
            paths: paths.collect::<Result<_, String>>()?,
        };
        order.within_bounds()?;
        Ok(order)
    }

    fn within_bounds(&self) -> Result<(), String> {
        let ranges = self.ranges();
        if ranges > RANGES_MAX {
            return Err(format!(
                "{ranges} networks and port ranges for the kernel: at most {RANGES_MAX} can be steered by"
            ));
        }
        Ok(())
    }

    /// Derives the work from the order and the proved listeners.
    ///
    /// # Errors
    /// The order needs a listener that was not proved, or asks for something that no configuration can ask for.
    pub fn work(&self, proved: &[Proved]) -> Result<Work, String> {
        self.within_bounds()?;
        let find = |listener: usize| {
            proved.get(listener).copied().ok_or("it names a listener whose descriptor did not come along")
        };
        let redirects = self.redirects.iter().map(|one| one.redirect(find(one.listener)?, self.closed));
        let tproxies = self.tproxies.iter().map(|one| one.tproxy(find(one.listener)?, self.closed));
        let paths = self.paths.iter().enumerate().map(|(place, path)| {
            let (protocol, route) = match path {
                Alone::Direct { datagrams, local, forwarded, masquerade } => {
                    let (local, forwarded) = (read(local)?, read(forwarded)?);
                    let protocol = if *datagrams { Protocol::Udp } else { Protocol::Tcp };
                    (protocol, KernelRoute::Direct { local, forwarded, masquerade: *masquerade })
                }
                Alone::Dnat { listener, server, masquerade } => {
                    let Proved { address, protocol, .. } = find(*listener)?;
                    KernelPath::check(address, *server).map_err(|error| error.to_string())?;
                    (protocol, KernelRoute::Dnat { pairs: vec![(address, *server)], masquerade: *masquerade })
                }
            };
            Ok(KernelPath { protocol, mark: Path::mark(usize::from(self.first_path) + place), route })
        });
        let listeners =
            |protocol| proved.iter().filter(move |it| it.protocol == protocol).map(|it| it.address);
        // Only this host's own datagrams may be for the listeners of UDP.
        let has_local = self.tproxies.iter().any(|one| !one.local.is_empty());
        let mut steering = Steering {
            except: Except {
                mark: Some(OWN_MARK),
                listeners: listeners(Protocol::Tcp).chain(self.session.iter().copied()).collect(),
                datagram_listeners: listeners(Protocol::Udp).filter(|_| has_local).collect(),
                destinations: self.spare.0.clone(),
                ..Except::default()
            },
            kernel_paths: paths.collect::<Result<_, String>>()?,
            tproxies: tproxies.collect::<Result<_, String>>()?,
            divert_answers: self.divert_answers,
            kernel_mark: Some(Path::ANY),
            redirects: redirects.collect::<Result<_, String>>()?,
            forget_ended: true,
            datagram_idle_s: self.datagram_idle_s,
            ..Steering::default()
        };
        let mark_rules = mark_rules(&mut steering);
        let lifetime = if self.closed { Lifetime::SocketThenOrphan } else { Lifetime::Socket };
        Ok(Work { steering, mark_rules, lifetime })
    }
}

impl Redirected {
    fn redirect(&self, proved: Proved, closed: bool) -> Result<Redirect, String> {
        let ip = proved.of(Protocol::Tcp)?.ip();
        // The kernel redirects local connections to loopback, and forwarded ones to the address of their incoming interface.
        if !self.local.is_empty() {
            proved.listens_on_loopback()?;
        }
        if !self.forwarded.is_empty() && !ip.is_unspecified() {
            return Err(format!(
                "forwarded connections are redirected to the address they came in by, not to {ip}; listen on 0.0.0.0 or [::]"
            ));
        }
        Ok(Redirect {
            port: proved.address.port(),
            v4: ip.is_ipv4(),
            v6: ip.is_ipv6(),
            local: read(&self.local)?,
            forwarded: read(&self.forwarded)?,
            hold: hold(self.hold, closed)?,
        })
    }
}

/// The queue of an order: one of those that hold opening segments.
fn hold(number: Option<u16>, closed: bool) -> Result<Option<HoldQueue>, String> {
    match number {
        Some(number) if !HOLD_NUMBERS.contains(&number) => {
            Err(format!("{number} is not the number of a queue for opening segments"))
        }
        number => Ok(number.map(|number| HoldQueue { number, bypass: !closed })),
    }
}

impl Transparent {
    fn tproxy(&self, proved: Proved, closed: bool) -> Result<TProxy, String> {
        if !proved.transparent {
            return Err(format!("{} does not listen with IP_TRANSPARENT", proved.address));
        }
        if !self.local.is_empty() {
            // They come back on `lo`, where tproxy looks for a socket of this address.
            proved.of(Protocol::Udp)?;
            proved.listens_on_loopback()?;
        }
        Ok(TProxy {
            protocol: proved.protocol,
            port: proved.address.port(),
            v4: proved.address.is_ipv4(),
            v6: proved.address.is_ipv6(),
            selectors: read(&self.selected)?,
            local: read(&self.local)?,
            only_known: self.only_known,
            drop_without_listener: closed,
            hold: hold(self.hold.filter(|_| proved.protocol == Protocol::Tcp), closed)?,
        })
    }
}

fn written(selectors: &[Selector]) -> Vec<Selected> {
    let one = |selector: &Selector| Selected {
        sources: Nets(selector.sources.clone()),
        destinations: Nets(selector.destinations.clone()),
        ports: Ports(selector.ports.clone()),
        users: selector.users.clone(),
        cgroups: selector
            .cgroups
            .iter()
            .map(|cgroup| (cgroup.id, u8::try_from(cgroup.level).unwrap_or(u8::MAX)))
            .collect(),
        interfaces: selector.interfaces.iter().map(|name| Interface(name.to_string())).collect(),
        to_this_host: selector.to_this_host,
    };
    selectors.iter().map(one).collect()
}

fn read(selected: &[Selected]) -> Result<Vec<Selector>, String> {
    let one = |selected: &Selected| {
        let set = |nets: &Nets| -> IpSet { nets.0.clone() };
        Ok(Selector {
            sources: set(&selected.sources),
            destinations: set(&selected.destinations),
            ports: selected.ports.0.clone(),
            users: selected.users.clone(),
            cgroups: selected
                .cgroups
                .iter()
                .map(|(id, level)| CgroupMatch { id: *id, level: (*level).into() })
                .collect(),
            interfaces: selected
                .interfaces
                .iter()
                .map(|name| name.0.parse().map_err(|_| "not an interface name".to_owned()))
                .collect::<Result<_, String>>()?,
            to_this_host: selected.to_this_host,
        })
    };
    selected.iter().map(one).collect()
}
