//! Long flows that echo all the time. Each byte is checked.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::LIMIT;
use crate::experiments::echo::Flow;
use crate::launch;
use crate::topology::Node;

/// Flows of one thread.
const FLOWS_PER_THREAD: usize = 10;
/// A thread rests after each piece, so that it does not use up the processors.
const REST: Duration = Duration::from_millis(10);
/// Sizes of pieces, in turn.
const PIECES: [usize; 4] = [1, 700, 3000, 9000];

/// Flows at work.
pub(super) struct Flows {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Outcome>>,
}

#[derive(Default)]
struct Shared {
    stopping: AtomicBool,
    bytes: AtomicU64,
}

/// What came of flows.
#[derive(Debug, Default, Clone, serde::Serialize)]
pub(super) struct Outcome {
    /// Flows that were opened.
    pub flows: usize,
    /// Bytes that came back.
    pub bytes: u64,
    /// Why flows were cut.
    pub cut: Vec<String>,
    /// Flows with a wrong byte.
    pub wrong: u64,
    /// The longest time until a piece came back.
    pub longest: Duration,
}

impl Flows {
    /// Opens this number of flows from a host to these addresses, in turn.
    ///
    /// # Errors
    /// A flow cannot be opened.
    pub(super) fn open(host: &Node, to: &[SocketAddr], count: usize) -> Result<Self> {
        let shared = Arc::<Shared>::default();
        let (opened, opening) = mpsc::channel();
        let to: Vec<_> = to.iter().copied().cycle().take(count).collect();
        let mut threads = Vec::new();
        for to in to.chunks(FLOWS_PER_THREAD) {
            let (netns, to) = (host.netns(), to.to_vec());
            let (shared, opened) = (shared.clone(), opened.clone());
            threads.push(std::thread::spawn(move || {
                let flows = launch::join_netns(&netns).and_then(|()| open_all(&to, &opened));
                flows.map(|flows| talk(flows, &shared)).unwrap_or_default()
            }));
        }
        drop(opened);
        let flows = Self { shared, threads };
        for _ in 0..count {
            opening.recv().map_err(|_| anyhow!("a thread of flows has ended"))??;
        }
        Ok(flows)
    }

    /// Bytes that came back so far.
    pub(super) fn bytes(&self) -> u64 {
        self.shared.bytes.load(Relaxed)
    }

    /// Ends all flows in order.
    pub(super) fn end(mut self) -> Outcome {
        self.shared.stopping.store(true, Relaxed);
        let mut all = Outcome::default();
        for thread in self.threads.drain(..) {
            let Ok(one) = thread.join() else {
                all.cut.push("a thread of flows has panicked".to_owned());
                continue;
            };
            all.flows += one.flows;
            all.bytes += one.bytes;
            all.cut.extend(one.cut);
            all.wrong += one.wrong;
            all.longest = all.longest.max(one.longest);
        }
        all
    }
}

impl Drop for Flows {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Relaxed);
    }
}

fn open_all(to: &[SocketAddr], opened: &Sender<Result<()>>) -> Result<Vec<(SocketAddr, Flow)>> {
    let mut flows = Vec::new();
    for to in to {
        match Flow::open(*to, LIMIT).with_context(|| format!("a flow to {to}")) {
            Ok(flow) => flows.push((*to, flow)),
            Err(error) => {
                // The receiver is gone if another flow has failed.
                let _ = opened.send(Err(error));
                return Ok(flows);
            }
        }
        let _ = opened.send(Ok(()));
    }
    Ok(flows)
}

fn talk(flows: Vec<(SocketAddr, Flow)>, shared: &Shared) -> Outcome {
    let mut done = Outcome { flows: flows.len(), ..Outcome::default() };
    let mut flows: Vec<_> = flows.into_iter().map(Some).collect();
    let begun = Instant::now();
    let mut round = 0;
    while !shared.stopping.load(Relaxed) {
        for slot in &mut flows {
            let Some((to, flow)) = slot else { continue };
            let (asked, size) = (Instant::now(), PIECES[round % PIECES.len()]);
            match flow.echo(size) {
                Ok(()) => {
                    done.bytes += size as u64;
                    shared.bytes.fetch_add(size as u64, Relaxed);
                }
                Err(error) => {
                    done.fails(*to, begun, &error);
                    *slot = None;
                }
            }
            done.longest = done.longest.max(asked.elapsed());
            std::thread::sleep(REST);
        }
        round += 1;
    }
    for (to, flow) in flows.into_iter().flatten() {
        if let Err(error) = flow.finish() {
            done.fails(to, begun, &error);
        }
    }
    done
}

impl Outcome {
    fn fails(&mut self, to: SocketAddr, begun: Instant, error: &std::io::Error) {
        if error.kind() == ErrorKind::InvalidData {
            self.wrong += 1;
        }
        self.cut.push(format!("a flow to {to} after {:.2} s: {error}", begun.elapsed().as_secs_f64()));
    }
}
