//! Siblings: other caches that are asked for what is not stored here, before the server is. One that is dead or slow
//! costs no more than [`Patience::MAX`].

use super::buffer::Buffer;
use super::duplex::Duplex;
use super::fetch::{Fetched, NoBytes};
use super::pool::{Route, Server};
use super::relay::write_all;
use crate::carry::{self, Order};
use crate::reactor::timeout;
use crate::worker::Worker;
use sidetrack_core::flow::{Destination, Flow};
use sidetrack_core::http::forward::{self, keeps_alive};
use sidetrack_core::http::framing::{Decoder, Length, response_length};
use sidetrack_core::http::message::{Method, Response, Scan, Sender};
use sidetrack_core::http::sibling::{Patience, write_question};
use sidetrack_core::http::uri::Resource;
use sidetrack_core::policy::Carry;
use std::cell::RefCell;
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

/// Most bytes of a miss's page that are read so that its connection can be used again.
const MISS_MAX: u64 = 64 * 1024;

thread_local! {
    /// How siblings have answered this worker.
    static PATIENCE: RefCell<HashMap<Destination, Patience>> = RefCell::default();
}

/// The siblings of a cache.
#[derive(Debug)]
pub struct Siblings {
    routes: Vec<Route>,
}

/// One question to one sibling.
type Asking<'a> = Pin<Box<dyn Future<Output = Option<(Server, Fetched)>> + 'a>>;

impl Siblings {
    /// These.
    pub fn new(siblings: &[Destination]) -> Self {
        // One way for all: connections are kept by the way and the server they lead to.
        let carry = Arc::new(Carry::default());
        let route = |to: &Destination| Route { carry: carry.clone(), destination: to.clone(), secure: None };
        Self { routes: siblings.iter().map(route).collect() }
    }

    /// Asks all that answer as a rule, at the same time; the first that has it.
    pub async fn ask(
        &self,
        worker: &Worker,
        flow: &Flow,
        resource: &Resource,
        pseudonym: &str,
    ) -> Option<(Server, Fetched)> {
        if self.routes.is_empty() {
            return None;
        }
        let question = write_question(resource)?;
        let asking = |route| Box::pin(ask_one(worker, flow, route, &question)) as Asking<'_>;
        let mut asked: Vec<Asking<'_>> = self.routes.iter().map(asking).collect();
        let (server, mut fetched) = poll_fn(|cx| {
            let mut index = 0;
            while let Some(one) = asked.get_mut(index) {
                match one.as_mut().poll(cx) {
                    Poll::Ready(Some(hit)) => return Poll::Ready(Some(hit)),
                    Poll::Ready(None) => drop(asked.swap_remove(index)),
                    Poll::Pending => index += 1,
                }
            }
            if asked.is_empty() { Poll::Ready(None) } else { Poll::Pending }
        })
        .await?;
        forward::response(&mut fetched.response, pseudonym);
        Some((server, fetched))
    }
}

/// Asks one, if it is to be asked now, and remembers how it answered.
async fn ask_one(worker: &Worker, flow: &Flow, route: &Route, question: &[u8]) -> Option<(Server, Fetched)> {
    let now = || worker.clock.now();
    let with = |act: &mut dyn FnMut(&mut Patience)| {
        PATIENCE.with_borrow_mut(|known| act(known.entry(route.destination.clone()).or_default()));
    };
    let mut wait = None;
    with(&mut |patience| wait = patience.wait(now()));
    let began = Instant::now();
    match timeout(wait?, exchange(worker, flow, route, question)).await {
        Ok(Ok(answer)) => {
            with(&mut |patience| patience.answered(began.elapsed()));
            answer
        }
        Ok(Err(error)) => {
            tracing::debug!(sibling = %route.destination, %error, "cannot be asked");
            with(&mut |patience| patience.silent(now()));
            None
        }
        Err(_) => {
            with(&mut |patience| patience.silent(now()));
            None
        }
    }
}

/// The question and the head of the answer; `None`: it has nothing.
async fn exchange(
    worker: &Worker,
    flow: &Flow,
    route: &Route,
    question: &[u8],
) -> io::Result<Option<(Server, Fetched)>> {
    let mut server = match route.take(false) {
        Some(server) => server,
        None => dial(worker, flow, route).await?,
    };
    write_all(&server.stream, &mut [IoSlice::new(question)]).await?;
    let response = head(&mut server).await?;
    let length = response_length(&Method::Get, &response).map_err(io::Error::other)?;
    let keeps_alive = keeps_alive(response.version, &response.fields) && length.is_certain;
    server.home = Some(route.clone());
    if response.status == 200 && length.is_certain {
        return Ok(Some((server, Fetched { response, length, keeps_alive })));
    }
    if keeps_alive && skip(&mut server, length.length).await? {
        route.put(server);
    }
    Ok(None)
}

async fn dial(worker: &Worker, flow: &Flow, route: &Route) -> io::Result<Server> {
    let order = Order {
        carry: &route.carry,
        destination: route.destination.clone(),
        client: flow.client,
        host: None,
        stack: &[],
        metadata: Vec::new(),
        dialing: &worker.dialing(),
        tunnels: &worker.tunnels,
        warm: &worker.warm,
    };
    let carried = carry::carry(&order, &mut NoBytes).await.map_err(io::Error::other)?;
    let buffer = Buffer::holding(carried.early);
    Ok(Server { stream: Duplex::from(carried.stream), buffer, is_reused: false, home: None })
}

async fn head(server: &mut Server) -> io::Result<Response> {
    let mut scan = Scan::default();
    loop {
        let found = scan.advance(server.buffer.data(), Sender::Server).map_err(io::Error::other)?;
        if let Some(length) = found {
            let head = server.buffer.data().get(..length).unwrap_or_default();
            let response = Response::parse(head).map_err(io::Error::other)?;
            server.buffer.consume(length);
            return Ok(response);
        }
        if server.buffer.fill(&server.stream).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// Reads past the content of a miss; whether the connection is in step then.
async fn skip(server: &mut Server, length: Length) -> io::Result<bool> {
    if !matches!(length, Length::None | Length::Exact(0..=MISS_MAX)) {
        return Ok(false);
    }
    let mut decoder = Decoder::new(length);
    while !decoder.is_done() {
        if server.buffer.is_empty() && server.buffer.fill(&server.stream).await? == 0 {
            return Ok(false);
        }
        let consumed = decoder.decode(server.buffer.data()).map_err(io::Error::other)?.consumed;
        server.buffer.consume(consumed);
    }
    Ok(true)
}
