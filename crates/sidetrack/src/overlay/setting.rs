//! What somebody wants of a link at run time (`sidetrack overlay link set`, as `setlink` of Spines).

use serde::{Deserialize, Serialize};

/// What is to change; none: as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkSetting {
    /// Whether it may be up.
    pub up: Option<bool>,
    /// What it costs, milliseconds, 0.001 to 60,000; 0: what is measured.
    pub cost_ms: Option<f64>,
    /// How fast this node sends on it, Mb/s; 0: as fast as it takes.
    pub rate_mbit: Option<f64>,
    /// Share of the neighbour's datagrams that are dropped here, percent: for tests.
    pub loss_percent: Option<f64>,
}

/// What is in force for a link by somebody's wish.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkSettingView {
    /// The neighbour.
    pub neighbour: String,
    /// It is kept down.
    pub down: bool,
    /// Its cost, milliseconds; 0: what is measured.
    pub cost_ms: f64,
    /// How fast this node sends on it, Mb/s; 0: as fast as it takes.
    pub rate_mbit: f64,
    /// Share of the neighbour's datagrams that are dropped here, percent.
    pub loss_percent: f64,
}

impl LinkSetting {
    /// Whether every number is one that it may be.
    ///
    /// # Errors
    /// Which is not, in words.
    pub fn check(&self) -> Result<(), String> {
        let bounds = [
            ("cost", self.cost_ms, 60_000.0, "milliseconds"),
            ("rate", self.rate_mbit, 1_000_000.0, "Mb/s"),
            ("loss", self.loss_percent, 100.0, "percent"),
        ];
        for (name, value, most, unit) in bounds {
            if let Some(value) = value.filter(|value| !(0.0..=most).contains(value)) {
                return Err(format!("a {name} of {value} {unit}; allowed are 0 to {most}"));
            }
        }
        Ok(())
    }
}

impl LinkSettingView {
    /// Takes what is to change.
    pub(super) fn change(&mut self, setting: &LinkSetting) {
        self.down = setting.up.map_or(self.down, |up| !up);
        self.cost_ms = setting.cost_ms.unwrap_or(self.cost_ms);
        self.rate_mbit = setting.rate_mbit.unwrap_or(self.rate_mbit);
        self.loss_percent = setting.loss_percent.unwrap_or(self.loss_percent);
    }

    /// Whether nothing is as it would not be by itself.
    pub(super) fn is_usual(&self) -> bool {
        *self == Self { neighbour: self.neighbour.clone(), ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_said_changes_and_what_makes_no_sense_is_refused() {
        let mut view = LinkSettingView { neighbour: "b".into(), ..LinkSettingView::default() };
        let cost = LinkSetting { cost_ms: Some(5.0), ..LinkSetting::default() };
        view.change(&cost);
        view.change(&LinkSetting { up: Some(false), ..LinkSetting::default() });
        assert_eq!((view.cost_ms, view.down, view.is_usual()), (5.0, true, false));
        view.change(&LinkSetting { up: Some(true), cost_ms: Some(0.0), ..LinkSetting::default() });
        assert!(view.is_usual());
        for wrong in [
            LinkSetting { cost_ms: Some(-1.0), ..LinkSetting::default() },
            LinkSetting { rate_mbit: Some(f64::NAN), ..LinkSetting::default() },
            LinkSetting { loss_percent: Some(101.0), ..LinkSetting::default() },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
        assert_eq!(cost.check(), Ok(()));
    }
}
