//! A switch with two controllers: the shunt, and another one.

use crate::firewall::{Network, SHUNT};
use crate::flows::{Pair, connect};
use crate::switch::{OpenVSwitch, network, settings};
use sidetrack::config::ShuntSwitch;
use sidetrack::shunt::{FastPath as _, Path, SwitchPath};
use sidetrack_core::openflow::Version;
use sidetrack_core::shunt::ShuntAction;
use sidetrack_testkit::{LIMIT, is_root};
use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Instant;

pub(crate) const CONTROL: u16 = 6653;
pub(crate) const OTHER: u16 = 6654;
/// The shunt's table.
const TABLE: u8 = 3;
/// What the other controller has on the switch.
const OTHERS: &str = "cookie=0x99";

fn ours() -> ShuntSwitch {
    let switch = settings(&[Version::V1_3], CONTROL);
    ShuntSwitch { master: true, shared: true, table: TABLE, clear_at_start: true, ..switch }
}

/// The other controller: it makes itself master, and installs nothing.
pub(crate) struct Other {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Other {
    pub(crate) fn start(network: &Network) -> Self {
        let switch = settings(&[Version::V1_3], OTHER);
        let switch = ShuntSwitch { pairs: false, master: true, shared: true, ..switch };
        let mut path = network.firewall.run(move || SwitchPath::start(&switch).expect("it listens"));
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            while stopped.try_recv() == Err(TryRecvError::Empty) {
                path.tend().expect("it goes on");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.stop = None;
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()) || std::thread::panicking());
    }
}

/// Waits until the switch sees the controller with this port in this role.
pub(crate) fn wait_for_role(switch: &OpenVSwitch, port: u16, role: &str) {
    let begun = Instant::now();
    loop {
        let said = switch.vsctl("--bare --columns=target,role list controller");
        let words: Vec<_> = said.split_whitespace().collect();
        if words.windows(2).any(|pair| pair[0].ends_with(&format!(":{port}")) && pair[1] == role) {
            return;
        }
        assert!(begun.elapsed() < LIMIT, "{port} never gets {role}: {said}");
    }
}

#[test]
fn the_shunt_is_master_beside_another_controller_and_leaves_its_entries_alone() {
    if !is_root() {
        return;
    }
    let (network, switch) = network();
    // The switch forgets its entries when it gets its first controller. No controller listens there yet.
    switch.connect(OTHER);
    // The other controller's pipeline leads packets to the shunt's table.
    switch.ofctl("add-flow", &format!("{OTHERS},table=0,priority=1,actions=resubmit(,{TABLE})"));
    let shunt = network.start(Path::OpenFlow(ours()));
    switch.connect_to(&[CONTROL, OTHER]);
    wait_for_role(&switch, CONTROL, "master");
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    let entries = switch.ofctl("dump-flows", "");
    let flows: Vec<_> = entries.lines().filter(|line| line.contains("priority=33000")).collect();
    assert!(flows.len() == 2 && flows.iter().all(|line| line.contains("table=3")), "{entries}");
    assert!(entries.contains(OTHERS), "removing our entries at the start left it: {entries}");
    // Another one becomes the master: the switch refuses what we want, and is claimed again.
    let other = Other::start(&network);
    wait_for_role(&switch, OTHER, "master");
    wait_for_role(&switch, CONTROL, "slave");
    let mut second = connect(&network, "10.0.0.2", SHUNT + 1);
    assert!(shunt.pin(second.from, second.to, ShuntAction::Shunt));
    second.shunted(&shunt);
    Pair::transfer(&mut second.client, &mut second.server, 300_000);
    shunt.wait_for(second.from, |flow| flow.fast.bytes_up > 250_000);
    wait_for_role(&switch, CONTROL, "master");
    pair.talk();
    assert!(switch.ofctl("dump-flows", "").contains(OTHERS));
    drop(other);
}
