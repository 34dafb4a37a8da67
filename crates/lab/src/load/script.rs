//! A connection's conversation as data: what to write, then what to wait for, step by step.

use std::sync::Arc;

use rustls::ClientConfig;

use super::tls;
use super::wire::{self, Expect};
use super::{Spec, Via, Work};

/// One step: bytes to write, replies to await.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Bytes written in one call.
    pub send: Vec<u8>,
    /// Replies awaited, in this order.
    pub expect: Vec<Expect>,
}

/// The whole conversation of a connection.
#[derive(Debug, Clone)]
pub struct Script {
    /// From connect to the first complete answer.
    pub opening: Vec<Step>,
    /// One further request on the same connection.
    pub again: Step,
    /// Number of the first step inside TLS, and its TLS settings; none: all steps are in clear.
    tls: Option<(usize, Arc<ClientConfig>)>,
}

impl Script {
    /// Makes the conversation for `spec`.
    #[must_use]
    pub fn new(spec: &Spec) -> Self {
        let connection = if spec.work == Work::NewConnection { "close" } else { "keep-alive" };
        let request = format!(
            "GET {} HTTP/1.1\r\nHost: {}\r\nConnection: {connection}\r\n\r\n",
            spec.path,
            authority(spec)
        );
        let request = request.into_bytes();
        let again = Step { send: request.clone(), expect: vec![Expect::HttpHead] };
        let opening = opening(spec, request);
        // The steps that lead to the server are in clear; the request itself is inside TLS.
        let tls = spec.tls.then(|| (opening.len().saturating_sub(1), tls::config()));
        Self { opening, again, tls }
    }

    /// Returns the TLS settings of a step inside TLS.
    #[must_use]
    pub fn tls_at(&self, position: usize) -> Option<&Arc<ClientConfig>> {
        self.tls.as_ref().filter(|(first, _)| position >= *first).map(|(_, config)| config)
    }

    /// Returns step number `position` of a connection; after the opening it is always the same request.
    #[must_use]
    pub fn step(&self, position: usize) -> &Step {
        self.opening.get(position).unwrap_or(&self.again)
    }
}

fn authority(spec: &Spec) -> String {
    spec.authority.clone().unwrap_or_else(|| spec.destination.to_string())
}

fn opening(spec: &Spec, request: Vec<u8>) -> Vec<Step> {
    let step = |send: Vec<u8>, expect: &[Expect]| Step { send, expect: expect.to_vec() };
    match spec.via {
        Via::Plain => vec![step(request, &[Expect::HttpHead])],
        Via::HttpConnect => {
            let authority = authority(spec);
            let connect = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
            vec![step(connect.into_bytes(), &[Expect::HttpTunnel]), step(request, &[Expect::HttpHead])]
        }
        Via::Socks5 => vec![
            step(wire::SOCKS5_GREETING.to_vec(), &[Expect::Socks5Method]),
            step(wire::socks5_connect(spec.destination), &[Expect::Socks5Reply]),
            step(request, &[Expect::HttpHead]),
        ],
        Via::Socks6Draft { initial_data } => socks6(initial_data, Expect::Socks6Operation, request, |n| {
            wire::socks6_connect(spec.destination, n)
        }),
        Via::Socks6Socksx { initial_data } => {
            socks6(initial_data, Expect::Socks6SocksxOperation, request, |n| {
                wire::socksx_connect(spec.destination, n)
            })
        }
    }
}

fn socks6(
    initial: bool,
    operation: Expect,
    request: Vec<u8>,
    connect: impl Fn(usize) -> Vec<u8>,
) -> Vec<Step> {
    if initial {
        let send = [connect(request.len()), request].concat();
        return vec![Step { send, expect: vec![Expect::Socks6Auth, operation, Expect::HttpHead] }];
    }
    vec![
        Step { send: connect(0), expect: vec![Expect::Socks6Auth, operation] },
        Step { send: request, expect: vec![Expect::HttpHead] },
    ]
}
