//! The effect of a reload on flows with functions.

use crate::live::{Ledger, LiveFlow};
use sidetrack_core::flow::EndReason;
use sidetrack_core::function::{ChainSpec, OnChange};
use sidetrack_core::policy::{Action, Policy};
use std::sync::Arc;

/// Ends flows whose rule has another chain now, if the old or the new rule asks for it.
pub(super) fn cut_changed(policy: &Policy, ledgers: &[Arc<Ledger>]) {
    for flow in ledgers.iter().flat_map(|ledger| ledger.snapshot()) {
        if is_cut(policy, &flow) {
            flow.end(EndReason::ChainChanged);
        }
    }
}

fn is_cut(policy: &Policy, flow: &LiveFlow) -> bool {
    let Some(decided) = flow.decided() else { return false };
    let Some(name) = decided.rule() else { return false };
    let new = policy.rules().iter().find(|rule| rule.name == *name).and_then(|rule| chain(&rule.action));
    let old = decided.action().and_then(chain);
    let functions = |chain: Option<&Arc<ChainSpec>>| chain.map(|chain| chain.functions.clone());
    let cuts = |chain: Option<&Arc<ChainSpec>>| chain.is_some_and(|chain| chain.on_change == OnChange::Cut);
    (cuts(old) || cuts(new)) && functions(old) != functions(new)
}

fn chain(action: &Action) -> Option<&Arc<ChainSpec>> {
    match action {
        Action::Carry(carry) => carry.chain.as_ref(),
        Action::Deny => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::live::Decided;
    use sidetrack_core::flow::FlowId;
    use sidetrack_core::policy::{Decision, Seen};

    fn policy(rule: &str) -> Arc<Policy> {
        let text = format!(
            "version = 1\ndefault = 'deny'\n[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:1080'\n\
             [[rule]]\nname = 'all'\ncarrier = 'direct'\n{rule}\n[function.a]\nkind = 'count'\n[function.b]\nkind = 'count'\n"
        );
        Config::from_text("test.toml", &text).unwrap_or_else(|error| panic!("{}", error.render(false))).policy
    }

    /// Whether a flow that was decided under the old rule is ended by the new one.
    fn cut(old: &str, new: &str) -> bool {
        let live = Arc::new(LiveFlow::new(FlowId(1)));
        let flow = sidetrack_core::flow::Flow {
            protocol: sidetrack_core::flow::Protocol::Tcp,
            intercept: sidetrack_core::flow::Intercept::Socks,
            listener: "in".into(),
            client: "127.0.0.1:1".parse().expect("an address"),
            orig_dst: "192.0.2.1:80".parse().expect("a destination"),
            host: None,
            process: None,
            user: None,
        };
        let Decision::Verdict(verdict) = policy(old).decide(&flow, Seen::Nothing) else {
            panic!("a verdict")
        };
        live.decide(Decided::new(flow, Some(verdict)));
        let ledger = Arc::new(Ledger::default());
        ledger.enter(live.clone());
        cut_changed(&policy(new), &[ledger]);
        live.ending() == Some(EndReason::ChainChanged)
    }

    #[test]
    fn flows_are_cut_where_the_rule_says_so_and_its_chain_changed() {
        let (a, cut_a) = ("chain = ['a']", "chain = ['a']\non_chain_change = 'cut'");
        let cut_ab = "chain = ['a', 'b']\non_chain_change = 'cut'";
        assert!(!cut(a, "chain = ['b']") && !cut(cut_a, cut_a) && !cut(cut_a, a));
        assert!(
            cut(cut_a, cut_ab)
                && cut(cut_a, "chain = ['b']")
                && cut(a, cut_ab)
                && cut(cut_a, "")
                && cut("", cut_a)
        );
    }
}
