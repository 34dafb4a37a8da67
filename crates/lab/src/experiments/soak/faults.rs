//! Parts that are killed or cut, and until when flows may fail for that.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::routes::{Part, Route};
use super::stand::Stand;
use super::traffic::{Done, Entry, Kind, Traffic};

/// How long the link stays cut.
const CUT: Duration = Duration::from_secs(1);
/// Time between two tries whether a route works again.
const POLL: Duration = Duration::from_millis(100);
/// A route works again after this number of flows in a row: each worker has connections of its own.
const PASSED: u32 = 12;
/// A route that does not work again within this time is lost.
const BACK_WITHIN: Duration = Duration::from_secs(60);

/// A fault.
#[derive(Debug, Clone, serde::Serialize)]
pub(super) struct Fault {
    /// What was killed or cut.
    pub part: Part,
    /// When, from the start of the experiment.
    pub from: Duration,
    /// When every route through it worked again. `None`: one never did.
    pub until: Option<Duration>,
}

impl Fault {
    /// Makes one, and waits until every route through the part works again.
    ///
    /// # Errors
    /// The part cannot be killed or started again.
    pub(super) fn make(part: Part, stand: &mut Stand, traffic: &Traffic) -> Result<Self> {
        let from = traffic.now();
        match part {
            Part::Far => stand.restart_far()?,
            Part::Container => stand.kill_container()?,
            Part::Link => {
                stand.set_link("down")?;
                std::thread::sleep(CUT);
                stand.set_link("up")?;
            }
        }
        let back = Self::wait_until_back(part, stand, traffic, from);
        let until = back.is_ok().then(|| traffic.now());
        Ok(Self { part, from, until })
    }

    fn wait_until_back(part: Part, stand: &Stand, traffic: &Traffic, from: Duration) -> Result<()> {
        let gateway = &stand.gateway;
        for route in stand.routes.iter().filter(|route| route.needs.contains(&part)) {
            gateway.enter(|| {
                let mut passed = 0;
                while passed < PASSED {
                    if traffic.one(Entry::Redirect, route, Kind::Short, 1000)? {
                        passed += 1;
                        continue;
                    }
                    passed = 0;
                    ensure!(traffic.now() - from < BACK_WITHIN, "{} does not come back", route.name);
                    std::thread::sleep(POLL);
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Whether a flow of this route may have been cut by it.
    pub(super) fn explains(&self, done: &Done, route: &Route) -> bool {
        let is_over = self.until.is_some_and(|until| until < done.begun);
        route.needs.contains(&self.part) && self.from <= done.ended && !is_over
    }
}
