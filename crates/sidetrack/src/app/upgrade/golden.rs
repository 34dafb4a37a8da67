//! What the first release that upgrades says, and that this one goes on with it. The lines stay as they are for ever: a field that
//! is new has a default, a field is never renamed, and a kind never gets another meaning.

use super::associations::AssociationPart;
use super::channel::Channel;
use super::flows::FlowPart;
use super::heritage::{Go, Heritage};
use super::parts::{Checked, KeeperPart, ListenerPart, OverlayPart, ServingPart, StayPart, WindowPart};
use super::sessions::SessionPart;
use super::steps::Side;
use crate::config::Config;
use serde_json::{Value, json};
use sidetrack_core::flow::Protocol;
use sidetrack_core::upgrade::{Kind, greeting, part};
use sidetrack_sys::scm;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

const WITHIN: Duration = Duration::from_secs(60);

/// The offer of a process of version 1: kinds, numbers of descriptors, bodies.
const OFFER: &[(Kind, u8, &str)] = &[
    (
        Kind::Listener,
        2,
        r#"{"name":"web","address":"127.0.0.1:8080","protocol":"tcp","transparent":false,"mptcp":false}"#,
    ),
    (Kind::Window, 1, r#"{"Admin":{"path":"/run/sidetrack/admin.sock","with_directory":true}}"#),
    (Kind::Window, 1, r#"{"Metrics":"127.0.0.1:9100"}"#),
    (Kind::Window, 1, r#"{"Upgrades":"/run/sidetrack/admin.sock.upgrade"}"#),
    (Kind::Offered, 0, "null"),
    (Kind::Go, 2, r##"{"next_flow":1100,"first_path":3,"metrics":"# EOF\n"}"##),
    (Kind::Stay, 0, "null"),
    (Kind::Flow, 2, FLOW),
    (Kind::FlowsDone, 0, "null"),
];

/// A running flow of version 1.
const FLOW: &str = r#"{"id":7,"spared":{"since_us":1700000000000000,"age_us":5000000,"bytes_up":10,"bytes_down":20,
"connect_us":300,"first_byte_us":900,"sniff_us":null,"held_us":null,"active_ms":4000,"tls_name":"web.example",
"taken":["warm","192.0.2.1:443"],"shunted":false,"multipath":[false,true]},"held":[false,false],"limit_bytes":65536,
"idle_ms":300000,"lifetime_ms":null,"linger_ms":1000,"flow":{"intercept":"reverse","listener":"web",
"client":"192.0.2.9:4000","orig_dst":"192.0.2.1:443","host":"web.example","process":[12,"curl",1000],"user":null},
"verdict":{"rule":"all","carrier":"direct","why":"rule 'all'","agreement":null},"note":null}"#;

fn any(count: u8) -> Vec<OwnedFd> {
    (0..count).map(|_| File::open("/dev/null").expect("there").into()).collect()
}

#[test]
fn the_offer_of_version_1_is_taken_over() {
    let (theirs, ours) = scm::pair().expect("a pair");
    for (at, (kind, descriptors, body)) in OFFER.iter().enumerate() {
        let mut bytes = if at == 0 { greeting() } else { Vec::new() };
        if at == 0 {
            assert_eq!(bytes[10..12], [0, 1], "these lines are of version 1");
        }
        bytes.extend(part(*kind, 0, *descriptors, body.as_bytes()).expect("small"));
        let fds = any(*descriptors);
        scm::send(&theirs, &bytes, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>()).expect("sent");
    }
    let mut channel = Channel::new(ours, Side::New);
    let mut next = || channel.next(WITHIN).expect("known").expect("there");
    let heritage = Heritage::default();
    while heritage.add(next()).expect("understood") {}
    let (accept, receive) = heritage.take("web", "127.0.0.1:8080".parse().expect("an address"));
    assert_eq!((accept.len(), receive.len()), (2, 0));
    let admin = heritage.window(|part| matches!(part, WindowPart::Admin { with_directory: true, .. }));
    assert!(admin.is_some() && !heritage.has_wire());
    let go = Go::read(next(), Vec::new()).expect("understood");
    assert_eq!((go.next_flow, go.first_path, go.metrics.as_str()), (1100, 3, "# EOF\n"));
    let stay = next().body::<Option<StayPart>>().expect("understood").unwrap_or_default();
    assert_eq!(stay.kept, Vec::<u32>::new());
    let flow: FlowPart = next().body().expect("understood");
    let rules = "version = 1\ndefault = \"deny\"\n[[rule]]\nname = \"all\"\ncarrier = \"direct\"\n";
    let config = Config::from_text("test", rules).expect("a configuration");
    let decided = flow.decided(&config).expect("understood");
    assert_eq!(decided.rule().map(|rule| &**rule), Some("all"));
    assert_eq!((decided.flow.protocol, &*decided.flow.listener), (Protocol::Tcp, "web"));
    assert_eq!(next().kind, Kind::FlowsDone);
}

#[test]
fn a_keeper_and_answers_of_version_1_are_understood() {
    let keeper: KeeperPart =
        serde_json::from_str(r#"{"protocol":1,"begin":{"closed":false,"owners":true},"used":true}"#)
            .expect("understood");
    assert!(keeper.begin.owners && keeper.used);
    let checked: Checked = serde_json::from_str(r#"{"version":"0.1.0","pid":7}"#).expect("understood");
    assert_eq!(checked.pid, 7);
    let serving: ServingPart = serde_json::from_str(r#"{"steered":true}"#).expect("understood");
    assert!(serving.steered && !serving.settles && !serving.associations, "nothing that version 1 cannot do");
}

/// Whether all that a reader of version 1 needs is in what this program writes.
fn has_all(written: Value, golden: &str) -> bool {
    let golden: Value = serde_json::from_str(golden).expect("JSON");
    let (Value::Object(written), Value::Object(golden)) = (written, golden) else { return false };
    golden.keys().all(|key| written.contains_key(key))
}

#[test]
fn a_reader_of_version_1_finds_its_fields() {
    let listener: ListenerPart = serde_json::from_str(OFFER[0].2).expect("understood");
    assert!(has_all(json!(listener), OFFER[0].2));
    let flow: FlowPart = serde_json::from_str(FLOW).expect("understood");
    assert!(has_all(json!(flow), FLOW));
    assert!(has_all(
        json!(flow)["spared"].take(),
        r#"{"since_us":0,"age_us":0,"bytes_up":0,"bytes_down":0}"#
    ));
    assert!(has_all(json!(ServingPart::default()), r#"{"steered":true}"#));
    // An association is new with the parts that a reader of version 1 leaves out.
    assert!(serde_json::from_str::<AssociationPart>("{}").is_err());
}

/// What the first release says that moves an overlay: sockets, a session that it has begun, and one that it delivers.
const OVERLAY: [&str; 4] = [
    r#"{"Listener":"127.0.0.1:8100"}"#,
    r#"{"Datagrams":"0.0.0.0:4000"}"#,
    r#"{"Packets":24000}"#,
    r#""Door""#,
];
const NEAR: &str = r#"{"session":{"id":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],"peer":7,"attempts":[3],"order":{"node":"c",
"mode":"shortest","paths":1,"destination":"192.0.2.1:443","client":"192.0.2.9:4000","host":"web.example"}},"flow":null}"#;
const FAR: &str = r#"{"session":{"id":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],"peer":7,"attempts":[3,0,0,0,0],"order":null},
"flow":{"id":9,"spared":{"since_us":1700000000000000,"age_us":5000000,"bytes_up":10,"bytes_down":20},"flow":{"intercept":"tunnel",
"listener":"overlay","client":"192.0.2.9:4000","orig_dst":"192.0.2.1:443","host":null,"process":[null,null,null],"user":"a"},
"verdict":{"rule":null,"carrier":"direct","why":"[[overlay.deliver]]","agreement":null}}}"#;

#[test]
fn the_overlay_of_the_first_release_that_moves_it_is_understood() {
    let parts = OVERLAY.map(|text| serde_json::from_str::<OverlayPart>(text).expect("understood"));
    let at = |text: &str| text.parse().expect("an address");
    assert_eq!(
        parts,
        [
            OverlayPart::Listener(at("127.0.0.1:8100")),
            OverlayPart::Datagrams(at("0.0.0.0:4000")),
            OverlayPart::Packets(24_000),
            OverlayPart::Door
        ]
    );
    for text in [NEAR, FAR] {
        let part: SessionPart = serde_json::from_str(text).expect("understood");
        assert!(has_all(json!(part), text));
        assert!(has_all(json!(part)["session"].take(), r#"{"id":[],"peer":0,"attempts":[],"order":null}"#));
    }
}
