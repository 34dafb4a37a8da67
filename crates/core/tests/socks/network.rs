//! A client and a server on one virtual clock, with the time of light between them.

use sidetrack_core::flow::EndReason;
use sidetrack_core::socks::server::{Input, Output, Reply, Request, ServerConfig};
use sidetrack_core::socks::v6::{SessionLimits, SessionTable};
use sidetrack_core::socks::{Client, Server, client};
use sidetrack_core::time::Instant;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// One way.
const LATENCY: Duration = Duration::from_millis(100);
/// What the destination answers when all of the initial data has come.
pub(crate) const ANSWER: &[u8] = b"answer";

enum Event {
    ToServer(Vec<u8>),
    ToClient(Vec<u8>),
    ClientClosed,
    ServerClosed,
}

/// What happened.
#[derive(Debug, Default)]
pub(crate) struct Run {
    /// `Connected` or `Failed`.
    pub client: Option<client::Output>,
    /// Round trips until `Connected` or `Failed`, the TCP handshake not counted.
    pub client_round_trips: u128,
    /// Round trips until the first byte of the destination's answer.
    pub answer_round_trips: u128,
    /// How often the client wrote until it was connected.
    pub client_writes: usize,
    /// How often the server wrote until it was done.
    pub server_writes: usize,
    /// The request, as the server's driver saw it.
    pub request: Option<Request>,
    /// How the server ended.
    pub server: Option<Output>,
    /// What the destination got.
    pub delivered: Vec<u8>,
    /// What the client's application got.
    pub received: Vec<u8>,
}

impl Run {
    /// What the client was told when it was connected.
    pub(crate) fn connected(&self) -> &client::Connected {
        match &self.client {
            Some(client::Output::Connected(connected)) => connected,
            other => panic!("not connected: {other:?}, server: {:?}", self.server),
        }
    }

    /// How the client failed.
    pub(crate) fn client_failure(&self) -> (EndReason, &str) {
        match &self.client {
            Some(client::Output::Failed { reason, detail }) => (*reason, detail),
            other => panic!("did not fail: {other:?}"),
        }
    }

    /// How the server failed.
    pub(crate) fn server_failure(&self) -> (EndReason, &str) {
        match &self.server {
            Some(Output::Failed { reason, detail }) => (*reason, detail),
            other => panic!("did not fail: {other:?}"),
        }
    }
}

/// The two ends and what flies between them.
pub(crate) struct Network {
    pub config: ServerConfig,
    pub sessions: SessionTable,
    /// Bytes arrive in pieces of this length.
    pub piece_len: usize,
    /// What a dial gives.
    pub reply: Reply,
    /// The destination answers when it has this many bytes.
    pub expected_len: usize,
    now: Instant,
    in_flight: BTreeMap<(Instant, u64), Event>,
    sequence: u64,
    random: u8,
}

impl Network {
    pub(crate) fn new(config: ServerConfig) -> Self {
        Self {
            config,
            sessions: SessionTable::new(SessionLimits::default(), [7; 16]),
            piece_len: usize::MAX,
            reply: Reply::connected("198.51.100.7:40000".parse().unwrap()),
            expected_len: 5,
            now: Instant::ZERO,
            in_flight: BTreeMap::new(),
            sequence: 0,
            random: 0,
        }
    }

    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    pub(crate) fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
    }

    fn fly(&mut self, event: Event) {
        self.sequence += 1;
        self.in_flight.insert((self.now + LATENCY, self.sequence), event);
    }

    /// Runs a client made by `client` against a new server until nothing happens any more.
    pub(crate) fn run(&mut self, client: impl FnOnce(Instant) -> Client) -> Run {
        let started = self.now;
        let mut client = client(self.now);
        let mut server = Server::new(Arc::new(self.config.clone()), self.now);
        let mut run = Run::default();
        self.poll_client(&mut client, &mut run, started);
        for _ in 0..100_000 {
            let deadline = [client.deadline(), server.deadline()].into_iter().flatten().min();
            let arrival = self.in_flight.keys().next().map(|(at, _)| *at);
            match (arrival, deadline) {
                (Some(at), deadline) if deadline.is_none_or(|deadline| at <= deadline) => {
                    self.now = at;
                    let (_, event) = self.in_flight.pop_first().unwrap();
                    self.arrive(event, &mut client, &mut server, &mut run, started);
                }
                (_, Some(deadline)) => {
                    self.now = self.now.max(deadline);
                    client.handle(self.now, client::Input::Tick);
                    server.handle(self.now, Input::Tick);
                }
                (_, None) => return run,
            }
            self.poll_server(&mut server, &mut run);
            self.poll_client(&mut client, &mut run, started);
        }
        panic!("the two never come to rest: {run:?}");
    }

    fn round_trips(&self, started: Instant) -> u128 {
        let (passed, round_trip) = ((self.now - started).as_nanos(), 2 * LATENCY.as_nanos());
        assert_eq!(passed % round_trip, 0, "not a whole number of round trips");
        passed / round_trip
    }

    fn arrive(
        &mut self,
        event: Event,
        client: &mut Client,
        server: &mut Server,
        run: &mut Run,
        started: Instant,
    ) {
        match event {
            Event::ToServer(bytes) => {
                for piece in bytes.chunks(self.piece_len.min(bytes.len())) {
                    if matches!(run.server, Some(Output::Done { .. })) {
                        self.deliver(piece, run);
                    } else {
                        server.handle(self.now, Input::Bytes(piece));
                        self.poll_server(server, run);
                    }
                }
            }
            Event::ToClient(bytes) => {
                for piece in bytes.chunks(self.piece_len.min(bytes.len())) {
                    if matches!(run.client, Some(client::Output::Connected(_))) {
                        self.receive(piece, run, started);
                    } else {
                        client.handle(self.now, client::Input::Bytes(piece));
                        self.poll_client(client, run, started);
                    }
                }
            }
            Event::ClientClosed => server.handle(self.now, Input::Eof),
            Event::ServerClosed => client.handle(self.now, client::Input::Eof),
        }
    }

    fn deliver(&mut self, bytes: &[u8], run: &mut Run) {
        run.delivered.extend_from_slice(bytes);
        if run.delivered.len() == self.expected_len && matches!(run.server, Some(Output::Done { .. })) {
            self.fly(Event::ToClient(ANSWER.to_vec()));
        }
    }

    fn receive(&mut self, bytes: &[u8], run: &mut Run, started: Instant) {
        if run.received.is_empty() && !bytes.is_empty() {
            run.answer_round_trips = self.round_trips(started);
        }
        run.received.extend_from_slice(bytes);
    }

    fn poll_client(&mut self, client: &mut Client, run: &mut Run, started: Instant) {
        while let Some(output) = client.poll() {
            match output {
                client::Output::Send(bytes) => {
                    run.client_writes += 1;
                    self.fly(Event::ToServer(bytes));
                }
                client::Output::Connected(connected) => {
                    run.client_round_trips = self.round_trips(started);
                    self.receive(&connected.leftover, run, started);
                    run.client = Some(client::Output::Connected(connected));
                }
                failed @ client::Output::Failed { .. } => {
                    run.client = Some(failed);
                    self.fly(Event::ClientClosed);
                }
            }
        }
    }

    fn poll_server(&mut self, server: &mut Server, run: &mut Run) {
        while let Some(output) = server.poll() {
            match output {
                Output::Send(bytes) => {
                    run.server_writes += 1;
                    self.fly(Event::ToClient(bytes));
                }
                Output::Session(query) => {
                    self.random += 1;
                    let client = "192.0.2.9".parse().unwrap();
                    let answer = self.sessions.answer(self.now, client, &query, [self.random; 20]);
                    server.handle(self.now, Input::Session(answer));
                }
                Output::Request(mut request) => {
                    run.delivered.append(&mut request.first_bytes);
                    run.request = Some(*request);
                    server.handle(self.now, Input::Reply(self.reply.clone()));
                }
                Output::Done { leftover } => {
                    run.server = Some(Output::Done { leftover: Vec::new() });
                    self.deliver(&leftover, run);
                }
                end @ (Output::Finished | Output::Failed { .. }) => {
                    run.server = Some(end);
                    self.fly(Event::ServerClosed);
                }
            }
        }
    }
}
