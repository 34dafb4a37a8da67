//! The eight steps, and what becomes of flows before, while and after an application runs.

use crate::node::Up;
use crate::node::admin::{ask, flows, show};
use crate::node::peers::Client;
use crate::plane::Plane;
use hyper::Method;
use serde_json::{Value, json};
use sidetrack::control::api::{Progress, Step};
use sidetrack::control::link::LinkError;
use sidetrack::control::openapi;
use sidetrack_testkit::eventually;
use std::time::Duration;

fn steps(lines: &[Progress]) -> Vec<Step> {
    let done = lines.iter().filter_map(|line| match line {
        Progress::Done { step, .. } => Some(*step),
        Progress::Underway { .. } | Progress::Failed { .. } => None,
    });
    done.collect()
}

#[test]
fn eight_steps_lead_to_flows_and_the_end_of_the_application_ends_them() {
    let mut plane = Plane::start("[[grant]]\npurpose = \"research\"\ndata = \"pulse\"\n");
    assert!(Client::connect(plane.entry()).is_err(), "nothing was submitted");
    assert_eq!(plane.lab.record().text("reason"), "policy_denied");
    let lines = plane.submit("trial-1", 0, |_| {});
    assert_eq!(steps(&lines), Step::ALL, "{lines:?}");
    assert!(plane.settled());
    let mut client = Client::connect(plane.entry()).expect("allowed");
    client.echo(b"pulse").expect("echo");
    let chain = &flows(&plane.lab)[0].0["chain"];
    assert_eq!(*chain, json!(["count"]));
    // A second one of the name is refused, and the first goes on.
    let lines = plane.submit("trial-1", 0, |_| {});
    assert!(matches!(&lines[..], [Progress::Failed { step: Step::Submit, .. }]), "{lines:?}");
    client.echo(b"pulse").expect("goes on");
    let node = a_node_tells_the_steps(&plane);
    plane.end("trial-1");
    assert!(client.echo(b"pulse").is_err());
    assert_eq!(plane.lab.record().text("reason"), "policy_revoked");
    assert!(!plane.settled());
    assert!(Client::connect(plane.entry()).is_err());
    a_node_asks_again(&mut plane, &node);
}

/// The admin interface of another node has both submissions: the one that is ready, and the one that was refused.
fn a_node_tells_the_steps(plane: &Plane) -> Up {
    let node = plane.watching();
    let told: Value = serde_json::from_str(&show(&node, "/v1/control")).expect("JSON");
    assert_eq!(told["applications"][0]["application"]["name"], "trial-1");
    assert_eq!(told["applications"][0]["phase"], "ready");
    let lines = |at: usize| told["progress"][at]["lines"].as_array().expect("lines").clone();
    let numbers: Vec<_> = lines(0).iter().map(|line| line["number"].as_u64()).collect();
    assert_eq!(numbers, (1..=8).map(Some).collect::<Vec<_>>(), "{told}");
    assert_eq!((lines(1).len(), lines(1)[0]["event"].as_str()), (1, Some("failed")), "{told}");
    assert_eq!(ask(&plane.lab, "GET", "/v1/control").0, 404, "without the table");
    node
}

/// It says when the orchestrator is away, and that its steps are gone with it.
fn a_node_asks_again(plane: &mut Plane, node: &Up) {
    plane.orchestrator.kill();
    eventually("it says that the orchestrator is away", || ask(node, "GET", "/v1/control").0 == 503);
    plane.orchestrator.restart();
    // The steps are not stored.
    eventually("it answers again", || {
        let (status, body) = ask(node, "GET", "/v1/control");
        status == 200 && body == "{\"applications\":[],\"progress\":[]}"
    });
}

#[test]
fn consent_that_a_domain_withdraws_reaches_the_other_one() {
    let mut plane = Plane::start("[[grant]]\n");
    plane.submit("trial-1", 0, |_| {});
    let mut client = Client::connect(plane.entry()).expect("allowed");
    client.echo(b"pulse").expect("echo");
    // The flow runs through the proxy of the other domain: it hears of it from the orchestrator.
    plane.consent("withdrawn");
    eventually("the flow ends", || client.echo(b"pulse").is_err());
    assert_eq!(plane.lab.record().text("reason"), "policy_revoked");
    let movements = |plane: &Plane| plane.applications().map(|all| all[0].movements.len());
    eventually("the orchestrator knows", || movements(&plane) == Some(0));
    plane.consent("given");
    eventually("allowed again", || Client::connect(plane.entry()).is_ok());
}

#[test]
fn a_domain_that_refuses_is_named_and_nothing_is_left() {
    let mut plane = Plane::start("[[grant]]\npurpose = \"care\"\n");
    let lines = plane.submit("trial-1", 0, |_| {});
    assert_eq!(steps(&lines), [Step::Submit, Step::RequestAccess]);
    let Some(Progress::Failed { step, domain, error }) = lines.last() else { panic!("{lines:?}") };
    assert_eq!((*step, domain.as_deref()), (Step::Grants, Some("hospital")));
    assert_eq!(error, "'hospital' does not grant 'pulse' at 'lab' for research");
    assert!(!plane.settled());
    assert!(Client::connect(plane.entry()).is_err());
}

#[test]
fn what_nobody_agreed_to_ends_at_the_first_step_and_strangers_are_not_heard() {
    let plane = Plane::start("[[grant]]\n");
    let refused = |link: &sidetrack::control::link::Link, application: Value| {
        let asked =
            link.ask::<Value>(Method::POST, "/v1/applications", &application, Duration::from_secs(30));
        plane.runtime.block_on(asked)
    };
    let stranger = plane.stranger("orchestrator");
    let application =
        json!({ "name": "x", "purpose": "research", "flows": [{ "client": "lab", "data": "pulse" }] });
    let Err(LinkError::Refused { status, error }) = refused(&stranger, application) else { panic!("heard") };
    assert_eq!((status, &*error), (403, "'stranger.example' may not have applications"));
    let gone = plane.runtime.block_on(stranger.ask::<()>(
        Method::DELETE,
        "/v1/applications/x",
        &(),
        Duration::from_secs(30),
    ));
    assert!(matches!(gone, Err(LinkError::Refused { status: 403, .. })));
    assert_eq!(plane.applications().map(|all| all.len()), Some(0));
}

#[test]
fn proxies_go_on_without_a_control_plane_and_after_its_return() {
    let mut plane = Plane::start("[[grant]]\n");
    plane.submit("trial-1", 0, |_| {});
    let mut client = Client::connect(plane.entry()).expect("allowed");
    plane.orchestrator.kill();
    plane.hospital.kill();
    plane.centre.kill();
    client.echo(b"pulse").expect("goes on");
    Client::connect(plane.entry()).expect("new flows, too").echo(b"pulse").expect("echo");
    plane.centre.restart();
    plane.hospital.restart();
    plane.orchestrator.restart();
    assert!(plane.settled());
    client.echo(b"pulse").expect("goes on");
    plane.end("trial-1");
    assert!(client.echo(b"pulse").is_err());
}

#[test]
fn the_documents_describe_what_is_served() {
    let plane = Plane::start("[[grant]]\n");
    let application =
        json!({ "name": "x", "purpose": "research", "flows": [{ "client": "lab", "data": "pulse" }] });
    let body = |id: &str| match id {
        "submit" | "plan" => application.clone(),
        "grant" => json!({ "application": application, "lease_seconds": 1 }),
        "ship" => json!({ "functions": [] }),
        "configure" => json!({ "facts": "", "movements": [] }),
        "consent" => json!({ "consent": "given" }),
        _ => Value::Null,
    };
    let documents = [
        (openapi::orchestrator(), plane.stranger("orchestrator")),
        (openapi::domain(), plane.stranger("hospital")),
    ];
    for (document, link) in documents {
        let paths = document["paths"].as_object().expect("paths");
        assert!(paths.len() >= 3, "{document}");
        for (path, operations) in paths {
            for (method, operation) in operations.as_object().expect("operations") {
                let method: Method = method.to_uppercase().parse().expect("a method");
                let (path, id) =
                    (path.replace("{name}", "x").replace("{data}", "pulse"), &operation["operationId"]);
                let body = body(id.as_str().expect("a name"));
                let asked = link.ask::<Value>(method.clone(), &path, &body, Duration::from_secs(30));
                let answer = plane.runtime.block_on(asked);
                // Served, understood, and not for a stranger.
                assert!(
                    matches!(answer, Err(LinkError::Refused { status: 403, .. })),
                    "{method} {path}: {answer:?}"
                );
            }
        }
        let served: Value = plane
            .runtime
            .block_on(link.ask(Method::GET, "/openapi.json", &(), Duration::from_secs(30)))
            .expect("served");
        assert_eq!(served, document);
    }
}
