//! Twelve nodes over two coasts and an ocean, at about the distances of Seamless Overlays, Fig. 2, with flows from
//! one end to the other. Links on their path are cut, one after the other.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use super::super::scene::bits;
use super::world::{Map, Server, WITHIN, World};
use crate::link::{Conditions, Kind};
use crate::progress::Progress;

/// Links and their one-way delays in milliseconds.
const LINKS: [(usize, usize, u64); 20] = [
    (0, 1, 5),
    (1, 2, 12),
    (2, 3, 10),
    (3, 4, 14),
    (4, 5, 9),
    (0, 5, 16),
    (0, 3, 20),
    (1, 4, 22),
    (2, 5, 25),
    (0, 6, 37),
    (1, 7, 40),
    (6, 7, 4),
    (7, 8, 6),
    (6, 8, 8),
    (8, 9, 10),
    (9, 10, 7),
    (10, 11, 9),
    (6, 11, 12),
    (5, 9, 45),
    (4, 11, 50),
];
const NAMES: [&str; 12] = ["n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9", "n10", "n11", "n12"];
/// The first and the last node of the flows.
const ENDS: [usize; 2] = [3, 10];
/// Observation time after a cut: within it, all changes have happened.
const SETTLE: Duration = Duration::from_millis(1500);
/// Observation time of idle links.
const IDLE: Duration = Duration::from_secs(3);
/// The bytes that every flow sends after a cut.
const WORD: [u8; 100] = [0x5a; 100];
/// Pause after all flows were asked for an answer.
const ASK_AGAIN: Duration = Duration::from_millis(1);

/// The measurements.
#[derive(Debug, Clone, Default, Serialize)]
pub(in super::super) struct Routes {
    /// Number of flows from one end to the other.
    pub flows: usize,
    /// Bandwidth of the busiest link while the flows are idle, in kbit/s, both directions together.
    pub idle_kbit: f64,
    /// For each cut link: time until the last node had the new routes, in milliseconds, ascending.
    pub converged_ms: Vec<f64>,
    /// For each cut link and each node: time until this node had them, in milliseconds, ascending.
    pub heard_ms: Vec<f64>,
    /// For each cut link: time until every flow had an answer to a word sent at the cut, in milliseconds, ascending.
    pub answered_ms: Vec<f64>,
    /// For each cut link and each flow: time until this flow had it, in milliseconds, ascending.
    pub flow_ms: Vec<f64>,
}

/// Measures.
///
/// # Errors The network cannot be built, a flow breaks, or the overlay does not converge.
pub(super) fn run(kind: Kind, seed: u64, cuts: u32, flows: usize, progress: &Progress) -> Result<Routes> {
    let map = Map { names: &NAMES, links: LINKS.to_vec(), ends: ENDS, services: Vec::new() };
    let world = World::new(map, kind, seed, progress)?;
    let listener = world.target().enter(|| Ok(TcpListener::bind(Server::Echo.address())?))?;
    std::thread::spawn(move || echo(&listener));
    progress.say(&format!("{flows} flows over twelve nodes"));
    let mut open = open(&world, flows)?;
    say(&mut open)?;
    progress.say("twelve nodes, idle");
    let mut routes = Routes { flows, idle_kbit: idle_kbit(&world)?, ..Routes::default() };
    for number in 0..cuts {
        progress.say(&format!("cut {} of {cuts}", number + 1));
        cut(&world, &mut open, number as usize, &mut routes)?;
    }
    for times in
        [&mut routes.converged_ms, &mut routes.heard_ms, &mut routes.answered_ms, &mut routes.flow_ms]
    {
        times.sort_by(f64::total_cmp);
    }
    Ok(routes)
}

/// Echoes the bytes of every connection.
fn echo(listener: &TcpListener) {
    for mut stream in listener.incoming().map_while(Result::ok) {
        std::thread::spawn(move || {
            let mut buffer = [0; WORD.len()];
            while stream.read_exact(&mut buffer).is_ok() && stream.write_all(&buffer).is_ok() {}
        });
    }
}

fn open(world: &World, flows: usize) -> Result<Vec<TcpStream>> {
    world.source().enter(|| {
        let open = (0..flows).map(|_| {
            let flow = TcpStream::connect_timeout(&Server::Echo.listener(), WITHIN)?;
            flow.set_nonblocking(true)?;
            anyhow::Ok(flow)
        });
        open.collect()
    })
}

/// Sends a word on every flow. Returns after how many milliseconds each had its echo.
fn say(flows: &mut [TcpStream]) -> Result<Vec<f64>> {
    let began = Instant::now();
    for flow in &mut *flows {
        // The word fits into an empty socket buffer.
        ensure!(flow.write(&WORD)? == WORD.len(), "a flow takes no word");
    }
    let mut waiting: Vec<_> = flows.iter_mut().map(|flow| (flow, 0)).collect();
    let mut times = Vec::with_capacity(waiting.len());
    while !waiting.is_empty() {
        ensure!(began.elapsed() < WITHIN, "{} flows have no answer", waiting.len());
        let mut still = Vec::with_capacity(waiting.len());
        for (flow, mut came) in waiting {
            came += answer(flow)?;
            ensure!(came <= WORD.len(), "a flow has another answer");
            if came == WORD.len() {
                times.push(began.elapsed().as_secs_f64() * 1e3);
            } else {
                still.push((flow, came));
            }
        }
        waiting = still;
        std::thread::sleep(ASK_AGAIN);
    }
    Ok(times)
}

/// Reads what has come of an answer. Returns the number of bytes.
fn answer(flow: &mut TcpStream) -> Result<usize> {
    let mut back = [0; WORD.len()];
    match flow.read(&mut back) {
        Ok(0) => anyhow::bail!("a flow has ended"),
        Ok(bytes) => {
            ensure!(back[..bytes] == WORD[..bytes], "a flow has another answer");
            Ok(bytes)
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        Err(error) => Err(error).context("a flow has no answer"),
    }
}

fn unix_ms() -> Result<u64> {
    Ok(u64::try_from(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_millis())?)
}

/// Returns the bandwidth of the busiest idle link, in kbit/s.
fn idle_kbit(world: &World) -> Result<f64> {
    // Waits until the traffic of the flows' start is over: spare connections are ready again.
    std::thread::sleep(SETTLE);
    let count = || {
        let ends = world.map.links.iter().zip(&world.wires);
        ends.map(|((a, ..), wire)| bits(&world.nodes[*a], wire)).collect::<Result<Vec<_>>>()
    };
    let (since, before) = (Instant::now(), count()?);
    std::thread::sleep(IDLE);
    let after = count()?;
    let most = after.iter().zip(&before).map(|(after, before)| after - before).max();
    Ok(most.context("no links")? as f64 / since.elapsed().as_secs_f64() / 1e3)
}

/// Cuts a link of the path and restores it. Notes when all nodes knew, and when all flows had an answer.
fn cut(world: &World, flows: &mut [TcpStream], number: usize, routes: &mut Routes) -> Result<()> {
    let path = world.path()?;
    let link = *path.get(number % path.len().max(1)).context("no path")?;
    let whole = Conditions::delayed(world.delay(link));
    let (since, at) = (Instant::now(), unix_ms()?);
    world.wires[link].set_both(Conditions { is_up: false, ..whole })?;
    let times = say(flows)?;
    std::thread::sleep(SETTLE.saturating_sub(since.elapsed()));
    let mut last = 0;
    for node in 0..world.nodes.len() {
        let changed = world.status(node)?.links_changed_unix_ms;
        ensure!(changed >= at, "{} has not heard of the cut", world.map.names[node]);
        routes.heard_ms.push((changed - at) as f64);
        last = last.max(changed - at);
    }
    routes.converged_ms.push(last as f64);
    routes.answered_ms.push(times.iter().copied().fold(0.0, f64::max));
    routes.flow_ms.extend(times);
    world.wires[link].set_both(whole)?;
    world.wait("the link is back", |status| status.links.iter().all(|link| link.up && link.datagrams))?;
    // By then both ends have informed all nodes.
    std::thread::sleep(SETTLE);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_has_two_links_and_the_lower_one_dials() {
        for at in 0..NAMES.len() {
            assert!(LINKS.iter().filter(|(a, b, _)| *a == at || *b == at).count() >= 2, "{at}");
        }
        assert!(LINKS.iter().all(|(a, b, _)| a < b && *b < NAMES.len()));
    }
}
