//! Which flows are worth a hand-over: the same flows with and without it, by their length and their number.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow};

use super::Options;
use super::hosts::{Hosts, Up};
use crate::kit::Page;
use crate::progress::Progress;
use crate::statistics::median;

/// Flows that are there at the same time: as many are on the wire.
const AT_A_TIME: [usize; 3] = [8, 64, 512];
/// Bytes of a flow, from the client to the server.
const BYTES: [usize; 6] = [4_000, 64_000, 256_000, 1_000_000, 4_000_000, 16_000_000];
/// Requests of a flow, each of [`MESSAGE`] bytes, and an answer of as many.
const REQUESTS: [usize; 4] = [10, 100, 1_000, 10_000];
const MESSAGE: usize = 100;
/// Bytes of one cell, and its flows, at most.
const CELL_BYTES: usize = 2_000_000_000;
const CELL_FLOWS: usize = 1_024;
/// Requests of one cell at most.
const CELL_REQUESTS: usize = 400_000;
/// In the middle of a flow nothing is sent for so long: the hand-over is over then.
const PAUSE: Duration = Duration::from_millis(80);
/// Bytes of one write.
const PIECE: usize = 64_000;

/// Each flow is handed over at its first byte, or never.
const HANDED: &str = "{ fast_path = \"wire\", after_bytes = 1 }";
const STAYS: &str = "{ fast_path = \"none\" }";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    Bytes(usize),
    Requests(usize),
}

/// Processor time of a flow, microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cost {
    /// Of the whole machine: both hosts and the kernel included.
    all: f64,
    /// Of our program.
    own: f64,
}

impl Work {
    fn flows(self, at_a_time: usize) -> usize {
        let most = match self {
            Self::Bytes(bytes) => CELL_BYTES / bytes,
            Self::Requests(count) => CELL_REQUESTS / count,
        };
        most.min(CELL_FLOWS) / at_a_time * at_a_time
    }

    fn client(self, mut stream: TcpStream) -> io::Result<()> {
        match self {
            Self::Bytes(bytes) => {
                let piece = vec![7; PIECE];
                for half in [bytes / 2, bytes - bytes / 2] {
                    let mut rest = half;
                    while rest > 0 {
                        let length = rest.min(PIECE);
                        stream.write_all(&piece[..length])?;
                        rest -= length;
                    }
                    if half == bytes / 2 {
                        thread::sleep(PAUSE);
                    }
                }
            }
            Self::Requests(count) => {
                stream.set_nodelay(true)?;
                for number in 0..count {
                    stream.write_all(&[7; MESSAGE])?;
                    stream.read_exact(&mut [0; MESSAGE])?;
                    if number == count / 2 {
                        thread::sleep(PAUSE);
                    }
                }
            }
        }
        stream.shutdown(Shutdown::Write)?;
        stream.read(&mut [0]).map(drop)
    }

    fn server(self, mut stream: TcpStream) -> io::Result<()> {
        match self {
            Self::Bytes(_) => {
                let mut buffer = vec![0; PIECE];
                while stream.read(&mut buffer)? > 0 {}
            }
            Self::Requests(count) => {
                stream.set_nodelay(true)?;
                for _ in 0..count {
                    stream.read_exact(&mut [0; MESSAGE])?;
                    stream.write_all(&[7; MESSAGE])?;
                }
                while stream.read(&mut [0])? > 0 {}
            }
        }
        Ok(())
    }
}

/// Microseconds that all processors have worked.
fn busy_us() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().and_then(|line| line.strip_prefix("cpu ")).unwrap_or_default();
    let ticks: Vec<f64> = line.split_whitespace().filter_map(|field| field.parse().ok()).collect();
    // user, nice, system, irq, softirq; a tick is 10 ms.
    Ok([0, 1, 2, 5, 6].iter().filter_map(|at| ticks.get(*at)).sum::<f64>() * 10_000.0)
}

fn cell(hosts: &Hosts, up: &Up, work: Work, at_a_time: usize) -> Result<Cost> {
    let flows = work.flows(at_a_time);
    let (all, own) = (busy_us()?, up.cpu_ns());
    thread::scope(|scope| -> Result<()> {
        let served = scope.spawn(move || -> Result<()> {
            thread::scope(|scope| {
                let ends: io::Result<Vec<_>> = (0..flows)
                    .map(|_| hosts.accept().map(|stream| scope.spawn(move || work.server(stream))))
                    .collect();
                ends?
                    .into_iter()
                    .try_for_each(|end| Ok(end.join().map_err(|_| anyhow!("a server has panicked"))??))
            })
        });
        let clients: Vec<_> = (0..at_a_time)
            .map(|_| {
                scope.spawn(move || {
                    (0..flows / at_a_time).try_for_each(|_| {
                        let stream = hosts.connect(1)?.pop().ok_or_else(|| anyhow!("no connection"))?;
                        Ok::<_, anyhow::Error>(work.client(stream)?)
                    })
                })
            })
            .collect();
        for client in clients {
            client.join().map_err(|_| anyhow!("a client has panicked"))??;
        }
        served.join().map_err(|_| anyhow!("the server has panicked"))?
    })?;
    let flows = flows as f64;
    Ok(Cost { all: (busy_us()? - all) / flows, own: (up.cpu_ns() - own) as f64 / 1000.0 / flows })
}

type Cells = BTreeMap<(usize, Work), [Vec<Cost>; 2]>;

/// Adds the part to the page.
pub(super) fn measure(options: &Options, page: &mut Page) -> Result<()> {
    let (hosts, progress) = (Hosts::new()?, Progress::new());
    let works: Vec<_> =
        BYTES.into_iter().map(Work::Bytes).chain(REQUESTS.into_iter().map(Work::Requests)).collect();
    let (mut cells, mut taken) = (Cells::new(), 0.0);
    for round in 0..options.rounds {
        // Each round the other way round.
        for kind in [round % 2, 1 - round % 2] {
            let up = hosts.start(if kind == 0 { STAYS } else { HANDED })?;
            for at_a_time in AT_A_TIME {
                for work in works.iter().copied().filter(|work| work.flows(at_a_time) > 0) {
                    progress.now(&format!(
                        "round {} of {}: {work:?}, {at_a_time} at a time",
                        round + 1,
                        options.rounds
                    ));
                    let cost = cell(&hosts, &up, work, at_a_time)?;
                    cells.entry((at_a_time, work)).or_default()[kind as usize].push(cost);
                }
            }
            taken += up.metrics()?.get("sidetrack_wire_taken_flows_total").copied().unwrap_or(0.0);
            up.stop()?;
        }
    }
    progress.now("");
    let flows: usize =
        cells.iter().map(|((at_a_time, work), cost)| work.flows(*at_a_time) * cost[1].len()).sum();
    page.line(format_args!(
        "## Which flows are worth a hand-over\n\nThe same flows with sockets to their end (*sockets*), and handed over at their first byte (*wire*; {:.2} of them \
         were). Processor time of a flow in microseconds, from its connect to its end: of the whole machine, both hosts included, and of our \
         program. Medians of {} rounds. In the middle of a flow nothing is sent for {} ms.\n",
        taken / flows.max(1) as f64,
        options.rounds,
        PAUSE.as_millis()
    ));
    for at_a_time in AT_A_TIME {
        table(page, &cells, at_a_time);
    }
    Ok(())
}

fn table(page: &mut Page, cells: &Cells, at_a_time: usize) {
    page.line(format_args!("### {at_a_time} flows at a time\n"));
    page.columns(["flow", "all, sockets:", "all, wire:", "saved:", "program, sockets:", "program, wire:"]);
    let mid = |costs: &[Cost], of: fn(&Cost) -> f64| {
        median(&costs.iter().map(of).collect::<Vec<_>>()).unwrap_or(f64::NAN)
    };
    let mut points = [Vec::new(), Vec::new()];
    for ((_, work), [stays, handed]) in cells.iter().filter(|((at, _), _)| *at == at_a_time) {
        let all = [mid(stays, |cost| cost.all), mid(handed, |cost| cost.all)];
        let own = [mid(stays, |cost| cost.own), mid(handed, |cost| cost.own)];
        let (kind, length, name) = match *work {
            Work::Bytes(bytes) => (0, bytes, format!("{bytes} bytes")),
            Work::Requests(count) => (1, count, format!("{count} requests")),
        };
        points[kind].push((length as f64, all[0] - all[1]));
        page.row(format_args!(
            "{name} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0}",
            all[0],
            all[1],
            all[0] - all[1],
            own[0],
            own[1]
        ));
    }
    page.blank();
    for (points, unit) in points.iter().zip(["bytes", "requests"]) {
        let Some(Line { at_zero, each }) = Line::through(points) else { continue };
        page.line(format_args!(
            "A hand-over costs {:.0} us, and saves {:.4} us for each of the {unit}: it pays from {:.0} {unit} on.",
            -at_zero,
            each,
            -at_zero / each
        ));
    }
    page.blank();
}

/// What a hand-over saves, by the length of the flow.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Line {
    at_zero: f64,
    each: f64,
}

impl Line {
    /// The line with the least squares of relative distance: short flows count as much as long ones.
    fn through(points: &[(f64, f64)]) -> Option<Self> {
        let (mut w, mut x, mut y, mut xx, mut xy) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for &(at, saved) in points {
            let weight = 1.0 / at;
            w += weight;
            x += weight * at;
            y += weight * saved;
            xx += weight * at * at;
            xy += weight * at * saved;
        }
        let each = (w * xy - x * y) / (w * xx - x * x);
        let at_zero = (y - each * x) / w;
        (points.len() > 1 && each.is_finite()).then_some(Self { at_zero, each })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_goes_through_points_on_it() {
        let found = Line::through(&[(10.0, -90.0), (100.0, 0.0), (1000.0, 900.0)]).expect("a line");
        assert!((found.at_zero + 100.0).abs() < 1e-6 && (found.each - 1.0).abs() < 1e-9, "{found:?}");
        assert_eq!(Line::through(&[(1.0, 1.0)]), None);
    }

    #[test]
    fn cells_are_bounded() {
        assert_eq!(Work::Bytes(4_000).flows(8), 1024);
        assert_eq!(Work::Bytes(16_000_000).flows(8), 120);
        assert_eq!(Work::Bytes(16_000_000).flows(512), 0);
        assert_eq!(Work::Requests(10_000).flows(8), 40);
    }
}
