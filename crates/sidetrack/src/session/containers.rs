//! Functions in containers during the set-up of a path: the flow enters each container and comes back before the
//! next step dials.

use super::hello;
use super::setup::{Setup, gone};
use crate::carry::{Client, Failure, Order};
use crate::function::Leg;
use crate::function::container::{Guest, Intro, Passed, Trouble, pass};
use crate::live::{Spread, Step, profile::Stage};
use crate::reactor::TcpStream;
use sidetrack_core::chain::{Chain, Offered};
use sidetrack_core::flow::{EndReason, Flow, Side};
use sidetrack_core::function::{ChainSpec, OnDown, Stop};
use sidetrack_core::placeholder::{Search, Secrets};
use sidetrack_core::time::Instant;
use std::sync::Arc;
use std::time::Duration;

/// Longest time for one container to pass a flow on. Shorter if the whole path has less time.
const PATIENCE: Duration = Duration::from_secs(5);

/// The functions of a flow during the set-up.
#[derive(Default)]
pub(super) struct Way {
    /// The functions before any container.
    pub chain: Option<Box<Chain>>,
    /// The containers, in order from the client to the server.
    pub joints: Vec<Joint>,
    /// A note for the record about functions that were left out.
    pub note: Option<String>,
    /// Counts what the flow does with its paths of the overlay, if it has several.
    pub spread: Option<Arc<Spread>>,
}

impl Way {
    /// Whether there are functions on the way.
    pub(super) fn has_functions(&self) -> bool {
        self.chain.is_some() || !self.joints.is_empty()
    }

    /// The functions at the end of the way so far.
    pub(super) fn last(&mut self) -> &mut Option<Box<Chain>> {
        self.joints.last_mut().map_or(&mut self.chain, |joint| &mut joint.chain)
    }

    fn skipped(&mut self, leg: &Leg, why: &str) {
        let words = format!("function '{}' was skipped: {why}", leg.name);
        self.note =
            Some(self.note.take().map_or_else(|| words.clone(), |before| format!("{before}; {words}")));
    }
}

/// A container that a flow passes through.
pub(super) struct Joint {
    /// The function's name.
    pub name: Arc<str>,
    /// The connection to the container.
    pub into: TcpStream,
    /// The bytes that it has sent towards the client, after the functions there.
    pub early: Vec<u8>,
    /// The connection back from the container.
    pub back: TcpStream,
    /// The bytes that came back and must go on, after the functions there.
    pub held: Vec<u8>,
    /// The functions between it and the next container, or the server.
    pub chain: Option<Box<Chain>>,
    /// Keeps the container running.
    pub guest: Guest,
}

impl Setup<'_> {
    /// Finds the functions of a flow. Those before the first container go into `way`; the containers are returned.
    ///
    /// # Errors
    /// Fails if a function ends the flow at once.
    pub(super) fn route(
        &self,
        spec: Option<&ChainSpec>,
        flow: &Flow,
        looks_at_hello: bool,
        way: &mut Way,
    ) -> Result<Vec<Leg>, Failure> {
        let mut legs = Vec::new();
        if let Some(spec) = spec {
            let route = self.worker.functions().route(spec, flow).map_err(stopped)?;
            (legs, way.chain) = (route.legs, route.chain);
        }
        let now = self.worker.clock.now();
        if looks_at_hello {
            let about = (&self.config.policy, flow, self.live);
            hello::put_around(way, &mut legs, about, now)?;
        }
        if let Some(secrets) = self.listening.secrets() {
            // Before all functions, which may encrypt what they pass on.
            let search = search(secrets, now)?;
            way.chain = Some(Box::new(match way.chain.take() {
                Some(functions) => search.followed_by(now, *functions).map_err(stopped)?,
                None => search,
            }));
        }
        Ok(legs)
    }

    /// Sends a flow through its containers, one after the other. The client's first bytes go in with the flow.
    /// Bytes that have come back at the end are buffered for the next stage.
    pub(super) async fn pass_containers(
        &self,
        legs: Vec<Leg>,
        flow: &Flow,
        (client, way): (&mut Client, &mut Way),
        order: &mut Order<'_>,
    ) -> Result<(), Failure> {
        let mut first = client.take_held();
        for (index, leg) in legs.into_iter().enumerate() {
            let passing = self.pass_one(&leg, flow, &first, order);
            let (presence, _) = client.split();
            let passed = tokio::select! {
                biased;
                passed = passing => passed,
                () = presence.lost() => return Err(gone()),
            };
            match passed {
                Ok((guest, passed)) => {
                    order.metadata.clone_from(&passed.metadata);
                    self.live.step(Step::Container(u8::try_from(index).unwrap_or(u8::MAX)));
                    first = self.join(leg, guest, passed, way)?;
                }
                Err(Trouble::Failed(failure)) => return Err(blame(&leg, failure)),
                Err(Trouble::Down(why)) => match leg.on_down {
                    OnDown::Deny => return Err(blame(&leg, denied(&why))),
                    OnDown::Skip => {
                        way.skipped(&leg, &why);
                        first = self.skip(leg, first, way)?;
                    }
                },
            }
        }
        client.put_first(first);
        Ok(())
    }

    /// Passes one of the function's containers. Tries another one if the first cannot be reached.
    async fn pass_one(
        &self,
        leg: &Leg,
        flow: &Flow,
        first: &[u8],
        order: &Order<'_>,
    ) -> Result<(Guest, Passed), Trouble> {
        let pool = leg.pool().map_err(Trouble::Down)?;
        let limit = order.carry.connect_timeout_ms.unwrap_or(self.config.limits.connect_timeout_ms);
        let intro = Intro {
            id: self.live.id,
            client: flow.client,
            destination: &order.destination,
            host: order.host,
            metadata: &order.metadata,
            first,
            // Less than the time of the whole path. Otherwise it would not be known which part was late.
            patience: PATIENCE.min(Duration::from_millis(limit) * 3 / 4),
        };
        let mut refused = Vec::new();
        let mut why = None;
        loop {
            let guest = match pool.pick(&refused) {
                Ok(guest) => guest,
                Err(none) => return Err(Trouble::Down(why.unwrap_or(none))),
            };
            match pass(&guest, intro).await {
                Ok(passed) => return Ok((guest, passed)),
                Err(Trouble::Down(said)) => {
                    refused.push(guest.number);
                    why = Some(said);
                }
                Err(failed) => return Err(failed),
            }
        }
    }

    /// Adds the container to the way. Returns the bytes that came back so far, after the functions that follow.
    fn join(&self, mut leg: Leg, guest: Guest, passed: Passed, way: &mut Way) -> Result<Vec<u8>, Failure> {
        let now = self.worker.clock.now();
        let early = match way.last() {
            Some(chain) => offered(chain, now, Side::Server, passed.early)?,
            None => passed.early,
        };
        let first = match &mut leg.chain {
            Some(chain) => offered(chain, now, Side::Client, passed.held)?,
            None => passed.held,
        };
        let Leg { name, chain, .. } = leg;
        let (into, back) = (passed.into, passed.back);
        way.joints.push(Joint { name, into, early, back, held: Vec::new(), chain, guest });
        Ok(first)
    }

    /// Leaves a container out: the functions after it are joined to those before it.
    fn skip(&self, leg: Leg, first: Vec<u8>, way: &mut Way) -> Result<Vec<u8>, Failure> {
        let Some(mut next) = leg.chain else { return Ok(first) };
        let now = self.worker.clock.now();
        let first = offered(&mut next, now, Side::Client, first)?;
        let before = way.last();
        *before = Some(match before.take() {
            Some(chain) => Box::new(chain.followed_by(now, *next).map_err(stopped)?),
            None => next,
        });
        Ok(first)
    }
}

/// Ends a flow whose client sends the placeholder of a secret.
pub(super) fn search(secrets: &Arc<Secrets>, now: Instant) -> Result<Chain, Failure> {
    Chain::new(vec![("secrets".into(), Box::new(Search::new(secrets)))], now).map_err(stopped)
}

fn denied(why: &str) -> Failure {
    stopped(Stop::failed(format!("down, and the rule says on_function_down = \"deny\": {why}")))
}

fn blame(leg: &Leg, failure: Failure) -> Failure {
    let reason = match failure.reason {
        EndReason::FunctionRefused => EndReason::FunctionRefused,
        _ => EndReason::FunctionFailed,
    };
    Failure::new(reason, format!("function '{}': {}", leg.name, failure.detail))
}

/// Passes bytes from the set-up through these functions and returns the output.
pub(super) fn offered(
    chain: &mut Chain,
    now: Instant,
    from: Side,
    bytes: Vec<u8>,
) -> Result<Vec<u8>, Failure> {
    if bytes.is_empty() && from == Side::Server {
        return Ok(bytes);
    }
    let done = match bytes.is_empty() {
        true => Offered::Inside,
        false => Stage::Functions.time(|| chain.handle(now, from, &bytes)).map_err(stopped)?,
    };
    Ok(match done {
        Offered::Unchanged => bytes,
        Offered::Inside => chain.take(from, usize::MAX).to_vec(),
    })
}

pub(super) fn stopped(stop: sidetrack_core::function::Stop) -> Failure {
    Failure::new(stop.reason, stop.detail)
}
