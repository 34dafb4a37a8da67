//! What `doctor --fix` changes by itself: kernel settings that only raise a bound. Everything else is left to the user.

use super::{Check, Level};

/// The file that sets these settings at each boot. No other program writes it; without it, the settings last until the next boot.
pub const KEPT_IN: &str = "/etc/sysctl.d/90-sidetrack.conf";

/// The first line of that file.
const HEAD: &str = "# Written by `sidetrack doctor --fix`. Remove this file to go back to the settings of the system at the next boot.\n";

/// A kernel setting with the value that mends a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its name under /proc/sys, such as `net/core/somaxconn`.
    pub name: &'static str,
    /// The value to set.
    pub value: String,
}

impl Setting {
    /// Its name as sysctl writes it.
    pub fn dotted(&self) -> String {
        self.name.replace('/', ".")
    }
}

/// What can be mended, and what is left to the user: the name of each check with its fix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The settings to change, in the order of the checks.
    pub settings: Vec<Setting>,
    /// Checks that need a decision or a program: name and fix.
    pub left: Vec<(String, String)>,
}

/// Sorts the checks that are not fine.
pub fn plan(checks: &[Check]) -> Plan {
    let mut plan = Plan::default();
    for check in checks.iter().filter(|check| check.level != Level::Ok) {
        match (&check.setting, &check.fix) {
            (Some(setting), _) if !plan.settings.contains(setting) => plan.settings.push(setting.clone()),
            (None, Some(fix)) => plan.left.push((check.name.clone(), fix.clone())),
            _ => {}
        }
    }
    plan
}

/// The text of [`KEPT_IN`] with these settings. Other lines of `before` stay; a line for the same setting is replaced.
pub fn kept(before: &str, settings: &[Setting]) -> String {
    let mut text = String::from(HEAD);
    for line in before.lines() {
        let key = line.split('=').next().unwrap_or_default().trim();
        if format!("{line}\n") != HEAD && settings.iter().all(|setting| setting.dotted() != key) {
            text += &format!("{line}\n");
        }
    }
    for setting in settings {
        text += &format!("{} = {}\n", setting.dotted(), setting.value);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(name: &'static str, value: &str) -> Setting {
        Setting { name, value: value.to_owned() }
    }

    #[test]
    fn a_setting_has_one_line_and_other_lines_stay() {
        let settings = [setting("net/core/somaxconn", "4096"), setting("net/core/rmem_max", "1")];
        let first = kept("", &settings[..1]);
        assert_eq!(first, format!("{HEAD}net.core.somaxconn = 4096\n"));
        let edited = format!("{first}vm.swappiness=1\nnet.core.rmem_max =7\n");
        let next = kept(&edited, &settings);
        assert_eq!(
            next,
            format!("{HEAD}vm.swappiness=1\nnet.core.somaxconn = 4096\nnet.core.rmem_max = 1\n")
        );
        assert_eq!(kept(&next, &settings), next, "twice is as once");
    }

    #[test]
    fn only_checks_that_are_not_fine_and_have_a_setting_are_mended() {
        let of = |name: &str, level| Check::new(name, level, "").sets("net/core/somaxconn", 4096_u64);
        let checks =
            [of("a", Level::Ok), of("b", Level::Warn), of("c", Level::Fail), Check::warn("d", "").fix("do")];
        let plan = plan(&checks);
        assert_eq!(plan.settings, [setting("net/core/somaxconn", "4096")], "one setting once");
        assert_eq!(plan.left, [("d".to_owned(), "do".to_owned())]);
        assert_eq!(checks[1].fix.as_deref(), Some("sysctl net.core.somaxconn=4096"));
    }
}
