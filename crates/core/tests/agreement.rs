//! From flows to rulings: which node has which role, which attributes are missing, and which functions run at which end.
#![allow(clippy::unwrap_used, reason = "a test that meets an error fails")]

use proptest::collection::btree_set;
use proptest::prelude::*;
use sidetrack_core::agreement::{
    Access, Agreement, Clause, DataSet, End, Facts, FactsError, FactsParts, Node, Opinion, Permit, Question,
    Reasoner, Ruling, Steps, Surplus,
};
use sidetrack_core::area::{AttributeSet, BridgingFunction, Catalogue, Position};
use sidetrack_core::flow::{Flow, Intercept, Protocol};
use sidetrack_core::net::IpNet;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A reasoner that permits only this purpose, with these obligations and this opinion about surpluses.
#[derive(Debug)]
struct Only(&'static str, AttributeSet, Surplus);

impl Reasoner for Only {
    fn opinion(&self, question: &Question<'_>) -> Opinion {
        if question.purpose == self.0 {
            Opinion::Permit(Permit { by: vec!["all".into()], obligations: self.1, surplus: self.2 })
        } else {
            Opinion::Refuse(format!("not for {}", question.purpose))
        }
    }
}

fn function(name: &str, applies: &str, position: Position) -> BridgingFunction {
    BridgingFunction {
        name: name.into(),
        applies: vec![applies.into()],
        cost: 1,
        position,
        ..Default::default()
    }
}

/// Attributes a, e and x. `audit` applies a at the client's end; a pair of functions applies e at both ends.
fn catalogue() -> Catalogue {
    let functions = vec![function("crypt", "e", Position::Last), function("audit", "a", Position::Anywhere)];
    Catalogue::new(["a", "e", "x"], functions).unwrap()
}

fn node(name: &str, net: &str, attributes: &[&str]) -> Node {
    let addresses = [net.parse::<IpNet>().unwrap()].into_iter().collect();
    let attributes = catalogue().set(attributes).unwrap();
    Node { name: name.into(), party: format!("{name}-party").into(), addresses, attributes }
}

fn data(name: &str, node: usize, port: u16, host: &str) -> DataSet {
    let ports = [(port, port)].into_iter().collect();
    DataSet { name: name.into(), node, ports, hosts: vec![host.parse().unwrap()] }
}

fn parts(nodes: Vec<Node>, data: Vec<DataSet>) -> FactsParts {
    let names = |names: &[&str]| names.iter().map(|name| Arc::from(*name)).collect::<Vec<_>>();
    let steps = [
        ("crypt".into(), Steps { client: names(&["encrypt"]), server: names(&["decrypt"]) }),
        ("audit".into(), Steps { client: names(&["count"]), server: names(&["check"]) }),
    ];
    FactsParts { catalogue: catalogue(), steps: steps.into(), nodes, data }
}

fn agreement(nodes: Vec<Node>, data: Vec<DataSet>, obligations: &[&str]) -> Agreement {
    agreement_with(nodes, data, obligations, Surplus::Deny)
}

fn agreement_with(nodes: Vec<Node>, data: Vec<DataSet>, obligations: &[&str], surplus: Surplus) -> Agreement {
    let only = Only("research", catalogue().set(obligations).unwrap(), surplus);
    Agreement::new(Facts::new(parts(nodes, data)).unwrap(), Arc::new(only))
}

fn flow(client: &str, destination: &str) -> Flow {
    Flow {
        protocol: Protocol::Tcp,
        intercept: Intercept::Socks,
        listener: "in".into(),
        client: format!("{client}:40000").parse().unwrap(),
        orig_dst: destination.parse().unwrap(),
        host: None,
        process: None,
        user: None,
    }
}

fn clause(purpose: &str) -> Clause {
    Clause { purpose: purpose.into(), access: Access::Read, at: End::Client }
}

fn denied(ruling: &Ruling) -> &str {
    match ruling {
        Ruling::Deny(why) => why,
        Ruling::Allow(bridging) => panic!("allowed: {bridging:?}"),
    }
}

fn two_nodes() -> Vec<Node> {
    vec![node("lab", "10.2.0.0/24", &["a", "e"]), node("db", "10.1.0.10", &[])]
}

#[test]
fn what_is_not_known_is_denied() {
    let agreement = agreement(two_nodes(), vec![data("pulse", 1, 80, "db.example")], &[]);
    let ask = |client, to, purpose| agreement.ask(&flow(client, to), &clause(purpose));
    assert!(matches!(ask("10.2.0.7", "10.1.0.10:80", "research"), Ruling::Allow(_)));
    assert!(matches!(ask("10.2.0.7", "db.example:80", "research"), Ruling::Allow(_)));
    assert_eq!(
        denied(&ask("10.3.0.7", "10.1.0.10:80", "research")),
        "the client 10.3.0.7 is not a node of the agreement"
    );
    for nowhere in ["10.1.0.10:81", "10.1.0.11:80", "db.example:81", "other.example:80", "10.9.0.1:80"] {
        let ruling = ask("10.2.0.7", nowhere, "research");
        assert_eq!(denied(&ruling), format!("the agreement knows no data at {nowhere}"));
    }
    assert_eq!(denied(&ask("10.2.0.7", "10.1.0.10:80", "sale")), "not for sale");
}

#[test]
fn the_narrowest_network_says_which_node_it_is() {
    let nodes =
        vec![node("ward", "10.0.0.0/8", &[]), node("lab", "10.2.0.0/24", &[]), node("one", "10.2.0.9", &[])];
    let facts = Facts::new(parts(nodes.clone(), vec![])).unwrap();
    let at = |address: &str| facts.node_at(address.parse().unwrap());
    assert_eq!(
        [at("10.9.9.9"), at("10.2.0.8"), at("10.2.0.9"), at("::ffff:10.2.0.9")],
        [Some(0), Some(1), Some(2), Some(2)]
    );
    assert_eq!(at("192.0.2.1"), None);
    let mut twice = nodes;
    twice.push(node("two", "10.2.0.9", &[]));
    assert!(matches!(Facts::new(parts(twice, vec![])), Err(FactsError::SameAddress { .. })));
    let lost = Facts::new(parts(vec![], vec![data("d", 0, 80, "h")]));
    assert_eq!(lost, Err(FactsError::NoNode("d".into())));
}

#[test]
fn functions_stand_at_both_ends_and_enclose_each_other() {
    let agreement = agreement_with(two_nodes(), vec![data("pulse", 1, 80, "db")], &["e"], Surplus::Allow);
    let Ruling::Allow(bridging) = agreement.ask(&flow("10.2.0.7", "10.1.0.10:80"), &clause("research"))
    else {
        panic!("denied")
    };
    // The flow has a channel, so a is not missing; the reasoner obliges to apply e.
    assert_eq!(bridging.functions, [Arc::from("crypt")]);
    let write = Clause { access: Access::Write, ..clause("research") };
    let Ruling::Allow(bridging) = agreement.ask(&flow("10.2.0.7", "10.1.0.10:80"), &write) else {
        panic!("denied")
    };
    // The data comes from the lab, which already has e.
    assert!(bridging.functions.is_empty() && bridging.attributes.is_empty());
}

#[test]
fn a_gap_is_bridged_in_order_or_named() {
    let nodes = vec![node("lab", "10.2.0.0/24", &["a", "e"]), node("db", "10.1.0.10", &["x"])];
    let agreement_of = |nodes, oblige: &[&str]| agreement(nodes, vec![data("pulse", 1, 80, "db")], oblige);
    let gap = agreement_of(nodes.clone(), &[]);
    let Ruling::Allow(bridging) = gap.ask(&flow("10.2.0.7", "10.1.0.10:80"), &clause("research")) else {
        panic!("denied")
    };
    assert_eq!(bridging.at(End::Client), [Arc::from("count"), "encrypt".into()]);
    assert_eq!(bridging.at(End::Server), [Arc::from("decrypt"), "check".into()]);
    let other = agreement_of(vec![nodes[0].clone(), node("db", "10.1.0.10", &[])], &["x"]);
    let ruling = other.ask(&flow("10.2.0.7", "10.1.0.10:80"), &clause("research"));
    assert_eq!(denied(&ruling), "unfeasible: no bridging function can apply 'x'");
    let plan = other.plans("research", Access::Read).next().unwrap();
    assert_eq!((&*plan.from, &*plan.to, plan.channel, plan.missing), ("db", "lab", true, vec!["x".into()]));
}

#[test]
fn a_service_with_several_data_sets_needs_leave_for_all_of_them() {
    #[derive(Debug)]
    struct NotSecret;
    impl Reasoner for NotSecret {
        fn opinion(&self, question: &Question<'_>) -> Opinion {
            match &*question.data.name {
                "secret" => Opinion::Refuse("secret".into()),
                name => Opinion::Permit(Permit { by: vec![name.into()], ..Permit::default() }),
            }
        }
    }
    let ask = |names: [&str; 2]| {
        let data = names.map(|name| data(name, 1, 80, "db")).to_vec();
        let agreement = Agreement::new(Facts::new(parts(two_nodes(), data)).unwrap(), Arc::new(NotSecret));
        agreement.ask(&flow("10.2.0.7", "10.1.0.10:80"), &clause("research"))
    };
    assert_eq!(denied(&ask(["pulse", "secret"])), "secret");
    let Ruling::Allow(bridging) = ask(["pulse", "notes"]) else { panic!("denied") };
    assert_eq!(bridging.by, [Arc::from("notes"), "pulse".into()]);
}

fn some(all: &'static [&'static str]) -> impl Strategy<Value = BTreeSet<&'static str>> {
    btree_set(prop::sample::select(all), 0..=all.len())
}

proptest! {
    /// Eqs. 4 and 5 with obligations, in a second implementation over sets of names.
    #[test]
    fn exactly_what_is_missing_is_applied(
        from in some(&["a", "e", "x"]), to in some(&["a", "e", "x"]), oblige in some(&["a", "e", "x"]),
        is_allowed in any::<bool>(),
    ) {
        let list = |names: &BTreeSet<&'static str>| names.iter().copied().collect::<Vec<_>>();
        let nodes = vec![node("lab", "10.2.0.0/24", &list(&to)), node("db", "10.1.0.10", &list(&from))];
        let word = if is_allowed { Surplus::Allow } else { Surplus::Deny };
        let agreement = agreement_with(nodes, vec![data("pulse", 1, 80, "db")], &list(&oblige), word);
        let channel = from.is_subset(&to);
        let surplus_only = !channel && to.difference(&from).next().is_none();
        let surplus: Vec<_> = from.difference(&to).copied().collect();
        let mut needed = if channel { BTreeSet::new() } else { to };
        needed.extend(&oblige);
        let missing: BTreeSet<_> = needed.difference(&from).copied().collect();
        let ruling = agreement.ask(&flow("10.2.0.7", "10.1.0.10:80"), &clause("research"));
        let plan = agreement.plans("research", Access::Read).next().unwrap();
        prop_assert_eq!(plan.channel, channel);
        prop_assert_eq!(plan.surplus.iter().map(|name| &**name).collect::<Vec<_>>(), surplus);
        prop_assert_eq!(plan.unfeasible, matches!(ruling, Ruling::Deny(_)), "nothing else is said against it");
        prop_assert_eq!(&plan.ruling, &ruling);
        match ruling {
            Ruling::Deny(why) if surplus_only && !is_allowed => {
                prop_assert!(why.starts_with("unfeasible: 'lab' lacks ") && why.contains("(Eq. 4)"), "{}", why);
            }
            Ruling::Deny(why) => {
                prop_assert!(missing.contains("x"), "{}", why);
                prop_assert_eq!(&*why, "unfeasible: no bridging function can apply 'x'");
            }
            Ruling::Allow(bridging) => {
                prop_assert!(!surplus_only || is_allowed, "Eq. 4");
                prop_assert_eq!(bridging.surplus == Surplus::Allow, surplus_only);
                let applied: BTreeSet<_> = bridging.functions.iter().map(|name| if **name == *"crypt" { "e" } else { "a" }).collect();
                prop_assert_eq!(applied, missing);
                prop_assert_eq!(bridging.client.len(), bridging.server.len());
            }
        }
    }
}
