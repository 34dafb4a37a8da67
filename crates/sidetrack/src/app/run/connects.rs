//! Connects of a command that policy denies: they fail with `EACCES` before a packet is sent.
//!
//! One thread answers the kernel's questions about connect(2) of the command ([`sidetrack_sys::connects`]). It asks policy whether the
//! destination is denied whatever the first bytes are. Everything else goes on: the network decides about it as before.

use crate::config::Config;
use crate::intercept::{Catches, Listening, redirect};
use crate::live::{Clock, Decided};
use crate::process;
use arc_swap::ArcSwap;
use sidetrack_core::flow::{Flow, Host, Process};
use sidetrack_core::policy::{Action, Decision, Seen};
use sidetrack_sys::connects::{Question, Questions};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// What is needed to answer.
pub(super) struct Answers {
    /// The questions.
    pub(super) questions: Questions,
    /// The listener that catches the command's connections.
    pub(super) listening: Arc<Listening>,
    /// A socket in the network that the command has.
    pub(super) network: OwnedFd,
    /// The rules.
    pub(super) config: Arc<ArcSwap<Config>>,
    /// The clock of names.
    pub(super) clock: Clock,
    /// Records what was refused.
    pub(super) record: Box<dyn Fn(Decided) + Send>,
}

impl Answers {
    /// Starts the thread that answers. It ends with the last process of the command.
    ///
    /// # Errors
    /// The system gives no thread.
    pub(super) fn start(self) -> io::Result<()> {
        let answering = move || {
            if let Err(error) = self.run() {
                tracing::error!(%error, "denied connects are not refused by EACCES any more");
            }
        };
        std::thread::Builder::new().name("connects".into()).spawn(answering).map(drop)
    }

    fn run(&self) -> io::Result<()> {
        while let Some(question) = self.questions.wait()? {
            // Only a refusal costs more than the look at the rules.
            let denied = self.denied(&question);
            match denied.filter(|_| self.questions.is_tcp_of_network(&question, &self.network)) {
                Some(decided) => {
                    // First the record: afterwards the command may end, and we with it.
                    (self.record)(decided);
                    self.questions.refuse(&question);
                }
                None => self.questions.go_on(&question),
            }
        }
        Ok(())
    }

    /// The flow that this connect would begin, if policy denies it whatever comes.
    fn denied(&self, question: &Question) -> Option<Decided> {
        let server = question.server?;
        let Catches::Run(run) = &self.listening.catches else { return None };
        // A server of the command may listen there.
        if server.ip().is_loopback() || server.ip().is_unspecified() || server == run.resolver {
            return None;
        }
        let mut flow = self.flow(server)?;
        let config = self.config.load();
        loop {
            match config.policy.decide(&flow, Seen::Nothing) {
                Decision::Verdict(verdict) => {
                    if !matches!(verdict.action, Action::Deny) {
                        return None;
                    }
                    flow.process.get_or_insert_with(|| program(question));
                    return Some(Decided::new(flow, Some(verdict)).by(&config.policy));
                }
                Decision::NeedFirstBytes { .. } => return None,
                Decision::NeedProcess { .. } if flow.process.is_some() => return None,
                Decision::NeedProcess { .. } => flow.process = Some(program(question)),
            }
        }
    }

    fn flow(&self, server: SocketAddr) -> Option<Flow> {
        let destination = redirect::captured(server, &self.listening, &self.clock).ok()?;
        let any = match server.ip() {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let host = match &destination.host {
            Host::Name(name) => Some(name.clone()),
            Host::Ip(_) => None,
        };
        Some(Flow {
            protocol: self.listening.protocol,
            intercept: self.listening.catches.intercept(),
            listener: self.listening.name.clone(),
            // The socket has no address yet.
            client: SocketAddr::new(any, 0),
            orig_dst: destination,
            host,
            process: None,
            user: None,
        })
    }
}

fn program(question: &Question) -> Process {
    question.process().map_or_else(Process::default, process::described)
}
