//! Settings of a link that operators change at run time (`sidetrack overlay link set`, like `setlink` of Spines).

use serde::{Deserialize, Serialize};

/// The values to change; none: unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkSetting {
    /// True if the link may be up.
    pub up: Option<bool>,
    /// Its cost, milliseconds, 0.001 to 60,000; 0: the measured cost.
    pub cost_ms: Option<f64>,
    /// The rate at which this node sends on it, Mb/s; 0: there is no limit.
    pub rate_mbit: Option<f64>,
    /// Share of the neighbour's datagrams that are dropped here, percent: for tests.
    pub loss_percent: Option<f64>,
}

/// The settings of a link that are in force.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkSettingView {
    /// The neighbour.
    pub neighbour: String,
    /// It is kept down.
    pub down: bool,
    /// Its cost, milliseconds; 0: the measured cost.
    pub cost_ms: f64,
    /// The rate at which this node sends on it, Mb/s; 0: there is no limit.
    pub rate_mbit: f64,
    /// Share of the neighbour's datagrams that are dropped here, percent.
    pub loss_percent: f64,
}

impl LinkSetting {
    /// Checks that every number is in its range.
    ///
    /// # Errors
    /// Returns the wrong value, in words.
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
    /// Applies the changed values.
    pub(super) fn change(&mut self, setting: &LinkSetting) {
        self.down = setting.up.map_or(self.down, |up| !up);
        self.cost_ms = setting.cost_ms.unwrap_or(self.cost_ms);
        self.rate_mbit = setting.rate_mbit.unwrap_or(self.rate_mbit);
        self.loss_percent = setting.loss_percent.unwrap_or(self.loss_percent);
    }

    /// True if all settings have their defaults.
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
