//! `socks`: the client sends its destination, with SOCKS version 5 or 6.

use crate::carry::{Client, Failure};
use crate::live::Clock;
use crate::reactor::timeout;
use sidetrack_core::flow::EndReason;
use sidetrack_core::socks::Server;
use sidetrack_core::socks::server::{Input, Output, Reply, Request, ServerConfig};
use sidetrack_core::socks::v6::SessionTable;
use sidetrack_core::time::Instant;
use sidetrack_sys::sockopt;
use sidetrack_sys::sync::lock;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The server's side of one handshake.
#[derive(Debug)]
pub struct Handshake {
    machine: Server,
    sessions: Arc<Mutex<SessionTable>>,
    clock: Clock,
    peer: IpAddr,
    /// The deadline of the handshake. The worker's sweep watches it, so no timer is needed.
    deadline: Instant,
}

/// The result of a handshake.
#[derive(Debug)]
pub enum Asked {
    /// The client's request: serve it, then call [`Handshake::reply`].
    Request(Box<Request>),
    /// Everything was answered (a NOOP).
    Nothing,
}

/// A handshake that failed. The answer of the protocol was already sent.
#[derive(Debug)]
pub struct Refused(pub Failure);

impl Handshake {
    /// Starts the handshake of a new connection.
    pub fn new(
        config: Arc<ServerConfig>,
        sessions: Arc<Mutex<SessionTable>>,
        clock: Clock,
        peer: IpAddr,
    ) -> Self {
        let now = clock.now();
        let deadline = now + config.handshake_timeout;
        Self { machine: Server::new(config, now), sessions, clock, peer, deadline }
    }

    /// Runs the handshake until the client's request is complete.
    ///
    /// # Errors
    /// Fails if the client breaks the protocol, fails to authenticate, disconnects or asks for an unsupported
    /// command.
    pub async fn request(&mut self, client: &mut Client) -> Result<Asked, Refused> {
        let held = client.take_held();
        if !held.is_empty() {
            self.machine.handle(self.clock.now(), Input::Bytes(&held));
        }
        let mut unsent = Vec::new();
        let mut has_read = !held.is_empty();
        loop {
            while let Some(output) = self.machine.poll() {
                match output {
                    Output::Send(bytes) if unsent.is_empty() => unsent = bytes,
                    Output::Send(bytes) => unsent.extend(bytes),
                    Output::Request(request) => {
                        // This sends the authentication reply of version 6. The operation reply follows after
                        // dialling.
                        client.answer_first(&unsent).await.map_err(gone)?;
                        return Ok(Asked::Request(request));
                    }
                    output => {
                        client.answer(&std::mem::take(&mut unsent)).await.map_err(gone)?;
                        match output {
                            Output::Finished => return Ok(Asked::Nothing),
                            Output::Done { leftover } => client.put_last(&leftover),
                            output => self.answer(client, output).await?,
                        }
                    }
                }
            }
            if has_read
                && unsent.is_empty()
                && let Ok(socket) = client.stream.tcp()
            {
                // The client sends in pieces. It may hold one back until the one before is acknowledged (Nagle,
                // RFC 896).
                let _ = sockopt::set_tcp_ack_at_once(socket);
            }
            client.answer(&std::mem::take(&mut unsent)).await.map_err(gone)?;
            self.next_event(client).await?;
            has_read = true;
        }
    }

    /// Sends the client the result of dialling. Bytes that it sent meanwhile stay buffered in `client`.
    ///
    /// # Errors
    /// Fails if the client is gone.
    pub async fn reply(&mut self, client: &mut Client, reply: Reply) -> Result<(), Refused> {
        self.machine.handle(self.clock.now(), Input::Reply(reply));
        while let Some(output) = self.machine.poll() {
            match output {
                Output::Done { leftover } => client.put_last(&leftover),
                // These outputs only repeat what this driver has told the machine.
                Output::Failed { .. } | Output::Finished | Output::Request(_) => {}
                output => self.answer(client, output).await?,
            }
        }
        Ok(())
    }

    async fn answer(&mut self, client: &mut Client, output: Output) -> Result<(), Refused> {
        match output {
            Output::Send(bytes) => client.answer(&bytes).await.map_err(gone),
            Output::Session(query) => {
                let now = self.clock.now();
                let random = sidetrack_sys::random::bytes();
                let answer = {
                    let mut sessions = lock(&self.sessions);
                    sessions.answer(now, self.peer, &query, random)
                };
                self.machine.handle(now, Input::Session(answer));
                Ok(())
            }
            Output::Failed { reason, detail } => Err(Refused(Failure::new(reason, detail))),
            Output::Request(_) | Output::Finished | Output::Done { .. } => Ok(()),
        }
    }

    async fn next_event(&mut self, client: &mut Client) -> Result<(), Refused> {
        let read = match self.machine.deadline().filter(|deadline| *deadline < self.deadline) {
            None => client.read_more().await,
            Some(deadline) => {
                let wait = deadline.since(self.clock.now()).max(Duration::from_millis(1));
                match timeout(wait, client.read_more()).await {
                    Ok(read) => read,
                    Err(_) => {
                        self.machine.handle(self.clock.now(), Input::Tick);
                        return Ok(());
                    }
                }
            }
        };
        let now = self.clock.now();
        match read.map_err(gone)? {
            0 => self.machine.handle(now, Input::Eof),
            _ => self.machine.handle(now, Input::Bytes(&client.take_held())),
        }
        Ok(())
    }
}

fn gone(error: std::io::Error) -> Refused {
    Refused(Failure::new(EndReason::ClientGone, format!("the client left during the handshake: {error}")))
}
