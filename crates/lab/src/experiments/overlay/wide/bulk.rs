//! Bulk data across the area: floods and copies by scp, over the overlay and by plain TCP end to end.
//!
//! Plain TCP is routed over the way that the overlay prefers at the beginning, the best one, and stays there: routes of the
//! Internet do not follow troubles of a second.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

use super::super::flow::{self, Ends};
use super::super::measure::Plan;
use super::super::scp;
use super::area::Area;
use super::weather::Weather;
use super::world::{PLAIN, PLAIN_CLIENT, Server, World};
use crate::peers::Absent;
use crate::progress::Progress;
use crate::service::Service;

/// Port of the server for plain TCP.
const PORT: u16 = 8103;
/// sshd for plain TCP.
const SSH: u16 = 22;
/// The longest trace: a copy may take so long.
const LONGEST: Duration = Duration::from_secs(120);
/// A copy by cubic is smaller by this factor.
const CUBIC_PART: u64 = 10;

/// The way of bulk data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Plain TCP end to end with this congestion control.
    Plain(&'static str),
    /// Over the overlay, whose hops use bbr.
    Overlay,
}

impl Way {
    const ALL: [Self; 3] = [Self::Plain("cubic"), Self::Plain("bbr"), Self::Overlay];

    fn name(self) -> String {
        match self {
            Self::Plain(congestion) => format!("TCP {congestion}, end to end"),
            Self::Overlay => "ours (bbr on each hop)".to_owned(),
        }
    }
}

/// One way of one program.
#[derive(Debug, Clone, Serialize)]
pub(in super::super) struct Bulk {
    /// `flood` or `scp`.
    pub program: &'static str,
    /// The way, with its congestion control.
    pub way: String,
    /// Mb/s, one for each round.
    pub mbit: Vec<f64>,
}

/// Measures floods and copies.
///
/// # Errors
/// A flow breaks. Copies without ssh are noted as absent.
pub(super) fn run(
    world: &World,
    route: &[usize],
    seed: u64,
    plan: &Plan,
    area: &mut Area,
    progress: &Progress,
) -> Result<()> {
    let ways = if plan.is_full { &Way::ALL[..] } else { &Way::ALL[1..] };
    let rows = |program: &'static str| {
        ways.iter().map(move |way| Bulk { program, way: way.name(), mbit: Vec::new() })
    };
    let mut floods: Vec<_> = rows("flood").collect();
    let path = world.path()?;
    for round in 0..plan.area_rounds {
        let weather = Weather::draw(seed.wrapping_add(round.into()), &world.map, LONGEST);
        for (way, row) in ways.iter().zip(&mut floods) {
            progress.say(&format!("wide area, flood: {}, round {}", way.name(), round + 1));
            let [warm, window] = [plan.warm_ms, plan.flood_ms].map(Duration::from_millis);
            let ends = open(world, route, *way)?;
            let flood =
                weather.play(world, &path, || flow::flood_through(ends, || world.cpu_ns(), warm, window))?;
            row.mbit.push(flood.mbit);
        }
    }
    area.bulk.extend(floods);
    // A quick run has no time for copies.
    if !plan.is_full {
        return Ok(());
    }
    let sshd = match servers(world) {
        Ok(sshd) => sshd,
        Err(error) if error.downcast_ref::<Absent>().is_some() => {
            area.absent.push(format!("scp: {error:#}"));
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let mut copies: Vec<_> = rows("scp").collect();
    for round in 0..plan.area_rounds {
        let weather = Weather::draw(seed.wrapping_add(round.into()), &world.map, LONGEST);
        for (way, row) in ways.iter().zip(&mut copies) {
            progress.say(&format!("wide area, scp: {}, round {}", way.name(), round + 1));
            let (to, part) = match way {
                Way::Plain(congestion) => {
                    route_plain(world, route, congestion)?;
                    (SocketAddr::from((PLAIN, SSH)), if *congestion == "cubic" { CUBIC_PART } else { 1 })
                }
                Way::Overlay => (Server::Ssh.listener(), 1),
            };
            let (directory, bytes) = (world.directory.path(), plan.area_file_bytes / part);
            let mbit = weather.play(world, &path, || scp::copy(directory, world.source(), to, bytes));
            row.mbit.push(mbit.with_context(|| way.name())?);
        }
    }
    area.bulk.extend(copies);
    drop(sshd);
    Ok(())
}

fn servers(world: &World) -> Result<Service> {
    let directory = world.directory.path();
    scp::keys(directory)?;
    let over = Server::Ssh.address();
    let std::net::IpAddr::V4(address) = over.ip() else { anyhow::bail!("no IPv4 address") };
    scp::sshd(directory, world.target(), &[(address, over.port()), (PLAIN, SSH)])
}

/// Opens a flow.
fn open(world: &World, route: &[usize], way: Way) -> Result<Ends> {
    let (at, to) = match way {
        Way::Plain(congestion) => {
            route_plain(world, route, congestion)?;
            let at = SocketAddr::from((PLAIN, PORT));
            (at, at)
        }
        Way::Overlay => (Server::Bulk.address(), Server::Bulk.listener()),
    };
    let listener = world.target().enter(|| Ok(TcpListener::bind(at)?))?;
    let ends = flow::ends(&listener, world.source(), to)?;
    if let Way::Plain(congestion) = way {
        flow::is_in_use(&ends, congestion)?;
    }
    Ok(ends)
}

/// Routes plain TCP along these nodes, with a congestion control that applies to all programs.
fn route_plain(world: &World, route: &[usize], congestion: &str) -> Result<()> {
    let replace = |node: usize, to: Ipv4Addr, via: Ipv4Addr, own: Option<Ipv4Addr>| {
        let (to, via) = (to.to_string(), via.to_string());
        let mut words = vec!["route", "replace", &to, "via", &via];
        let own = own.map(|own| own.to_string());
        if let Some(own) = &own {
            words.extend(["src", own]);
        }
        words.extend(["congctl", congestion]);
        world.nodes[node].run("ip", &words).map(|_| ())
    };
    for pair in route.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        let wire = &world.wires[world.link(from, to)?].link;
        let (near, far) = if from < to { (wire.a.v4, wire.b.v4) } else { (wire.b.v4, wire.a.v4) };
        let own = (from == world.map.ends[0]).then_some(PLAIN_CLIENT);
        replace(from, PLAIN, far, own)?;
        let own = (to == world.map.ends[1]).then_some(PLAIN);
        replace(to, PLAIN_CLIENT, near, own)?;
    }
    Ok(())
}
