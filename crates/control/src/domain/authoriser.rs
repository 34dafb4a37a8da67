//! The authoriser: checks an application against the party's grants, and also asks a policy reasoner if one is
//! configured.

use crate::api::{Application, Wanted};
use crate::settings::{DomainSettings, Grant, ReasonerAt};
use axum::body::Body;
use hyper::Request;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long a reasoner may take. No answer counts as a denial.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest verdict, bytes.
const VERDICT_MAX: usize = 1 << 20;

/// Decides about an application.
///
/// # Errors
/// Fails if the application is refused; the text says why.
pub(super) async fn decide(settings: &DomainSettings, application: &Application) -> Result<(), String> {
    let party = &settings.party;
    for wanted in &application.flows {
        if !settings.grants.iter().any(|grant| grant.covers(application, wanted)) {
            let Wanted { client, data } = wanted;
            let purpose = &application.purpose;
            return Err(format!("'{party}' does not grant '{data}' at '{client}' for {purpose}"));
        }
    }
    let Some(reasoner) = &settings.reasoner else { return Ok(()) };
    for wanted in &application.flows {
        let verdict = timeout(PATIENCE, ask(reasoner, application, wanted)).await;
        let verdict = verdict.unwrap_or_else(|_| Err("it does not answer".to_owned()));
        verdict.map_err(|why| {
            format!("the policy reasoner of '{party}' does not allow '{}': {why}", wanted.data)
        })?;
    }
    Ok(())
}

impl Grant {
    fn covers(&self, application: &Application, wanted: &Wanted) -> bool {
        let fits = |list: &[String], name: &String| list.is_empty() || list.contains(name);
        fits(&self.purpose, &application.purpose)
            && fits(&self.data, &wanted.data)
            && fits(&self.client, &wanted.client)
    }
}

/// Calls `POST /v1/deliberation/access-data` of the EPI and Brane policy reasoner. Every answer but `"verdict":
/// "allow"` is a denial.
async fn ask(reasoner: &ReasonerAt, application: &Application, wanted: &Wanted) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("it cannot be asked: {error}");
    let stream = TcpStream::connect(&reasoner.address).await.map_err(|error| failed(&error))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed(&error))?;
    // The task ends when the sender is dropped.
    tokio::spawn(connection);
    let body = json!({
        "use_case": reasoner.use_case,
        "workflow": { "application": application.name, "purpose": application.purpose, "client": wanted.client },
        "data_id": wanted.data,
    });
    let mut request = Request::post("/v1/deliberation/access-data")
        .header("host", &reasoner.address)
        .header("content-type", "application/json");
    if let Some(token) = &reasoner.token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let request = request.body(Body::from(body.to_string())).map_err(|error| failed(&error))?;
    let answer = sender.send_request(request).await.map_err(|error| failed(&error))?;
    let status = answer.status();
    let body = axum::body::to_bytes(Body::new(answer.into_body()), VERDICT_MAX)
        .await
        .map_err(|error| failed(&error))?;
    verdict(status.as_u16(), &body)
}

fn verdict(status: u16, body: &[u8]) -> Result<(), String> {
    if status != 200 {
        return Err(format!("status {status}"));
    }
    let body: Value = serde_json::from_slice(body).map_err(|_| "its answer is not JSON".to_owned())?;
    match body.get("verdict").and_then(Value::as_str) {
        Some("allow") => Ok(()),
        Some("deny") => {
            let reasons = body.get("reasons_for_denial").map(ToString::to_string).unwrap_or_default();
            Err(format!("deny {reasons}").trim_end().to_owned())
        }
        // The reasoner reports its own errors with status 200 and a text.
        _ => Err("its answer is not a verdict".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::verdict;

    #[test]
    fn anything_but_allow_is_no() {
        assert_eq!(verdict(200, br#"{"verdict":"allow","verdict_reference":"1","signature":"x"}"#), Ok(()));
        for (status, body) in [
            (200, r#"{"verdict":"deny","verdict_reference":"1","reasons_for_denial":["consent"]}"#),
            (200, r#"{"verdict":"Allow"}"#),
            (200, r#"{"verdict":{"allow":true}}"#),
            (200, r#""allow""#),
            (200, "allow"),
            (200, ""),
            (401, r#"{"verdict":"allow"}"#),
            (201, r#"{"verdict":"allow"}"#),
        ] {
            assert!(verdict(status, body.as_bytes()).is_err(), "{status} {body}");
        }
    }
}
