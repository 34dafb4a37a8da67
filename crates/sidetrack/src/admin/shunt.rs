//! Routes for the shunt: for `sidetrack shunt`, and for an intrusion detection system that trusts or blocks
//! flows.

use super::AdminState;
use super::error::ApiError;
use crate::shunt::{Ask, FlowView, Told, Which};
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use serde::{Deserialize, Serialize};
use sidetrack_core::shunt::{ShuntAction, Transport};
use std::net::SocketAddr;

/// The flows of the shunt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShuntFlows {
    /// All flows that policy wanted on the fast path at least once, or that have a set action.
    pub flows: Vec<FlowView>,
}

/// The flow that was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// The client.
    pub client: SocketAddr,
    /// The server.
    pub server: SocketAddr,
}

/// The flow that a request is about, and the action for it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wish {
    client: SocketAddr,
    server: SocketAddr,
    transport: Option<Transport>,
    action: Option<ShuntAction>,
}

type Asked = Result<Query<Wish>, QueryRejection>;

fn wish(asked: Asked) -> Result<Wish, ApiError> {
    let help = "the path takes client=10.0.0.1:4000 and server=10.0.0.2:5000, transport=tcp or udp, and for POST \
                action=shunt, block or ignore";
    asked.map(|Query(wish)| wish).map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))
}

impl AdminState {
    async fn ask_shunt(&self, ask: Ask) -> Result<Told, ApiError> {
        let control = self.control.clone();
        let told = tokio::task::spawn_blocking(move || control.shunt(&ask)).await;
        match told {
            Ok(Ok(told)) => Ok(told),
            Ok(Err(error)) => {
                Err(ApiError::conflict(error, "docs/shunt.md says what [shunt] of the configuration needs"))
            }
            Err(error) => Err(ApiError::internal(format!("asking the shunt ended early: {error}"))),
        }
    }

    async fn change(&self, wish: &Wish, ask: Ask) -> Result<Json<Done>, ApiError> {
        match self.ask_shunt(ask).await? {
            Told::Found(true) => Ok(Json(Done { client: wish.client, server: wish.server })),
            Told::Found(false) => Err(ApiError::not_found(
                format!("there is no such connection: {} -> {}", wish.client, wish.server),
                "it must be in conntrack, with the numbers of both ports in its mark: `sidetrack shunt rules` prints the \
                 rules that do that",
            )),
            other => Err(ApiError::internal(format!("the shunt answered something else: {other:?}"))),
        }
    }
}

impl Wish {
    fn which(&self) -> Which {
        Which {
            client: self.client,
            server: self.server,
            transport: self.transport.unwrap_or(Transport::Tcp),
        }
    }
}

pub(super) async fn list(State(state): State<AdminState>) -> Result<Json<ShuntFlows>, ApiError> {
    match state.ask_shunt(Ask::Flows).await? {
        Told::Flows(flows) => Ok(Json(ShuntFlows { flows })),
        other => Err(ApiError::internal(format!("the shunt answered something else: {other:?}"))),
    }
}

pub(super) async fn pin(State(state): State<AdminState>, asked: Asked) -> Result<Json<Done>, ApiError> {
    let wish = wish(asked)?;
    let Some(action) = wish.action else {
        let help = "action=shunt moves the flow to the fast path, block drops it there, ignore keeps it on the slow path";
        return Err(ApiError::bad_request("nothing says what is to become of the flow", help));
    };
    state.change(&wish, Ask::Pin(wish.which(), action)).await
}

pub(super) async fn withdraw(State(state): State<AdminState>, asked: Asked) -> Result<Json<Done>, ApiError> {
    let wish = wish(asked)?;
    state.change(&wish, Ask::Withdraw(wish.which())).await
}
