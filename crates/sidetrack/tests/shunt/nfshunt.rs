//! A rule set in the layout of NFShunt, Sec. II-B, loaded by the real iptables of either kind, as an administrator of
//! the original has it: its chains, its marks, its policy, and marks of his own in the lower half.

use crate::firewall::{Network, tool};
use crate::flows::{Pair, connect};
use sidetrack::shunt::PathKind;
use sidetrack_core::shunt::ShuntAction;
use sidetrack_sys::bpf::Forwarding;
use sidetrack_testkit::is_root;
use std::io::Write as _;

/// The administrator's own part of the mark.
const OWN: u32 = 0x1234;

/// The chains of the mangle table, in the order in which they stand there.
fn mangle() -> String {
    let mut lines = vec!["*mangle".to_owned()];
    for chain in ["PRE", "PRE_PD_IN", "POST", "POST_PD_OUT", "POLICY"] {
        lines.push(format!(":NFSHUNT_{chain} - [0:0]"));
    }
    let rules = [
        "PREROUTING -j NFSHUNT_PRE",
        "POSTROUTING -j NFSHUNT_POST",
        "NFSHUNT_PRE -m physdev --physdev-in eth9 -j RETURN",
        "NFSHUNT_PRE -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
        "NFSHUNT_PRE -m mark --mark 0x0/0x40000000 -j NFSHUNT_PRE_PD_IN",
        "NFSHUNT_PRE -j RETURN",
        "NFSHUNT_PRE_PD_IN -m physdev --physdev-in to-client -j MARK --set-xmark 0x41000000/0x4f000000",
        "NFSHUNT_PRE_PD_IN -m physdev --physdev-in to-server -j MARK --set-xmark 0x42000000/0x4f000000",
        "NFSHUNT_PRE_PD_IN -j RETURN",
        "NFSHUNT_POST -m physdev ! --physdev-is-bridged -j RETURN",
        "NFSHUNT_POST -m mark --mark 0x0/0x40000000 -j RETURN",
        "NFSHUNT_POST -m mark --mark 0x0/0x20000000 -j NFSHUNT_POST_PD_OUT",
        "NFSHUNT_POST -m mark --mark 0x0/0x10000000 -j NFSHUNT_POLICY",
        "NFSHUNT_POST -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
        "NFSHUNT_POST -j RETURN",
        "NFSHUNT_POST_PD_OUT -m physdev --physdev-is-bridged --physdev-out to-client -j MARK --set-xmark 0x20100000/0x20f00000",
        "NFSHUNT_POST_PD_OUT -m physdev --physdev-is-bridged --physdev-out to-server -j MARK --set-xmark 0x20200000/0x20f00000",
        "NFSHUNT_POST_PD_OUT -j RETURN",
    ];
    lines.extend(rules.iter().map(|rule| format!("-A {rule}")));
    for (port, action) in [(4999, 0), (5000, 1), (5001, 1), (5666, 2)] {
        lines.push(format!(
            "-A NFSHUNT_POLICY -p tcp -m tcp --dport {port} -m conntrack --ctstate RELATED,ESTABLISHED -j MARK --set-xmark \
             0x100{action}0000/0x100f0000"
        ));
    }
    lines.push("-A NFSHUNT_POLICY -j RETURN\nCOMMIT\n".to_owned());
    lines.join("\n")
}

fn works(restore: &'static str) {
    if !is_root() {
        return;
    }
    let network = Network::bare(Forwarding::Bridged);
    let filter = format!("*filter\n-A FORWARD -j MARK --set-xmark {OWN:#x}/0xffff\nCOMMIT\n");
    network.firewall.run(move || tool(restore, "--noflush", &(mangle() + &filter)));
    let shunt = network.start(PathKind::Tc);
    for port in [5000, 5001] {
        let mut pair = connect(&network, "10.0.0.2", port);
        pair.shunted(&shunt);
        let flow = shunt.wait_for(pair.from, |flow| flow.state == "installed");
        assert_eq!(flow.mark, 0x7121_0000 | OWN, "the administrator's half is as he set it");
        Pair::transfer(&mut pair.client, &mut pair.server, 500_000);
        shunt.wait_for(pair.from, |flow| flow.fast.bytes_up > 450_000);
        pair.close();
    }
    let mut ignored = connect(&network, "10.0.0.2", 4999);
    ignored.talk();
    let flow = shunt.wait_for(ignored.from, |flow| flow.mark == 0x7120_0000 | OWN);
    assert_eq!((flow.state.as_str(), flow.installs), ("slow", 0));
    let mut blocked = connect(&network, "10.0.0.2", 5666);
    let _ = blocked.client.write_all(b"word");
    let flow = shunt.wait_for(blocked.from, |flow| flow.state == "installed");
    assert_eq!((flow.action, flow.mark), (ShuntAction::Block, 0x7122_0000 | OWN));
    let mut other = connect(&network, "10.0.0.2", 80);
    other.talk();
    assert!(!shunt.with(move |engine| engine.flows().iter().any(|flow| flow.client == other.from)));
}

#[test]
fn the_originals_rule_set_works_by_iptables_nft() {
    works("iptables-nft-restore");
}

#[test]
fn the_originals_rule_set_works_by_iptables_legacy() {
    works("iptables-legacy-restore");
}
