//! Several switches: a flow has entries on each switch of its path, which come and go together.

use crate::model::{Switch, config, entry};
use sidetrack_core::openflow::{
    ControllerConfig, ControllerInput, ControllerOutput, Member, Network, SwitchPorts, Version,
};
use sidetrack_core::shunt::{Both, Cause, Entry, EntryId, Obstacle, PortNumber};
use sidetrack_core::time::Instant;
use std::collections::BTreeMap;
use std::time::Duration;

/// Switches in a row, joined by their ports 20 (to the right) and 21 (to the left). Port 1 of the shunt is on the first
/// one, port 2 on the last one.
struct Row {
    network: Network,
    switches: Vec<Switch>,
    connected: Vec<bool>,
    now: Instant,
    told: Vec<ControllerOutput>,
    /// Messages until a switch disconnects, and which one.
    cut: Option<(usize, usize)>,
}

fn number(number: u8) -> PortNumber {
    PortNumber::new(number).expect("a number")
}

impl Row {
    fn new(count: usize, version: Version) -> Self {
        let member = |at: usize| {
            let mut ports = BTreeMap::new();
            if at == 0 {
                ports.insert(number(1), SwitchPorts { fast: 49, slow: 10 });
            }
            if at == count - 1 {
                ports.insert(number(2), SwitchPorts { fast: 50, slow: 11 });
            }
            let right = (at + 1 < count).then_some((at + 1, 20));
            let left = at.checked_sub(1).map(|left| (left, 21));
            let config = ControllerConfig { ports, ..config(version, 1) };
            Member { name: format!("s{at}"), config, links: right.into_iter().chain(left).collect() }
        };
        let now = Instant::from_millis(1000);
        let mut row = Self {
            network: Network::new((0..count).map(member).collect(), now),
            switches: (0..count).map(|_| Switch::new(version)).collect(),
            connected: vec![false; count],
            now,
            told: Vec::new(),
            cut: None,
        };
        (0..count).for_each(|at| row.connect(at));
        row.told.clear();
        row
    }

    fn connect(&mut self, at: usize) {
        self.connected[at] = true;
        self.network.handle_of(self.now, at, ControllerInput::Connected);
        self.settle();
    }

    fn disconnect(&mut self, at: usize) {
        self.connected[at] = false;
        (self.switches[at].answers, self.switches[at].heard) = (Vec::new(), Vec::new());
        self.network.handle_of(self.now, at, ControllerInput::Disconnected);
    }

    fn tell(&mut self, input: ControllerInput<'_>) {
        self.network.handle(self.now, input);
        self.settle();
    }

    /// Carries messages both ways until there are none.
    fn settle(&mut self) {
        loop {
            while let Some((at, output)) = self.network.poll() {
                match output {
                    ControllerOutput::Send(bytes) if self.connected[at] => self.carry(at, &bytes),
                    ControllerOutput::Send(_) => {}
                    ControllerOutput::Close(_) => self.disconnect(at),
                    other => self.told.push(other),
                }
            }
            let waiting = (0..self.switches.len()).find(|at| !self.switches[*at].answers.is_empty());
            let Some(at) = waiting else { return };
            let answers = std::mem::take(&mut self.switches[at].answers);
            self.network.handle_of(self.now, at, ControllerInput::Bytes(&answers));
        }
    }

    fn carry(&mut self, at: usize, bytes: &[u8]) {
        if let Some((left, which)) = &mut self.cut {
            if *left == 0 {
                let which = *which;
                self.cut = None;
                self.disconnect(which);
            } else {
                *left -= 1;
            }
        }
        if self.connected[at] {
            self.switches[at].hear(bytes);
        }
    }

    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(due) = self.network.deadline().filter(|due| *due <= until) {
            self.now = due.max(self.now + Duration::from_millis(1));
            self.tell(ControllerInput::Tick);
        }
        self.now = until;
    }

    fn flows(&self) -> Vec<usize> {
        self.switches.iter().map(|switch| switch.flows().count()).collect()
    }

    fn take(&mut self) -> Vec<ControllerOutput> {
        let said = std::mem::take(&mut self.told).into_iter();
        said.filter(|one| !matches!(one, ControllerOutput::Ready(..) | ControllerOutput::Note(_))).collect()
    }

    fn count(&mut self, packets: u64) {
        let tables = self.switches.iter_mut().flat_map(|switch| &mut switch.table);
        tables.for_each(|held| held.packets += packets);
    }
}

fn packets(both: Both) -> (u64, u64) {
    (both.to_server.packets, both.to_client.packets)
}

#[test]
fn a_flow_has_entries_on_its_whole_path_and_each_byte_counts_once() {
    for version in Version::ALL {
        for count in 1..=4 {
            let mut row = Row::new(count, version);
            row.tell(ControllerInput::Install(&entry(7, 4000)));
            assert_eq!(row.take(), [ControllerOutput::Installed(EntryId(7))]);
            assert_eq!((row.flows(), row.network.entries()), (vec![2; count], 1));
            row.count(5);
            row.pass(Duration::from_secs(2));
            let last = row.take().pop();
            let Some(ControllerOutput::Counted(EntryId(7), both)) = last else { panic!("{last:?}") };
            assert_eq!(packets(both), (5, 5));
            row.count(1);
            row.tell(ControllerInput::Remove(EntryId(7), Cause::Withdrawn));
            let last = row.take();
            let [ControllerOutput::Gone(EntryId(7), Cause::Withdrawn, both)] = last[..] else {
                panic!("{last:?}")
            };
            assert_eq!((packets(both), row.flows(), row.network.entries()), ((6, 6), vec![0; count], 0));
        }
    }
}

#[test]
fn packets_enter_only_when_all_switches_behind_know_the_flow() {
    // The switch in the middle never confirms: the entries where packets enter are not sent.
    let mut row = Row::new(3, Version::V1_3);
    row.switches[1].manners.stalls = true;
    row.tell(ControllerInput::Install(&entry(1, 4000)));
    assert_eq!((row.flows(), row.take()), (vec![1, 2, 1], vec![]));
    // One of those refuses: nothing stays anywhere, and the reason is told.
    let mut row = Row::new(3, Version::V1_3);
    row.switches[2].manners.room = Some(1);
    row.tell(ControllerInput::Install(&entry(1, 4000)));
    assert_eq!(row.take(), [ControllerOutput::Failed(EntryId(1), Obstacle::Full)]);
    assert_eq!(row.flows(), [0, 0, 0]);
}

#[test]
fn a_blocked_flow_is_dropped_where_it_enters() {
    let mut row = Row::new(3, Version::V1_3);
    row.tell(ControllerInput::Install(&Entry { block: true, ..entry(1, 4000) }));
    assert_eq!(row.take(), [ControllerOutput::Installed(EntryId(1))]);
    assert_eq!(row.flows(), [1, 0, 1]);
}

#[test]
fn what_one_switch_has_lost_leaves_all() {
    let mut row = Row::new(2, Version::V1_3);
    row.tell(ControllerInput::Install(&entry(1, 4000)));
    row.count(3);
    row.take();
    row.disconnect(1);
    row.tell(ControllerInput::Install(&entry(2, 4001)));
    assert_eq!(row.take(), [ControllerOutput::Failed(EntryId(2), Obstacle::Unreachable)]);
    assert_eq!(row.flows(), [2, 2], "entries go on while a switch is away");
    row.switches[1].table.clear();
    row.connect(1);
    let last = row.take().pop();
    let Some(ControllerOutput::Gone(EntryId(1), Cause::Lost, both)) = last else { panic!("{last:?}") };
    assert_eq!((packets(both), row.flows()), ((3, 0), vec![0, 0]), "the lost ones were never counted");
}

#[test]
fn an_idle_direction_takes_the_whole_flow_along() {
    let mut row = Row::new(2, Version::V1_3);
    row.tell(ControllerInput::Install(&entry(1, 4000)));
    row.take();
    let idle = row.switches[0].flows().next().expect("an entry").clone();
    row.switches[0].table.retain(|held| held.cookie != idle.cookie);
    row.switches[0].removed(&idle, 0);
    row.settle();
    let last = row.take();
    assert!(matches!(last[..], [ControllerOutput::Gone(EntryId(1), Cause::Idle, _)]), "{last:?}");
    assert_eq!(row.flows(), [0, 0]);
}

#[test]
fn a_switch_that_goes_at_any_moment_leaves_no_half_path() {
    for which in 0..3 {
        for after in 0..24 {
            let mut row = Row::new(3, Version::V1_3);
            row.cut = Some((after, which));
            row.tell(ControllerInput::Install(&entry(1, 4000)));
            if !row.connected[which] {
                row.connect(which);
            }
            let said = row.take();
            let last = said.last().cloned();
            match last {
                Some(ControllerOutput::Installed(_)) => {
                    assert_eq!(row.flows(), [2, 2, 2], "{which} {after}");
                    // The cut may come while it is removed.
                    row.tell(ControllerInput::Remove(EntryId(1), Cause::Withdrawn));
                    if !row.connected[which] {
                        row.connect(which);
                    }
                    let said = row.take();
                    let ends = said.iter().filter(|one| matches!(one, ControllerOutput::Gone(..))).count();
                    assert_eq!(ends, 1, "{which} {after}: {said:?}");
                }
                Some(ControllerOutput::Failed(..) | ControllerOutput::Gone(..)) => {}
                other => panic!("{which} {after}: {other:?}"),
            }
            assert_eq!((row.flows(), row.network.entries()), (vec![0; 3], 0), "{which} {after}: {said:?}");
        }
    }
}

#[test]
fn a_port_that_no_switch_has_is_told() {
    let mut row = Row::new(2, Version::V1_3);
    let stray = Entry { server_port: number(9), ..entry(1, 4000) };
    row.tell(ControllerInput::Install(&stray));
    assert_eq!(row.take(), [ControllerOutput::Failed(EntryId(1), Obstacle::UnknownPort)]);
}
