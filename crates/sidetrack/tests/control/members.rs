//! Members of an orchestrator have applications of their own, operators reach all, and names are names.

use crate::plane::Plane;
use axum::routing::get;
use axum::{Extension, Json, Router};
use hyper::Method;
use serde_json::{Value, json};
use sidetrack::control::api::ApplicationStatus;
use sidetrack::control::link::{ALPN, Link, LinkError, Peer, serve};
use sidetrack::tls::{Mutual, Pin, Trust, self_signed};
use std::process::Command;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

const PATIENCE: Duration = Duration::from_secs(30);

impl Plane {
    fn names(&self, who: &Link) -> Vec<String> {
        let asked = who.ask::<Vec<ApplicationStatus>>(Method::GET, "/v1/applications", &(), PATIENCE);
        let all = self.runtime.block_on(asked).expect("a list");
        all.into_iter().map(|status| status.application.name).collect()
    }

    fn status(&self, who: &Link, method: Method, name: &str) -> u16 {
        let path = format!("/v1/applications/{name}");
        match self.runtime.block_on(who.ask::<Value>(method, &path, &(), PATIENCE)) {
            Ok(_) => 200,
            Err(LinkError::Refused { status, .. }) => status,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn members_see_and_end_their_own_applications_and_operators_all() {
    let mut plane = Plane::start("[[grant]]\n");
    plane.submit("trial-1", 0, |_| {});
    assert!(plane.settled());
    let by = |plane: &Plane, who| plane.asked_by("orchestrator", who);
    for restarted in [false, true] {
        if restarted {
            plane.orchestrator.kill();
            plane.orchestrator.restart();
        }
        let (app, other, keeper) = (by(&plane, "app"), by(&plane, "other"), by(&plane, "keeper"));
        assert_eq!(plane.names(&app), ["trial-1"], "restarted: {restarted}");
        assert_eq!(plane.names(&other), [] as [&str; 0], "restarted: {restarted}");
        assert_eq!(plane.names(&keeper), ["trial-1"], "restarted: {restarted}");
        for (who, shown) in [(&app, 200), (&other, 404), (&keeper, 200)] {
            assert_eq!(plane.status(who, Method::GET, "trial-1"), shown);
        }
        // To another member it is as if there were none.
        let (theirs, none) = ("trial-1", "trial-2");
        for method in [Method::GET, Method::DELETE] {
            for name in [theirs, none] {
                assert_eq!(plane.status(&other, method.clone(), name), 404, "{method} {name}");
            }
        }
        assert_eq!(plane.names(&app), ["trial-1"], "it was not ended");
    }
    let shown: Vec<ApplicationStatus> = plane.applications().expect("a list");
    assert_eq!(shown[0].owner.as_deref(), Some("app.example"));
    // An operator that is not a member submits nothing, and ends what there is.
    let keeper = by(&plane, "keeper");
    let application =
        json!({ "name": "x", "purpose": "research", "flows": [{ "client": "lab", "data": "pulse" }] });
    let asked = keeper.ask::<Value>(Method::POST, "/v1/applications", &application, PATIENCE);
    let refused = plane.runtime.block_on(asked);
    assert!(matches!(refused, Err(LinkError::Refused { status: 403, .. })), "{refused:?}");
    assert_eq!(plane.status(&keeper, Method::DELETE, "trial-1"), 200);
    assert!(!plane.settled());
}

#[test]
fn another_member_that_takes_the_name_ends_nothing() {
    let mut plane = Plane::start("[[grant]]\n");
    plane.submit("trial-1", 0, |_| {});
    assert!(plane.settled());
    let other = plane.asked_by("orchestrator", "other");
    let application =
        json!({ "name": "trial-1", "purpose": "research", "flows": [{ "client": "lab", "data": "pulse" }] });
    let lines = plane.submitted(&other, &application);
    assert!(lines.contains("there is an application of this name already: choose another name"), "{lines}");
    assert!(plane.settled(), "it runs on");
}

#[test]
fn names_that_are_not_one_segment_of_a_path_are_refused() {
    let plane = Plane::start("[[grant]]\n");
    let app = plane.asked_by("orchestrator", "app");
    for name in ["", ".", "..", "a/b", "../x", "a b"] {
        let application =
            json!({ "name": name, "purpose": "research", "flows": [{ "client": "lab", "data": "pulse" }] });
        let lines = plane.submitted(&app, &application);
        assert!(lines.contains("is not a valid name of an application"), "{name}: {lines}");
    }
    let agent = plane.asked_by("hospital", "orchestrator");
    let access = |name: &str| {
        let application =
            json!({ "name": name, "purpose": "research", "flows": [{ "client": "lab", "data": "pulse" }] });
        json!({ "application": application, "lease_seconds": 1 })
    };
    for name in [".", ".."] {
        assert_eq!(plane.status(&app, Method::GET, name), 400, "{name}");
        assert_eq!(plane.status(&app, Method::DELETE, name), 400, "{name}");
        assert_eq!(plane.status(&agent, Method::DELETE, name), 400, "{name}");
        let access = access(name);
        let asked = agent.ask::<Value>(Method::POST, "/v1/applications", &access, PATIENCE);
        let refused = plane.runtime.block_on(asked);
        assert!(matches!(refused, Err(LinkError::Refused { status: 403, .. })), "{name}: {refused:?}");
    }
    // The command says so itself: its request would be another one.
    for name in ["..", "a/b", ""] {
        let said = Command::new(env!("CARGO_BIN_EXE_sidetrack"))
            .args([
                "orchestrate",
                "end",
                name,
                "--at",
                "127.0.0.1:1",
                "--identity",
                "app.pem",
                "--ca",
                "ca.pem",
            ])
            .current_dir(plane.folder.path())
            .output()
            .expect("the binary");
        let text = String::from_utf8_lossy(&said.stderr);
        assert!(text.contains("is not a valid name of an application"), "{name}: {text}");
    }
}

#[test]
fn a_client_that_does_not_exist_is_refused_and_those_that_exist_are_listed() {
    let plane = Plane::start("[[grant]]\n");
    let app = plane.asked_by("orchestrator", "app");
    for (client, data, purpose, said) in [
        ("lab2", "pulse", "research", "there is no node 'lab2' in the agreement; it has: lab, ward"),
        ("lab", "puls", "research", "there is no data set 'puls' in the agreement; it has: pulse"),
        ("lab", "pulse", "fun", "there is no purpose 'fun' in the agreement; it has: research, care"),
    ] {
        let application =
            json!({ "name": "x", "purpose": purpose, "flows": [{ "client": client, "data": data }] });
        let lines = plane.submitted(&app, &application);
        assert!(lines.contains(said), "{lines}");
    }
}

#[test]
fn with_pins_a_peer_is_who_its_key_says_whatever_name_it_takes() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let keys =
        ["server.example", "app.example", "app.example"].map(|name| self_signed(name, 1).expect("a key"));
    let pins = keys.each_ref().map(|key| Pin::of_pem(&key.certificate_pem).expect("a pin"));
    let [server, one, two] =
        keys.map(|key| Mutual::new(&key.identity_pem(), Trust::Pins(pins.into()), ALPN).expect("a key"));
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let address = listener.local_addr().expect("an address").to_string();
        let who = |Extension(peer): Extension<Peer>| async move { Json([peer.name, peer.identity]) };
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(serve(listener, server, Router::new().route("/who", get(who)), stopped));
        let mut seen = Vec::new();
        for mutual in [one, two] {
            let link = Link::new("the server", [&*address], "server.example", mutual);
            let said: [String; 2] = link.ask(Method::GET, "/who", &(), PATIENCE).await.expect("an answer");
            seen.push(said);
        }
        assert!(seen.iter().all(|[name, _]| name == "app.example"), "{seen:?}");
        let identities: Vec<_> = seen.into_iter().map(|[_, identity]| identity).collect();
        assert_eq!(identities, [pins[1].to_string(), pins[2].to_string()]);
        stop.send(true).expect("it serves");
        serving.await.expect("it ends").expect("in order");
    });
}
