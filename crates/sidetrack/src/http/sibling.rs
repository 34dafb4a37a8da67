//! Siblings: other caches that are asked for a response that is not stored here, before the server is. A dead or slow
//! sibling delays a request by at most [`Patience::MAX`].

use super::buffer::Buffer;
use super::copy::write_all;
use super::duplex::Duplex;
use super::fetch::{Fetched, NoBytes};
use super::htcp::{self, Htcp};
use super::pool::{Route, Server};
use crate::carry::{self, Order};
use crate::reactor::timeout;
use crate::worker::Worker;
use sidetrack_core::flow::{Destination, Flow};
use sidetrack_core::http::fields::{Fields, write_field};
use sidetrack_core::http::forward::{self, Via, keeps_alive};
use sidetrack_core::http::framing::{Decoder, Length, response_length};
use sidetrack_core::http::message::{Method, Response, Scan, Sender};
use sidetrack_core::http::sibling::{Patience, write_question};
use sidetrack_core::http::uri::Resource;
use sidetrack_core::policy::Carry;
use std::cell::RefCell;
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

/// Most bytes of an error page that are read so that its connection can be reused.
const MISS_MAX: u64 = 64 * 1024;

thread_local! {
    /// How fast siblings have answered this worker.
    static PATIENCE: RefCell<HashMap<Destination, Patience>> = RefCell::default();
}

/// The siblings of a cache.
#[derive(Debug)]
pub struct Siblings {
    /// Siblings that are asked by our own message.
    routes: Vec<Route>,
    /// Siblings that are asked by HTCP, with their HTCP addresses; the route leads to their HTTP.
    by_htcp: Vec<(Route, SocketAddr)>,
}

/// A question to siblings.
pub struct Question<'a> {
    /// The worker.
    pub worker: &'a Worker,
    /// The request's flow.
    pub flow: &'a Flow,
    /// The requested resource.
    pub resource: &'a Resource,
    /// The request's fields.
    pub fields: &'a Fields,
    /// The HTCP socket, if there is one.
    pub htcp: Option<&'a Htcp>,
}

/// Request fields that are sent to siblings where the question can contain fields.
const TOLD: [&str; 5] = ["accept", "accept-charset", "accept-encoding", "accept-language", "user-agent"];

/// A sibling's response, if it has one.
type Answered = Option<(Server, Fetched)>;

/// One question to one sibling.
type Asking<'a> = Pin<Box<dyn Future<Output = Answered> + 'a>>;

impl Siblings {
    /// These siblings: `siblings` are asked by our own message, `by_htcp` by HTCP.
    pub fn new(siblings: &[Destination], by_htcp: htcp::Siblings) -> Self {
        // All share one rule object, because connections are pooled by rule and server.
        let carry = Arc::new(Carry::default());
        let route = |to: &Destination| Route { carry: carry.clone(), destination: to.clone(), secure: None };
        let by_htcp = by_htcp.iter().map(|(to, at)| (route(to), *at)).collect();
        Self { routes: siblings.iter().map(route).collect(), by_htcp }
    }

    /// Asks all siblings that usually answer, at the same time; returns the first response.
    pub async fn ask(&self, question: &Question<'_>, pseudonym: &str) -> Answered {
        if self.routes.is_empty() && self.by_htcp.is_empty() {
            return None;
        }
        let text = write_question(question.resource)?;
        let told = question.told();
        let mut asked: Vec<Asking<'_>> = Vec::new();
        for route in &self.routes {
            asked.push(Box::pin(ask_one(question, route, exchange(question, route, &text, &[]))));
        }
        for (route, at) in self.by_htcp.iter().filter(|_| question.htcp.is_some()) {
            asked.push(Box::pin(ask_one(question, route, by_htcp(question, route, *at, &told))));
        }
        let (server, mut fetched) = first(&mut asked).await?;
        forward::response(&mut fetched.response, Via { pseudonym, received: None });
        Some((server, fetched))
    }
}

/// Returns the first response.
async fn first(asked: &mut Vec<Asking<'_>>) -> Answered {
    poll_fn(|cx| {
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
    .await
}

impl Question<'_> {
    fn url(&self) -> Vec<u8> {
        [b"http://", self.resource.host_field().as_bytes(), &self.resource.path].concat()
    }

    /// The field lines that are sent to the sibling.
    fn told(&self) -> Vec<u8> {
        let mut lines = format!("Host: {}\r\n", self.resource.host_field()).into_bytes();
        for (name, value) in self.fields.iter() {
            if TOLD.iter().any(|told| name.eq_ignore_ascii_case(told.as_bytes())) {
                write_field(&mut lines, name, value);
            }
        }
        lines
    }

    /// Whether a response fits the request: it must not vary by a field that the sibling was not sent.
    fn is_answered_by(&self, response: &Response, told: &[&str]) -> bool {
        response.fields.members("vary").all(|name| {
            let is_told = told.iter().any(|told| name.eq_ignore_ascii_case(told.as_bytes()));
            name != b"*" && (is_told || !self.fields.has(name))
        })
    }
}

/// Asks one sibling, unless it was silent recently, and notes how it answered.
async fn ask_one(
    question: &Question<'_>,
    route: &Route,
    exchange: impl Future<Output = io::Result<Answered>>,
) -> Answered {
    let now = || question.worker.clock.now();
    let with = |act: &mut dyn FnMut(&mut Patience)| {
        PATIENCE.with_borrow_mut(|known| act(known.entry(route.destination.clone()).or_default()));
    };
    let mut wait = None;
    with(&mut |patience| wait = patience.wait(now()));
    let began = Instant::now();
    match timeout(wait?, exchange).await {
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

/// Asks by HTCP whether the sibling has it, and then fetches it.
async fn by_htcp(
    question: &Question<'_>,
    route: &Route,
    at: SocketAddr,
    told: &[u8],
) -> io::Result<Answered> {
    let (Some(htcp), url) = (question.htcp, question.url()) else { return Ok(None) };
    if !htcp.ask(at, &url, told).await? {
        return Ok(None);
    }
    let start: [&[u8]; 4] = [b"GET ", &url, b" HTTP/1.1\r\n", told];
    let text = [&start.concat()[..], b"Cache-Control: only-if-cached\r\n\r\n"].concat();
    exchange(question, route, &text, &TOLD).await
}

/// Sends the question and reads the head of the answer; `None`: the sibling has no response.
async fn exchange(
    question: &Question<'_>,
    route: &Route,
    text: &[u8],
    told: &[&str],
) -> io::Result<Answered> {
    let mut server = match route.take(false, |_| true) {
        Some(server) => server,
        None => dial(question.worker, question.flow, route).await?,
    };
    write_all(&server.stream, &mut [IoSlice::new(text)]).await?;
    let response = head(&mut server).await?;
    let length = response_length(&Method::Get, &response).map_err(io::Error::other)?;
    let keeps_alive = keeps_alive(response.version, &response.fields) && length.is_certain;
    server.home = Some(route.clone());
    if response.status == 200 && length.is_certain && question.is_answered_by(&response, told) {
        return Ok(Some((server, Fetched { response, length, keeps_alive, binds: false, stream: None })));
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
        gate: None,
        dialing: &worker.dialing(),
        tunnels: &worker.tunnels,
        warm: &worker.warm,
        traced: None,
    };
    let carried = carry::carry(&order, &mut NoBytes).await.map_err(io::Error::other)?;
    let buffer = Buffer::holding(carried.early);
    Ok(Server {
        stream: Duplex::from(carried.stream),
        buffer,
        address: None,
        is_reused: false,
        home: None,
        is_bound: false,
    })
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

/// Skips the content of an error page; returns whether the connection can be reused.
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
