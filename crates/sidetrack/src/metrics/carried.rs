//! Counters of an earlier process of this node. A counter must not fall when an upgrade replaces the process, so their values are
//! added to our own whenever the metrics are read.

use super::{Metrics, lock};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The values of counters and histograms, by family.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Carried(BTreeMap<String, Family>);

#[derive(Clone, Debug, Default, PartialEq)]
struct Family {
    /// The lines that describe it.
    head: String,
    series: BTreeMap<String, Value>,
}

/// A whole number is kept exactly.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Value {
    Whole(u64),
    Other(f64),
}

impl Value {
    fn parse(text: &str) -> Option<Self> {
        text.parse().map(Self::Whole).or_else(|_| text.parse().map(Self::Other)).ok()
    }

    const fn number(self) -> f64 {
        match self {
            Self::Whole(value) => value as f64,
            Self::Other(value) => value,
        }
    }

    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Whole(one), Self::Whole(two)) => Self::Whole(one.saturating_add(two)),
            (one, two) => Self::Other(one.number() + two.number()),
        }
    }

    fn less(self, other: Self) -> Self {
        match (self, other) {
            (Self::Whole(one), Self::Whole(two)) => Self::Whole(one.saturating_sub(two)),
            (one, two) => Self::Other((one.number() - two.number()).max(0.0)),
        }
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Whole(value) => write!(f, "{value}"),
            // As the encoder writes it: a float always shows that it is one.
            Self::Other(value) => write!(f, "{value:?}"),
        }
    }
}

/// The family whose description begins with this line, and whether its values only rise.
fn begins(line: &str) -> Option<(&str, bool)> {
    let (family, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
    // What a process uses is its own.
    let rises = matches!(kind, "counter" | "histogram") && !family.starts_with("process_");
    Some((family, rises))
}

fn sample(line: &str) -> Option<(&str, Value)> {
    let (series, value) = line.rsplit_once(' ').filter(|_| !line.starts_with('#'))?;
    Some((series, Value::parse(value)?))
}

impl Carried {
    /// Reads OpenMetrics text of this program.
    pub fn of(text: &str) -> Self {
        let mut families: BTreeMap<String, Family> = BTreeMap::new();
        let (mut family, mut help) = (None, "");
        for line in text.lines() {
            if line.starts_with("# HELP ") {
                help = line;
            } else if let Some((name, rises)) = begins(line) {
                family = rises.then_some((name, [help, line]));
            } else if let (Some((family, [help, kind])), Some((series, value))) = (family, sample(line)) {
                let family = families.entry(family.to_owned()).or_default();
                family.head = [help, "\n", kind, "\n"].concat().trim_start().to_owned();
                family.series.insert(series.to_owned(), value);
            }
        }
        Self(families)
    }

    /// What has been counted since `earlier`, which the same process or the one before it has counted.
    #[must_use]
    pub fn since(mut self, earlier: &Self) -> Self {
        for (family, all) in &mut self.0 {
            let before = earlier.0.get(family);
            for (series, value) in &mut all.series {
                if let Some(before) = before.and_then(|before| before.series.get(series)) {
                    *value = value.less(*before);
                }
            }
        }
        self
    }

    /// Adds these values.
    pub fn add(&mut self, more: &Self) {
        for (family, all) in &more.0 {
            let known = self.0.entry(family.clone()).or_default();
            known.head.clone_from(&all.head);
            for (series, value) in &all.series {
                let sum = known.series.get(series).map_or(*value, |known| known.and(*value));
                known.series.insert(series.clone(), sum);
            }
        }
    }

    /// Adds these values to OpenMetrics text.
    pub fn added_to(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut left: BTreeMap<&str, Value> = BTreeMap::new();
        let mut missing: BTreeMap<&str, &Family> =
            self.0.iter().map(|(name, all)| (name.as_str(), all)).collect();
        // Writing to a String cannot fail.
        for line in text.lines() {
            if line.starts_with("# HELP ") || line.starts_with("# EOF") || begins(line).is_some() {
                // Series that only the earlier process has counted.
                for (series, value) in std::mem::take(&mut left) {
                    let _ = writeln!(out, "{series} {value}");
                }
            }
            if let Some((family, rises)) = begins(line) {
                let known = missing.remove(family).filter(|_| rises).map(|known| &known.series);
                left = known.into_iter().flatten().map(|(series, value)| (series.as_str(), *value)).collect();
            } else if line.starts_with("# EOF") {
                for Family { head, series } in std::mem::take(&mut missing).into_values() {
                    out.push_str(head);
                    for (series, value) in series {
                        let _ = writeln!(out, "{series} {value}");
                    }
                }
            }
            let sum =
                sample(line).and_then(|(series, value)| Some((series, value.and(left.remove(series)?))));
            let _ = match sum {
                Some((series, value)) => writeln!(out, "{series} {value}"),
                None => writeln!(out, "{line}"),
            };
        }
        out
    }
}

impl Metrics {
    /// Sets what the process before has counted.
    pub fn carry(&self, counted: Carried) {
        lock(&self.carried)[0] = counted;
    }

    /// Adds what a process has counted that gave everything back.
    pub fn carry_back(&self, counted: &Carried) {
        lock(&self.carried)[1].add(counted);
    }
}

#[cfg(test)]
mod tests {
    use super::Carried;

    const FIRST: &str = "# HELP a Flows.\n# TYPE a counter\na_total{rule=\"x y\"} 5\na_total{rule=\"old\"} 2\n\
                         # HELP g Now.\n# TYPE g gauge\ng 7\n# HELP h Times.\n# TYPE h histogram\nh_sum 1.5\nh_count 3\n\
                         # TYPE process_cpu_seconds counter\nprocess_cpu_seconds_total 9\n# EOF\n";
    const SECOND: &str = "# HELP a Flows.\n# TYPE a counter\na_total{rule=\"x y\"} 1\na_total{rule=\"new\"} 4\n\
                          # HELP g Now.\n# TYPE g gauge\ng 1\n# HELP h Times.\n# TYPE h histogram\nh_sum 0.0\nh_count 1\n\
                          # TYPE process_cpu_seconds counter\nprocess_cpu_seconds_total 1\n# EOF\n";
    const BOTH: &str = "# HELP a Flows.\n# TYPE a counter\na_total{rule=\"x y\"} 6\na_total{rule=\"new\"} 4\n\
                        a_total{rule=\"old\"} 2\n# HELP g Now.\n# TYPE g gauge\ng 1\n# HELP h Times.\n# TYPE h histogram\n\
                        h_sum 1.5\nh_count 4\n# TYPE process_cpu_seconds counter\nprocess_cpu_seconds_total 1\n# EOF\n";

    #[test]
    fn counters_go_on_and_what_is_now_does_not() {
        let first = Carried::of(FIRST);
        assert_eq!(first.added_to(SECOND), BOTH);
        assert_eq!(Carried::default().added_to(SECOND), SECOND);
        let alone = first.added_to("# EOF\n");
        assert!(alone.starts_with("# HELP a Flows.\n# TYPE a counter\na_total{rule=\"old\"} 2\n"), "{alone}");
        assert!(alone.ends_with("h_sum 1.5\n# EOF\n"), "{alone}");
        let mut back = Carried::default();
        back.add(&Carried::of(BOTH).since(&first));
        assert_eq!(Carried::of(&back.added_to(FIRST)), Carried::of(BOTH));
    }
}
