//! `sidetrack doctor`: reports what this kernel, user and machine lack, and how to fix it.
//!
//! [`Facts::gather`] collects; [`examine`] judges, and is a pure function of what was collected.

mod collectors;
mod confinement;
mod datagrams;
mod engine;
mod facts;
mod limits;
mod mend;
mod neighbours;
mod network;
mod overlay;
mod page;
mod rules;
mod shunt;
mod uses;
mod wire;

pub use collectors::CollectorUse;
pub use facts::{Facts, Isolation, Neighbour, Nftables, SETTINGS};
pub use mend::{KEPT_IN, Plan, Setting, kept, plan};
pub use rules::kernel_table;
pub use uses::{DnsUse, EngineUse, Interface, OverlayUse, ShuntUse, Switch, TolerantUse, WireUse};

use serde::Serialize;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// It is fine.
    Ok,
    /// Something that some uses need is missing, or may surprise.
    Warn,
    /// Almost nothing works without it.
    Fail,
}

impl Level {
    /// Its word in the report.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One check and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was checked, in a few words.
    pub name: String,
    /// The severity.
    pub level: Level,
    /// What was found.
    pub found: String,
    /// What it is needed for.
    pub needed_for: String,
    /// What to do, mostly a command; `None` if nothing needs to be done.
    pub fix: Option<String>,
    /// The kernel setting that mends it and only raises a bound: `doctor --fix` may change it.
    #[serde(skip)]
    pub setting: Option<Setting>,
}

impl Check {
    /// What another process of this program has found.
    pub fn told(name: &str, level: &str, found: &str, needed_for: &str, fix: Option<&str>) -> Self {
        let levels = [Level::Ok, Level::Warn, Level::Fail];
        let level = levels.into_iter().find(|known| known.as_str() == level).unwrap_or(Level::Warn);
        let check = Self::new(name, level, found).needed_for(needed_for);
        fix.map_or(check.clone(), |fix| check.fix(fix))
    }

    fn new(name: impl Into<String>, level: Level, found: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            level,
            found: found.into(),
            needed_for: String::new(),
            fix: None,
            setting: None,
        }
    }

    fn ok(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(name, Level::Ok, found)
    }

    fn warn(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(name, Level::Warn, found)
    }

    fn fail(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(name, Level::Fail, found)
    }

    fn needed_for(mut self, what: impl Into<String>) -> Self {
        self.needed_for = what.into();
        self
    }

    fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    /// The fix is this kernel setting, which `doctor --fix` may change.
    fn sets(mut self, name: &'static str, value: impl ToString) -> Self {
        let setting = Setting { name, value: value.to_string() };
        self.fix = Some(format!("sysctl {}={}", setting.dotted(), setting.value));
        self.setting = Some(setting);
        self
    }
}

/// Judges what a running process has [looked](Facts::look) at. What depends on rights is left out: this process has given up most
/// of them.
pub fn examine_running(facts: &Facts) -> Vec<Check> {
    [
        limits::examine(facts),
        network::examine(facts),
        datagrams::examine(facts),
        neighbours::examine(facts),
        page::examine(facts),
    ]
    .concat()
}

/// Judges what was gathered, and returns all checks.
pub fn examine(facts: &Facts) -> Vec<Check> {
    [
        rules::examine(facts),
        limits::examine(facts),
        network::examine(facts),
        datagrams::examine(facts),
        confinement::examine(facts),
        neighbours::examine(facts),
        engine::examine(facts),
        shunt::examine(facts),
        wire::examine(facts),
        overlay::examine(facts),
        page::examine(facts),
        collectors::examine(facts),
        facts.running.clone(),
    ]
    .concat()
}
