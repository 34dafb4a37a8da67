//! How many containers of a function run: drives `core::function::scale`. Each pool has a task on the containers' thread.

use super::keep::{Charge, keep};
use super::pool::Pool;
use super::starter::Launcher;
use crate::live::Clock;
use crate::reactor::{self, sleep};
use sidetrack_core::function::scale::{Bounds, Sample, Scaler};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::watch;

/// How often a pool that can grow is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// A container that is kept running by a task.
struct Replica {
    leave: watch::Sender<bool>,
    /// The number of its container; 0 while there is none.
    number: Arc<AtomicU64>,
}

/// The containers of a pool.
struct Replicas {
    all: Vec<Replica>,
    launcher: Arc<Launcher>,
    clock: Clock,
}

impl Replicas {
    /// Starts containers or lets some leave, until this number is left.
    fn become_as_many_as(&mut self, target: u16, pool: &Arc<Pool>) {
        pool.aim(target);
        while self.all.len() < usize::from(target) {
            let (leave, left) = watch::channel(false);
            let number = Arc::new(AtomicU64::new(0));
            let charge = Charge::of(pool, left, number.clone());
            reactor::spawn(keep(charge, self.launcher.clone(), self.clock));
            self.all.push(Replica { leave, number });
        }
        while self.all.len() > usize::from(target) {
            let well = pool.well();
            let flows = |replica: &Replica| {
                let number = replica.number.load(Relaxed);
                // One that does not work leaves first.
                well.iter()
                    .find(|instance| instance.number == number)
                    .map_or(0, |instance| 1 + instance.flows())
            };
            let least = (0..self.all.len()).min_by_key(|at| self.all.get(*at).map(flows));
            let Some(at) = least else { break };
            self.all.swap_remove(at).leave.send_replace(true);
        }
    }
}

/// Keeps as many containers running as the pool needs, until it is dropped.
pub(super) fn follow(
    pool: &Arc<Pool>,
    launcher: Arc<Launcher>,
    clock: Clock,
) -> impl Future<Output = ()> + 'static + use<> {
    let spec = pool.spec();
    let bounds = Bounds {
        min: spec.instances,
        max: spec.replicas_max,
        flows_per_replica: spec.flows_per_replica,
        calm: Duration::from_millis(spec.shrink_after_ms),
    };
    let mut scaler = Scaler::new(bounds);
    let mut replicas = Replicas { all: Vec::new(), launcher, clock };
    replicas.become_as_many_as(scaler.target(), pool);
    let (weak, mut open): (Weak<Pool>, _) = (Arc::downgrade(pool), pool.watch());
    async move {
        loop {
            tokio::select! {
                // A pool that does not grow is only kept.
                () = sleep(LOOK), if bounds.max > bounds.min => {}
                changed = open.changed() => if changed.is_err() { break },
            }
            let Some(pool) = weak.upgrade() else { break };
            scaler.handle(clock.now(), sample(&pool));
            if let Some(target) = scaler.poll() {
                tracing::info!(function = %pool.function(), from = pool.target(), to = target, "containers");
                replicas.become_as_many_as(target, &pool);
            }
        }
        // The tasks notice by themselves that the pool is gone.
        drop(replicas);
    }
}

/// What the containers of a pool do now; asks them for their CPU time, which the next sample has.
fn sample(pool: &Pool) -> Sample {
    let well = pool.well();
    well.iter().for_each(|instance| instance.ask_cpu());
    let flows = well.iter().map(|instance| instance.flows() as u64).sum();
    let cpu_milli = well.iter().filter_map(|instance| instance.cpu_milli()).reduce(u64::saturating_add);
    Sample { flows, well: u16::try_from(well.len()).unwrap_or(u16::MAX), cpu_milli }
}
