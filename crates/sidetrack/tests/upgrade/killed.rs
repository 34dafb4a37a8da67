//! SIGKILL at each step of an upgrade: to the old process, to the new one, and to both. Afterwards one of them serves, or nothing is
//! left and a restart succeeds.

use crate::node::peers::{Client, Server, visit};
use crate::node::traces::Traces;
use crate::node::{Up, send};
use crate::scene::{Keys, overlay_address};
use crate::state::{RESOLVER, ask, resolved};
use crate::{Started, Upgrade, ends, runs};
use rustix::process::Signal;
use sidetrack::app::{Act, Phase, Side, Step};
use sidetrack_common::exchange;
use sidetrack_core::upgrade::Kind;
use sidetrack_testkit::{eventually, in_namespace, ip};
use std::net::{SocketAddr, UdpSocket};

/// Names the file that stops a process at a step.
pub(crate) const VARIABLE: &str = "SIDETRACK_TEST_STEP";
pub(crate) const FILE: &str = "step";
const TOP: &str = "default = \"deny\"\n";

/// Where services ask for paths.
const SERVICES: &str = "127.0.0.1:4000";

/// What is around the node: servers, and another node of its overlay.
struct Around {
    server: Server,
    /// One that the node's rules do not lead to, for what the other node delivers.
    behind: Server,
    /// It answers nothing, and does not refuse.
    silent: UdpSocket,
    keys: Keys,
    far: Up,
}

impl Around {
    fn new() -> Self {
        let keys = Keys::new(&["near", "far"]);
        let deliver = "[[overlay.deliver]]\nto = \"127.0.0.0/8\"\n";
        let far = Up::start("default = \"direct\"\n", &(keys.section("far", &[], true) + deliver));
        let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
        let [server, behind] = ["127.0.0.1"; 2].map(Server::start);
        Self { server, behind, silent, keys, far }
    }
}

/// Rules, a port, an association of UDP, names, paths and an overlay, so that every part is sent.
fn tables(around: &Around) -> String {
    let server = around.server.address;
    let datagrams = around.silent.local_addr().expect("bound");
    let far = [("far", overlay_address(&around.far))];
    let overlay = format!(
        "[[listen]]\nname = \"over\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
         [[rule]]\nname = \"over\"\ncarrier = \"overlay:far\"\n[rule.match]\nlistener = \"over\"\n",
        around.behind.address
    );
    let tables = format!(
        "[limits]\ndrain_ms = 0\n[[listen]]\nname = \"out\"\nkind = \"redirect\"\ndst = \"127.0.0.1\"\nports = {port}\n\
         [[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n\
         [[listen]]\nname = \"datagrams\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"{datagrams}\"\n\
         [wire]\npins = \"none\"\n\
         [shunt]\nfast_path = \"none\"\nforwarding = \"routed\"\n\
         [[shunt.port]]\nnumber = 1\ninterface = \"one\"\n[[shunt.port]]\nnumber = 2\ninterface = \"two\"\n\
         [dns]\naddress = \"{RESOLVER}\"\nfrom = [\"127.0.0.0/8\"]\nservers = [\"127.0.0.1:9\"]\n\
         [outgoing]\nlisten = \"{SERVICES}\"\nports = \"5001-5003\"\n\
         [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n",
        port = server.port()
    );
    // The first rule that fits decides.
    overlay + &tables + &around.keys.section("near", &far, true)
}

/// Which processes are killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Old,
    New,
    Both,
}

/// Who serves afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    Old,
    New,
    Neither,
}

/// The steps of an upgrade that succeeds, and of one that is taken back. The rest of all steps cannot happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    Forward,
    Back,
    Never,
}

/// When a part is sent, and by which process first.
fn course(kind: Kind) -> (Course, Side) {
    match kind {
        Kind::Checked | Kind::Ready | Kind::Serving | Kind::Settled => (Course::Forward, Side::New),
        Kind::Listener
        | Kind::Window
        | Kind::Keeper
        | Kind::Offered
        | Kind::Go
        | Kind::Stay
        | Kind::Flow
        | Kind::FlowsDone
        | Kind::Wire
        | Kind::Shunt
        | Kind::Names
        | Kind::Path
        | Kind::Association
        | Kind::Overlay
        | Kind::Session
        | Kind::SessionsDone => (Course::Forward, Side::Old),
        Kind::Back => (Course::Back, Side::Old),
        Kind::Returned => (Course::Back, Side::New),
        // A failure is an end by itself. Interfaces have programs of the wire, and the shunt has numbers, only with flows there.
        Kind::Failed | Kind::WireOn | Kind::Shunted => (Course::Never, Side::New),
    }
}

/// All steps of this course.
fn steps(wanted: Course) -> Vec<Step> {
    let mut steps = Vec::new();
    for kind in Kind::ALL {
        let (course, from) = course(kind);
        let to = if from == Side::Old { Side::New } else { Side::Old };
        if course == wanted {
            steps.extend([Step(from, Act::Sends(kind)), Step(to, Act::Gets(kind))]);
        }
    }
    let phases = Phase::ALL.iter().map(|phase| match phase {
        Phase::Steered => Step(Side::New, Act::Did(*phase)),
        Phase::Rested | Phase::LetGo | Phase::Left => Step(Side::Old, Act::Did(*phase)),
    });
    steps.extend(phases.filter(|_| wanted == Course::Forward));
    steps
}

/// Whether the change is final at this step.
fn is_final(Step(side, act): Step) -> bool {
    match act {
        Act::Gets(Kind::Settled) => side == Side::Old,
        Act::Did(phase) => phase == Phase::Left,
        Act::Sends(kind) | Act::Gets(kind) => {
            matches!(kind, Kind::Flow | Kind::FlowsDone | Kind::Session | Kind::SessionsDone)
        }
    }
}

fn expected(step: Step, victim: Victim) -> After {
    match victim {
        Victim::Both => After::Neither,
        Victim::Old => After::New,
        // From then on the new process is the node, and a crash is a crash.
        Victim::New if is_final(step) => After::Neither,
        Victim::New => After::Old,
    }
}

/// Who the status says it is.
fn serves(up: &Up) -> Option<String> {
    // While one process ends and the other begins, an answer may fail.
    let (status, body) = exchange::ask(&up.folder().join("admin.sock"), "GET", "/v1/status", "").ok()?;
    (status == 200).then_some(body)
}

/// Another upgrade succeeds, and the node ends in order after it.
fn is_a_whole_node(up: &Up, pid: u32, server: SocketAddr, what: &str) {
    eventually(what, || serves(up).is_some_and(|body| body.contains(&format!("\"pid\":{pid}"))));
    let (client, seen, _) = visit(server, b"word");
    assert_ne!(client, seen, "{what}: it was redirected");
    let mut again = Upgrade::start(&up.folder(), &[]);
    let last = again.started();
    let (success, said) = again.ended();
    assert!(success, "{what}: {said}");
    let (client, seen, _) = visit(server, b"word");
    assert_ne!(client, seen, "{what}: it was redirected");
    send(last.0, Signal::TERM);
    ends(&last);
}

/// The process of a node that starts other programs.
fn starter(node: u32) -> Option<u32> {
    let name = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    sidetrack_sys::process::children(node).into_iter().find(|pid| name(pid).trim() == "sidetrack-start")
}

/// One node, one step, one kill.
fn case(around: &Around, course: Course, step: Step, victim: Victim) {
    let server = around.server.address;
    let what = format!("{victim:?} killed where {step}");
    let before = Traces::beside(1);
    let mut up = Up::start_with_path(VARIABLE, FILE, TOP, &tables(around));
    let mut flow = Client::connect(up.addresses("port")[0]).expect("a connection");
    flow.echo(b"before").expect("an echo");
    let mut over = Client::connect(up.addresses("over")[0]).expect("a connection");
    over.echo(b"before").expect("an echo");
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
    socket.send_to(b"one", up.addresses("datagrams")[0]).expect("sent");
    resolved("a.example");
    let wanted = format!("{{\"address\": \"http://{server}\"}}");
    let services = SERVICES.parse().expect("an address");
    assert_eq!(ask(services, "POST", "/outgoing/new", &wanted).0, 200);
    eventually("all are there", || crate::node::admin::flows(&up).len() == 3);
    let old = up.pid();
    let file = up.folder().join(FILE);
    std::fs::write(&file, step.to_string()).expect("written");
    let words: &[&str] = if course == Course::Back { &["--confirm", "1ms"] } else { &[] };
    let mut upgrade = Upgrade::start(&up.folder(), words);
    let new: Started = upgrade.started();
    up.log_line(&what, |line| line.contains(&format!("stopped at the step '{step}'")));
    let victims: &[u32] = match victim {
        Victim::Old => &[old],
        Victim::New => &[new.0],
        Victim::Both => &[old, new.0],
    };
    let starter = starter(old);
    victims.iter().for_each(|pid| send(*pid, Signal::KILL));
    std::fs::remove_file(&file).expect("removed");
    match expected(step, victim) {
        After::Old => {
            let (success, said) = upgrade.ended();
            assert!(!success && said.contains("not upgraded"), "{what}: {said}");
            ends(&new);
            flow.echo(b"after").unwrap_or_else(|error| panic!("{what}: the flow has ended: {error}"));
            over.echo(b"after").unwrap_or_else(|error| panic!("{what}: the session has ended: {error}"));
            is_a_whole_node(&up, old, server, &what);
        }
        After::New => {
            // It ends a moment after its node, and would refuse another upgrade until then.
            eventually(&what, || !starter.is_some_and(runs));
            is_a_whole_node(&up, new.0, server, &what);
        }
        After::Neither => eventually(&what, || !runs(old) && !runs(new.0)),
    }
    up.gone();
    before.expect_back(&what);
    if expected(step, victim) == After::Neither {
        let up = Up::start(TOP, &tables(around));
        let (client, seen, _) = visit(server, b"word");
        assert_ne!(client, seen, "{what}: a restart serves");
        assert!(up.stop().0.success());
        before.expect_back(&what);
    }
}

/// All steps with this victim, in a namespace of its own.
fn all(victim: Victim) {
    if !cfg!(debug_assertions) {
        return println!("skipped: a release build does not stop at steps");
    }
    in_namespace(move || {
        ip("link add one type veth peer name two");
        let around = Around::new();
        for course in [Course::Forward, Course::Back] {
            for step in steps(course) {
                case(&around, course, step, victim);
            }
        }
    });
}

#[test]
fn the_old_process_is_killed_at_each_step() {
    all(Victim::Old);
}

#[test]
fn the_new_process_is_killed_at_each_step() {
    all(Victim::New);
}

#[test]
fn both_processes_are_killed_at_each_step() {
    all(Victim::Both);
}

#[test]
fn there_are_at_least_thirty_steps() {
    let count = steps(Course::Forward).len() + steps(Course::Back).len();
    assert!(count >= 30, "{count}");
}
