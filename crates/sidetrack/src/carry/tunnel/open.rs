//! Opens one flow through a tunnel: sends the request with the client's first bytes, then more bytes while the
//! answer is pending, and reads the answer.

use super::lanes::Lane;
use super::path::{Path, Route};
use super::{Stream, quic};
use crate::carry::hops::Nothing;
use crate::carry::{Carried, Failure, FirstBytes, Order};
use crate::live::{Taken, Transport};
use sidetrack_core::flow::{Destination, EndReason};
use sidetrack_core::hold::Answer;
use sidetrack_core::tunnel::{MessageError, Parsed, Reply, Request};
use sidetrack_sys::sockopt::canonical;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWriteExt, ReadBuf};

/// Most bytes of the client that are sent before the far side has answered. The far side buffers them while it
/// dials.
const EARLY_MAX: usize = 1 << 14;

/// Why a path did not accept a flow.
enum Refusal {
    /// No client byte was sent: another path may be tried.
    Again(Failure),
    /// The flow must end.
    Final(Failure),
}

/// Carries a flow through the tunnel `name`.
pub(crate) async fn carry(
    order: &Order<'_>,
    name: &str,
    destination: Destination,
    first: &mut impl FirstBytes,
) -> Result<Carried, Failure> {
    open(order, name, destination, false, first).await.map(|(carried, _)| carried)
}

/// Carries a flow of UDP through the tunnel `name`. Returns its stream, and its datagrams beside the stream if the connection
/// carries any.
pub(crate) async fn associate(order: &Order<'_>, name: &str) -> Result<(Carried, Option<Lane>), Failure> {
    let opened = open(order, name, order.destination.clone(), true, &mut Nothing).await;
    opened.map_err(|failure| {
        if MessageError::means_no_datagrams(&failure.detail) {
            let why = format!("tunnel '{name}': the far side is older than this end and carries no UDP");
            return Failure::new(EndReason::Unsupported, why);
        }
        failure
    })
}

async fn open(
    order: &Order<'_>,
    name: &str,
    destination: Destination,
    has_datagrams: bool,
    first: &mut impl FirstBytes,
) -> Result<(Carried, Option<Lane>), Failure> {
    let Some(tunnel) = order.tunnels.find(name) else {
        return Err(Failure::new(EndReason::Internal, format!("there is no tunnel '{name}' on this worker")));
    };
    let own = order.carry.metadata.iter().map(|(key, value)| (*key, value.clone()));
    let metadata = order.metadata.iter().map(|pair| (pair.key, pair.value.clone())).chain(own).collect();
    // The context is chosen with the connection. Over TLS it has no meaning.
    let datagrams = has_datagrams.then_some(0);
    let mut request =
        Request { destination, host: order.host.cloned(), client: Some(order.client), metadata, datagrams };
    // In the order of the configuration, but paths that are up and not silent come first, and paths that are
    // down last.
    let mut paths: Vec<_> = tunnel.paths.iter().collect();
    paths.sort_by_key(|path| (path.is_doubtful(), !path.is_up()));
    let mut failed = None;
    for path in paths {
        let told = |failure: Failure| Failure {
            detail: format!("tunnel '{name}', path {}: {failure}", path.address()),
            ..failure
        };
        match through(path, &mut request, first).await {
            Ok(carried) => return Ok(carried),
            Err(Refusal::Final(failure)) => return Err(told(failure)),
            Err(Refusal::Again(failure)) => drop(failed.get_or_insert(told(failure))),
        }
    }
    Err(failed.unwrap_or_else(|| Failure::new(EndReason::Internal, format!("tunnel '{name}' has no path"))))
}

async fn through(
    path: &Rc<Path>,
    request: &mut Request,
    first: &mut impl FirstBytes,
) -> Result<(Carried, Option<Lane>), Refusal> {
    let (stream, transport, address) = match path.route().await.map_err(Refusal::Again)? {
        Route::Quic(connection, peer, lanes) => {
            let address = connection.remote_address();
            let streams = connection.open_bi().await;
            let failed = |error| Refusal::Again(quic::failure(address, &error));
            (Stream::quic(streams.map_err(failed)?, peer, lanes), Transport::Quic, address)
        }
        Route::Tls(pool) => (pool.take().await.map_err(Refusal::Again)?, Transport::Tls, pool.address()),
    };
    // Opened before the request leaves: the far side's datagrams may overtake its answer.
    let lane = request.datagrams.and_then(|_| stream.lanes().map(|lanes| lanes.open()));
    if let Some(lane) = &lane {
        request.datagrams = Some(lane.context());
    }
    let bytes = request
        .encode()
        .map_err(|error| Refusal::Final(Failure::new(EndReason::BadRequest, error.to_string())))?;
    let carried = ask(stream, Taken { transport, address: canonical(address) }, &bytes, first).await?;
    Ok((carried, lane))
}

async fn ask(
    mut stream: Stream,
    taken: Taken,
    request: &[u8],
    first: &mut impl FirstBytes,
) -> Result<Carried, Refusal> {
    let mut sent = 0;
    let answer = converse(&mut stream, request, first, &mut sent).await;
    match answer {
        Ok((Reply::Connected { bound }, early)) => {
            let stream = crate::carry::Stream::Tunnel(Box::new(stream));
            let (stack, taken) = (Vec::new(), Some(taken));
            Ok(Carried { stream, early, bound, sent, stack, taken, leads_to: None, spread: None })
        }
        Ok((Reply::Refused { reason, detail }, _)) => Err(Refusal::Final(refused(reason, &detail))),
        Err(failure) => {
            // Another path may be tried only if no client byte was sent: the far side may have passed it on.
            stream.close(true);
            Err(if sent == 0 { Refusal::Again(failure) } else { Refusal::Final(failure) })
        }
    }
}

/// Sends the request with the client's bytes so far, and later bytes, until the answer arrives. Returns the
/// answer and the server's bytes after it.
async fn converse(
    stream: &mut Stream,
    request: &[u8],
    first: &mut impl FirstBytes,
    sent: &mut usize,
) -> Result<(Reply, Vec<u8>), Failure> {
    let held = first.held();
    let early = held.len().min(EARLY_MAX);
    let mut opening = Vec::with_capacity(request.len() + early);
    opening.extend_from_slice(request);
    opening.extend_from_slice(&held[..early]);
    stream.write_all(&opening).await.map_err(|error| broken(&error))?;
    *sent = early;
    let mut answer = Vec::new();
    loop {
        match Reply::parse(&answer) {
            Parsed::Message(reply, consumed) => return Ok((reply, answer.split_off(consumed))),
            Parsed::Malformed(error) => {
                return Err(Failure::new(EndReason::HopFailed, format!("its answer: {error}")));
            }
            Parsed::Incomplete => {}
        }
        let more = poll_fn(|cx| {
            if let Poll::Ready(read) = poll_answer(stream, cx, &mut answer) {
                return Poll::Ready(read.map(|()| false));
            }
            if *sent < EARLY_MAX { first.poll_more(cx).map(|()| Ok(true)) } else { Poll::Pending }
        });
        if more.await.map_err(|error| broken(&error))? {
            let held = first.held();
            let end = held.len().min(EARLY_MAX);
            let fresh = held.get(*sent..end).unwrap_or_default();
            *sent = end;
            stream.write_all(fresh).await.map_err(|error| broken(&error))?;
        }
    }
}

/// Reads available bytes of the answer.
fn poll_answer(stream: &mut Stream, cx: &mut Context<'_>, answer: &mut Vec<u8>) -> Poll<io::Result<()>> {
    // The buffer is in this function, so that it is on the stack and not part of each flow's future.
    let mut buffer = [0; 2048];
    let mut buffer = ReadBuf::new(&mut buffer);
    ready!(Pin::new(stream).poll_read(cx, &mut buffer))?;
    if buffer.filled().is_empty() {
        return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
    }
    answer.extend_from_slice(buffer.filled());
    Poll::Ready(Ok(()))
}

fn broken(error: &io::Error) -> Failure {
    Failure::new(EndReason::HopFailed, format!("before the far side had answered: {error}"))
}

/// Translates the far side's reason. Reasons about the destination are passed on. All others become
/// `hop_failed`: our own reasons are reserved for our own decisions.
fn refused(reason: EndReason, detail: &str) -> Failure {
    let ours = match reason {
        EndReason::Refused
        | EndReason::Unreachable
        | EndReason::ConnectTimeout
        | EndReason::Dns
        | EndReason::ServerReset => reason,
        _ => EndReason::HopFailed,
    };
    let told = Some(Answer::of_end(reason));
    Failure::new(ours, format!("the far side says {reason}: {detail}")).telling(told)
}
