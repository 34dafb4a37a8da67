//! Branches: the arm that the flow or its first bytes choose, under every cut, and without a copy.

use super::drive::{Driven, cut, numbers, stages};
use super::toy::Toy;
use sidetrack_core::chain::{Chain, Offered};
use sidetrack_core::flow::{Flow, Intercept, Protocol, Side};
use sidetrack_core::function::graph::{self, Graph, Way};
use sidetrack_core::function::{
    ArmSpec, Branch, BranchSpec, Choice, Directions, End, FunctionKind, FunctionSpec, Interest, Named,
    Records, Replace, Replacement, Replacements, Stage, Step, Stop,
};
use sidetrack_core::policy::{Condition, Match};
use sidetrack_core::time::Instant;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

fn flow() -> Flow {
    Flow {
        protocol: Protocol::Tcp,
        intercept: Intercept::Redirect,
        listener: "test".into(),
        client: "192.0.2.1:1000".parse().unwrap(),
        orig_dst: "192.0.2.2:80".parse::<std::net::SocketAddr>().unwrap().into(),
        host: None,
        process: None,
        user: None,
    }
}

fn function(name: &str, kind: FunctionKind) -> Arc<FunctionSpec> {
    Arc::new(FunctionSpec { name: name.into(), kind })
}

fn arm(name: &str, hosts: &[&str], prefixes: &[&str], functions: &[&str]) -> ArmSpec {
    let patterns: Vec<_> = hosts.iter().map(|host| host.parse().unwrap()).collect();
    let conditions = (!patterns.is_empty()).then_some(Condition::Host(patterns));
    ArmSpec {
        name: name.into(),
        matcher: Match::new(conditions.into_iter().collect()),
        prefixes: prefixes.iter().map(|prefix| prefix.as_bytes().into()).collect(),
        functions: functions.iter().map(|name| function(name, FunctionKind::Count)).collect(),
    }
}

fn replace(find: &str, with: &str, directions: Directions) -> Box<dyn Stage> {
    let (find, replace) = (find.as_bytes().to_vec(), with.as_bytes().to_vec());
    Box::new(Replace::new(Replacements::new(&[Replacement { find, replace, directions }]).unwrap()))
}

/// Makes the stage of a branch, whose functions are made by name.
fn branch(spec: &Arc<BranchSpec>, made: fn(&str) -> Box<dyn Stage>) -> Box<dyn Stage> {
    let flow = flow();
    let Choice::Open(open) = spec.choose(&flow) else { panic!("its first bytes choose") };
    let arms = spec.clone();
    let make = move |arm: Option<usize>, _| -> Result<Named, Stop> {
        let functions = arm.iter().flat_map(|arm| &arms.arms[*arm].functions);
        Ok(functions.map(|function| (function.name.clone(), made(&function.name))).collect())
    };
    Box::new(Branch::new(spec.clone(), &open, &flow, Box::new(make)))
}

/// The stages of the tests, by name.
fn made(name: &str) -> Box<dyn Stage> {
    match name {
        "web" => replace("old", "newer", Directions::Both),
        "plain" => replace("hat", "cap", Directions::Up),
        "seal" => Box::new(Records::new(Toy::shared(1, 2), End::Encrypt)),
        "open" => Box::new(Records::new(Toy::shared(1, 3), End::Decrypt)),
        "inner" => branch(&Arc::new(BranchSpec { arms: vec![arm("x", &[], &["GET /x"], &["plain"])] }), made),
        other => panic!("no stage {other}"),
    }
}

fn spec() -> Arc<BranchSpec> {
    Arc::new(BranchSpec {
        arms: vec![
            arm("sealed", &[], &["SEAL", "SEA-"], &["seal", "open"]),
            arm("web", &["*.example"], &[], &["web"]),
            arm("inner", &[], &["GET "], &["inner"]),
            arm("straight", &[], &["QUIT"], &[]),
            arm("rest", &[], &[], &["plain"]),
        ],
    })
}

/// What a client says, and what comes out at the other end.
const CASES: [(&str, &str); 7] = [
    ("SEAL an old hat", "SEAL an old hat"),
    (
        "GET / HTTP/1.1\r\nHost: a.example\r\n\r\nold hat",
        "GET / HTTP/1.1\r\nHost: a.example\r\n\r\nnewer hat",
    ),
    ("GET /x HTTP/1.1\r\nHost: other\r\n\r\nold hat", "GET /x HTTP/1.1\r\nHost: other\r\n\r\nold cap"),
    ("GET /y HTTP/1.1\r\nHost: other\r\n\r\nold hat", "GET /y HTTP/1.1\r\nHost: other\r\n\r\nold hat"),
    ("QUIT old hat", "QUIT old hat"),
    ("SEAoth old hat", "SEAoth old cap"),
    ("S", "S"),
];

#[test]
fn under_every_cut_the_same_arm_is_taken() {
    for (said, expected) in CASES {
        for first in 1..=said.len() {
            for second in [1, 3, said.len()] {
                let mut driven =
                    Driven::new(vec![branch(&spec(), made), replace("?", "!", Directions::Both)]);
                let (head, rest) = said.as_bytes().split_at(first);
                assert!(driven.offer(Side::Client, head).unwrap());
                for part in rest.chunks(second) {
                    assert!(driven.offer(Side::Client, part).unwrap(), "{said} {first} {second}");
                }
                assert!(driven.end(Side::Client).unwrap() && driven.offer(Side::Server, b"old?").unwrap());
                assert!(driven.end(Side::Server).unwrap());
                let back = if said.contains("a.example") { "newer!" } else { "old!" };
                assert_eq!(
                    String::from_utf8_lossy(&driven.out[0]),
                    expected,
                    "cut at {first}, then {second}"
                );
                assert_eq!(String::from_utf8_lossy(&driven.out[1]), back, "cut at {first}, then {second}");
            }
        }
    }
}

#[test]
fn any_order_of_both_sides_loses_no_byte() {
    for seed in 0..400 {
        let mut next = numbers(seed);
        let (said, expected) = CASES[next(6) as usize];
        let text = format!("{said}{}", "-".repeat(next(70_000) as usize));
        let mut driven = Driven::new(vec![replace("?", "!", Directions::Both), branch(&spec(), made)]);
        driven.take_max = 1 + next(5000) as usize;
        let mut up = cut(text.as_bytes(), 1 + next(3000) as usize, &mut next);
        let mut down = cut(b"the answer?", 4, &mut next);
        let speaks_first = next(4) == 0;
        while !up.is_empty() || !down.is_empty() {
            let from_client = down.is_empty() || (!up.is_empty() && !speaks_first && next(2) == 0);
            let (from, part) =
                if from_client { (Side::Client, up.pop_front()) } else { (Side::Server, down.pop_front()) };
            assert!(driven.offer(from, &part.unwrap()).unwrap(), "seed {seed}: stuck");
        }
        assert!(driven.end(Side::Server).unwrap() && driven.end(Side::Client).unwrap(), "seed {seed}");
        assert_eq!(driven.out[1], b"the answer!", "seed {seed}");
        // Bytes of the server that come first leave nothing to choose by. Otherwise the wait may have ended it.
        let mut choices = [said.to_owned(), expected.to_owned(), said.replace("hat", "cap")];
        choices.iter_mut().for_each(|choice| choice.push_str(&text[said.len()..]));
        let out = String::from_utf8(driven.out[0].clone()).unwrap();
        assert!(choices.contains(&out), "seed {seed}: {said} became {}", &out[..out.len().min(60)]);
    }
}

#[test]
fn after_a_second_or_when_a_side_ends_what_is_unknown_does_not_fit() {
    let mut driven = Driven::new(vec![branch(&spec(), made)]);
    assert_eq!(driven.chain.handle(driven.now, Side::Client, b"SEA").unwrap(), Offered::Inside);
    assert_eq!(driven.chain.ready(Side::Client), 0, "held: it may be one of two arms");
    let due = driven.chain.deadline().unwrap();
    assert!(due <= Instant::ZERO + Duration::from_secs(2));
    driven.chain.advance(due, Side::Client).unwrap();
    assert_eq!(driven.chain.take(Side::Client, usize::MAX), b"SEA");
    assert_eq!(driven.chain.deadline(), None);
    assert_eq!(format!("{:?}", driven.chain), "[\"plain\"]", "the arm for all others");

    let mut driven = Driven::new(vec![branch(&spec(), made)]);
    assert!(driven.end(Side::Server).unwrap() && driven.end(Side::Client).unwrap());
    assert_eq!(format!("{:?}", driven.chain), "[\"plain\"]");
}

#[test]
fn a_flow_whose_address_is_enough_needs_no_byte() {
    let from = |net: &str| Condition::From([net.parse().unwrap()].into_iter().collect());
    let mut by_net = arm("near", &[], &[], &[]);
    by_net.matcher = Match::new(vec![from("192.0.2.0/24")]);
    let mut far = arm("far", &[], &["GET "], &[]);
    far.matcher = Match::new(vec![from("198.51.100.0/24")]);
    let arms = |arms: &[&ArmSpec]| BranchSpec { arms: arms.iter().map(|arm| (*arm).clone()).collect() };
    let rest = arm("rest", &[], &[], &[]);
    assert_eq!(arms(&[&far, &by_net, &rest]).choose(&flow()), Choice::Arm(Some(1)));
    assert_eq!(arms(&[&far]).choose(&flow()), Choice::Arm(None));
    let host = arm("host", &["a.example"], &[], &[]);
    assert_eq!(arms(&[&far, &host, &by_net, &rest]).choose(&flow()), Choice::Open(vec![1, 2]));
    let mut named = flow();
    named.host = Some("a.example".parse().unwrap());
    assert_eq!(arms(&[&far, &host, &by_net]).choose(&named), Choice::Arm(Some(1)));
    for (outer, inner, covers) in [
        (&rest, &host, true),
        (&host, &rest, false),
        (&arm("a", &[], &["GE"], &[]), &arm("b", &[], &["GET", "GEX"], &[]), true),
        (&arm("a", &[], &["GET"], &[]), &arm("b", &[], &["GE"], &[]), false),
        (&arm("a", &[], &["GET"], &[]), &rest, false),
        (&arm("a", &["*.example"], &[], &[]), &arm("b", &["a.example"], &["X"], &[]), true),
    ] {
        assert_eq!(outer.covers(inner), covers, "{} {}", outer.name, inner.name);
    }
}

/// Counts the calls whose bytes lie at the place in the first number, and passes them.
struct Where(Arc<[AtomicUsize; 2]>);

impl Stage for Where {
    fn interest(&self, _: Side) -> Interest {
        Interest::Bytes
    }

    fn handle(&mut self, _: Instant, _: Side, bytes: &[u8], _: &mut Vec<u8>) -> Step {
        assert_eq!(bytes.as_ptr() as usize, self.0[0].load(Relaxed), "the bytes lie elsewhere");
        self.0[1].fetch_add(1, Relaxed);
        Step::Pass(bytes.len())
    }
}

#[test]
fn payload_is_looked_at_where_it_lies() {
    let seen: Arc<[AtomicUsize; 2]> = Arc::default();
    let looks = |seen: &Arc<_>| -> Box<dyn Stage> { Box::new(Where(Arc::clone(seen))) };
    let inside = seen.clone();
    let spec = Arc::new(BranchSpec { arms: vec![arm("web", &["*.example"], &["GET "], &["a", "b"])] });
    let Choice::Open(open) = spec.choose(&flow()) else { panic!("open") };
    let make = move |_: Option<usize>, host: Option<sidetrack_core::flow::HostName>| -> Result<Named, Stop> {
        assert_eq!(host.unwrap().as_str(), "w.example", "the functions of the arm know the host");
        Ok(stages(vec![looks(&inside), looks(&inside)]))
    };
    let branch: Box<dyn Stage> = Box::new(Branch::new(spec.clone(), &open, &flow(), Box::new(make)));
    let mut chain = Chain::new(stages(vec![looks(&seen), branch, looks(&seen)]), Instant::ZERO).unwrap();
    let frames = [b"GET / HTTP/1.1\r\nHost: w.example\r\n\r\n".to_vec(), vec![7; 1460], vec![8; 60_000]];
    for frame in &frames {
        seen[0].store(frame.as_ptr() as usize, Relaxed);
        let offered = chain.handle(Instant::ZERO, Side::Client, frame).unwrap();
        assert_eq!(offered, Offered::Unchanged, "nothing was copied");
        assert_eq!(seen[1].swap(0, Relaxed), 4, "four functions, one place");
    }
}

#[test]
fn the_drawing_shows_branches_and_where_they_merge() {
    let branch = function(
        "by-kind",
        FunctionKind::Branch(Arc::new(BranchSpec {
            arms: vec![arm("web", &["*.example"], &["GET "], &["a", "b"]), arm("bye", &[], &["Q\"T"], &[])],
        })),
    );
    let functions = vec![branch, function("tail", FunctionKind::Count)];
    let way = Way { start: "rule r: all flows", functions: &functions, end: "direct" };
    let graph = Graph::new(&[way]);
    assert_eq!((graph.nodes().len(), graph.edges().len()), (6, 7));
    // The start and the end, and four functions. `tail` has three edges that come in.
    let tail = graph.nodes().iter().position(|node| node.label.starts_with("tail")).unwrap();
    assert_eq!(graph.edges().iter().filter(|edge| edge.to == tail).count(), 3);
    assert_eq!(
        graph::to_text(&[way]),
        "rule r: all flows\n  by-kind (branch)\n  | web: host *.example, begins with \"GET \"\n      a (count)\n      \
         b (count)\n  | bye: begins with \"Q\\\"T\": straight on\n  | otherwise: straight on\n  tail (count)\n  => direct\n"
    );
    let dot = graph.to_dot();
    assert!(dot.contains("n1 [shape=diamond, label=\"by-kind (branch)\"];"), "{dot}");
    assert!(dot.contains("[label=\"bye: begins with \\\"Q\\\\\\\"T\\\"\"];"), "{dot}");
    let mermaid = graph.to_mermaid();
    assert!(
        mermaid.starts_with("flowchart LR\n") && mermaid.contains("n1{\"by-kind (branch)\"}"),
        "{mermaid}"
    );
    assert!(mermaid.contains("-->|\"otherwise\"| n"), "{mermaid}");
}

/// The numbers of an attribute, in the order of the elements that have it.
fn values(svg: &str, element: &str, attribute: &str) -> Vec<usize> {
    let of = |line: &str| {
        let value = line.split(&format!(" {attribute}=\"")).nth(1)?.split('"').next()?;
        value.parse().ok()
    };
    svg.lines().filter(|line| line.starts_with(&format!("<{element} "))).filter_map(of).collect()
}

#[test]
fn the_picture_has_layers_and_nothing_overlaps() {
    let web = arm("web", &["*.example"], &["GET "], &["a", "b"]);
    let arms = vec![web, arm("bye", &[], &["Q<T"], &["c"]), arm("on", &[], &["X"], &[])];
    let branch = function("by-kind", FunctionKind::Branch(Arc::new(BranchSpec { arms })));
    let functions = vec![branch, function("tail", FunctionKind::Count)];
    let rule = format!("rule r: {}", "host *.example, ".repeat(6));
    let way = Way { start: &rule, functions: &functions, end: "socks5://gateway:1080" };
    let svg = Graph::new(&[way, Way { start: "rule s: all flows", functions: &[], end: "direct" }]).to_svg();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
    assert!(svg.contains("Q&lt;T") && !svg.contains("Q<T"), "{svg}");
    let [x, y, width, height] = ["x", "y", "width", "height"].map(|name| values(&svg, "rect", name));
    assert_eq!(x.len(), 9);
    // Both starts are in one column, and the branch merges behind its longest arm.
    assert_eq!(x[0], x[7]);
    let columns = [0, 1, 2, 3, 2, 4, 5].map(|layer| x[0] + layer * (x[1] - x[0]));
    assert_eq!(x[..7], columns);
    for one in 0..x.len() {
        for other in 0..one {
            let apart = x[one] + width[one] <= x[other]
                || x[other] + width[other] <= x[one]
                || y[one] + height[one] <= y[other]
                || y[other] + height[other] <= y[one];
            assert!(apart, "{one} {other}: {svg}");
        }
    }
    // Edges lead to the right, and those that pass a layer cross no node there.
    let paths: Vec<_> = svg.lines().filter(|line| line.starts_with("<path class=\"edge\"")).collect();
    assert_eq!(paths.len(), 10, "{svg}");
    for path in paths {
        let line = path.split(" d=\"M").nth(1).unwrap().split('"').next().unwrap();
        let words = line.replace(['L', 'C'], " ");
        let numbers: Vec<usize> = words.split(' ').map(|word| word.parse().unwrap()).collect();
        let mut last = 0;
        for point in numbers.chunks(2) {
            let [at_x, at_y] = point else { panic!("{path}") };
            assert!(*at_x >= last, "{path}");
            last = *at_x;
            let is_in = |node: usize| {
                x[node] < *at_x
                    && *at_x < x[node] + width[node]
                    && y[node] < *at_y
                    && *at_y < y[node] + height[node]
            };
            assert!(!(0..x.len()).any(is_in), "{path}");
        }
    }
    let size = |name: &str| values(&svg, "svg", name)[0];
    assert!(
        (0..x.len())
            .all(|node| x[node] + width[node] < size("width") && y[node] + height[node] < size("height"))
    );
}
