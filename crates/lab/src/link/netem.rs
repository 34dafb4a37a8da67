//! Links by `tc netem` (tc-netem(8)), on a separate host between the two nodes. On the sending host, netem would drop
//! whole super-frames, and TCP would be told about it.

use anyhow::{Context, Result};

use super::conditions::{Conditions, Loss};
use super::emulator::Way;
use crate::topology::{self, Link, Node};

/// Length of a netem queue in frames without a rate: 400 ms of 2.5 Gbit/s.
const LINE_FRAMES: u64 = 85_000;
/// Bytes of a full frame: netem counts its queues in frames.
const FULL_FRAME_BYTES: u64 = 1514;

/// A bridge between two veth pairs, with a netem queue at each end.
#[derive(Debug)]
pub struct NetemLink {
    middle: Node,
}

/// Returns true if this kernel has netem; loads its module if necessary.
///
/// # Errors No node can be made for the trial.
pub fn is_available(launcher: &std::path::Path) -> Result<bool> {
    let node = Node::new("netem-probe", launcher)?;
    Ok(node.run("tc", &["qdisc", "replace", "dev", "lo", "root", "netem", "delay", "1ms"]).is_ok())
}

impl NetemLink {
    /// Joins two nodes as [`topology::link`] does, over a host in the middle.
    ///
    /// # Errors
    /// `ip` or `tc` refuses, for example because the kernel has no bridge.
    pub fn join(a: &Node, b: &Node, subnet: u8, conditions: [Conditions; 2]) -> Result<(Self, Link)> {
        let middle = Node::new(&format!("wire{subnet}"), a.launcher())?;
        let interface = format!("link{subnet}");
        middle.run("ip", &["link", "add", "name", "bridge", "type", "bridge", "mcast_snooping", "0"])?;
        for (node, end) in [(a, "a"), (b, "b")] {
            topology::veth(node, &interface, &middle, end)?;
            // Without offloads: super-frames would be lost as a whole.
            node.run("ip", &["link", "set", "dev", &interface, "gso_max_segs", "1"])?;
            middle.run("ip", &["link", "set", "dev", end, "master", "bridge"])?;
            middle.sysctl(&format!("net/ipv6/conf/{end}/disable_ipv6"), "1")?;
        }
        middle.sysctl("net/ipv6/conf/bridge/disable_ipv6", "1")?;
        for interface in ["bridge", "a", "b"] {
            middle.run("ip", &["link", "set", "dev", interface, "up"])?;
        }
        let link = topology::address(a, b, &interface, subnet)?;
        let netem = Self { middle };
        for (way, conditions) in Way::BOTH.into_iter().zip(conditions) {
            netem.set(way, conditions)?;
        }
        Ok((netem, link))
    }

    /// Changes one direction.
    ///
    /// # Errors
    /// `tc` refuses.
    pub fn set(&self, way: Way, conditions: Conditions) -> Result<()> {
        // Frames to the second node leave by the interface on its side.
        let interface = match way {
            Way::Forth => "b",
            Way::Back => "a",
        };
        let arguments = arguments(&conditions);
        let mut command = vec!["qdisc", "replace", "dev", interface, "root", "netem"];
        command.extend(arguments.iter().map(String::as_str));
        self.middle.run("tc", &command).map(|_| ()).context("netem refuses the conditions")
    }
}

/// Returns the arguments of tc-netem(8) for `conditions`.
fn arguments(conditions: &Conditions) -> Vec<String> {
    let percent = |share: f64| format!("{}%", share * 100.0);
    let micros = |time: std::time::Duration| format!("{}us", time.as_micros());
    let frames = conditions.rate.map_or(LINE_FRAMES, |rate| {
        let under_way =
            rate.bits_per_second / 8 * u64::try_from(conditions.delay.as_millis()).unwrap_or(0) / 1000;
        (rate.queue_bytes + under_way).div_ceil(FULL_FRAME_BYTES).max(1)
    });
    let mut words = vec!["limit".to_owned(), frames.to_string()];
    if !conditions.delay.is_zero() || !conditions.jitter.is_zero() {
        words.extend(["delay".to_owned(), micros(conditions.delay)]);
        if !conditions.jitter.is_zero() {
            words.push(micros(conditions.jitter));
        }
    }
    let loss = if conditions.is_up { conditions.loss } else { Loss::Bernoulli(1.0) };
    match loss {
        Loss::None => {}
        Loss::Bernoulli(probability) => {
            words.extend(["loss".to_owned(), "random".to_owned(), percent(probability)]);
        }
        Loss::Burst { enter, leave } => {
            words.extend(["loss".to_owned(), "gemodel".to_owned(), percent(enter), percent(leave)]);
        }
    }
    if conditions.duplicate > 0.0 {
        words.extend(["duplicate".to_owned(), percent(conditions.duplicate)]);
    }
    if conditions.reorder > 0.0 {
        words.extend(["reorder".to_owned(), percent(conditions.reorder)]);
    }
    if let Some(rate) = conditions.rate {
        words.extend(["rate".to_owned(), format!("{}bit", rate.bits_per_second)]);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::Rate;
    use std::time::Duration;

    #[test]
    fn conditions_are_said_in_the_words_of_tc() {
        let said = |conditions: &Conditions| arguments(conditions).join(" ");
        assert_eq!(said(&Conditions::default()), "limit 85000");
        let five = Conditions::delayed(Duration::from_millis(5));
        assert_eq!(
            said(&Conditions { loss: Loss::Bernoulli(0.005), ..five }),
            "limit 85000 delay 5000us loss random 0.5%"
        );
        let burst = Loss::Burst { enter: 0.01, leave: 0.2 };
        assert_eq!(
            said(&Conditions { loss: burst, ..Conditions::default() }),
            "limit 85000 loss gemodel 1% 20%"
        );
        let rate = Some(Rate { bits_per_second: 10_000_000, queue_bytes: 60_000 });
        // 60,000 bytes wait and 6,250 are on their way.
        assert_eq!(said(&Conditions { rate, ..five }), "limit 44 delay 5000us rate 10000000bit");
        assert_eq!(said(&Conditions { is_up: false, ..five }), "limit 85000 delay 5000us loss random 100%");
        let both = Conditions { duplicate: 0.01, reorder: 0.25, ..five };
        assert_eq!(said(&both), "limit 85000 delay 5000us duplicate 1% reorder 25%");
    }
}
