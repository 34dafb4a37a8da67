//! HTTP/3 on a QUIC connection: what listeners and hops share. The machines of core read the streams; this drives them with quinn.

mod dial;
mod hop;
mod path;
pub mod pump;

pub use dial::Goal;
pub use hop::dial;
pub use path::is_nowhere;

use crate::reactor;
use bytes::Bytes;
use quinn::{
    Connection, IdleTimeout, ReadError, RecvStream, SendStream, StreamId, TransportConfig, VarInt, WriteError,
};
use sidetrack_core::http::capsule::put_varint;
use sidetrack_core::http::h3::frame::{DATA, Settings, put_goaway, put_header};
use sidetrack_core::http::h3::message::{Lines, Message, Part, Request};
use sidetrack_core::http::h3::uni::{CONTROL, Opened, Said, Uni};
use sidetrack_core::http::h3::{Code, Error, datagram};
use sidetrack_core::http::message::Sender;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Most streams that a client may open at the same time.
const STREAMS_MAX: u32 = 100;
/// Most unidirectional streams of a peer at the same time: control, both of QPACK, and some that are not known here.
const UNI_MAX: u32 = 8;
/// Most bytes of content that are buffered for us in one stream.
const STREAM_WINDOW: u32 = 256 * 1024;
/// The same limit for all streams of a connection together. All of them fit, so that unread streams do not stop the others.
const CONNECTION_WINDOW: u32 = STREAMS_MAX * STREAM_WINDOW;
/// Most bytes of datagrams that wait in one direction of a connection.
const DATAGRAMS_BYTES: usize = 1024 * 1024;
/// Most datagrams that wait for one stream.
const WAITING_MAX: usize = 256;
/// Most bytes of one read.
const READ_BYTES: usize = 64 * 1024;
/// The time without any packet after which a connection is lost.
const LOST_AFTER: Duration = Duration::from_secs(90);

/// Returns the transport parameters of both ends.
pub fn transport() -> TransportConfig {
    let mut config = TransportConfig::default();
    config
        // Fails above 2^62 ms.
        .max_idle_timeout(IdleTimeout::try_from(LOST_AFTER).ok())
        .max_concurrent_bidi_streams(STREAMS_MAX.into())
        .max_concurrent_uni_streams(UNI_MAX.into())
        .stream_receive_window(STREAM_WINDOW.into())
        .receive_window(CONNECTION_WINDOW.into())
        .datagram_receive_buffer_size(Some(DATAGRAMS_BYTES))
        .datagram_send_buffer_size(DATAGRAMS_BYTES);
    config
}

/// Returns the number of an error code.
pub fn number(code: Code) -> VarInt {
    // All codes are small.
    VarInt::from_u64(code.value()).unwrap_or(VarInt::MAX)
}

/// Returns the id of a stream as a number.
pub fn id_of(id: StreamId) -> u64 {
    VarInt::from(id).into_inner()
}

/// One connection: its control streams, and the datagrams for its requests.
#[derive(Debug)]
pub struct Peer {
    connection: Connection,
    /// Who the peer is.
    sender: Sender,
    /// Our control stream, which must stay open.
    control: RefCell<Option<SendStream>>,
    opened: Cell<Opened>,
    settings: watch::Sender<Option<Settings>>,
    /// The peer takes no more requests.
    is_leaving: Cell<bool>,
    /// Where the datagrams of each stream go.
    takers: RefCell<BTreeMap<u64, mpsc::Sender<Bytes>>>,
}

/// Receives the datagrams of one stream until it is dropped.
#[derive(Debug)]
pub struct Datagrams {
    peer: Rc<Peer>,
    stream: u64,
    waiting: mpsc::Receiver<Bytes>,
}

impl Peer {
    /// Begins HTTP/3 on a connection with this peer: opens our control stream, and listens to the peer's.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn begin(connection: Connection, sender: Sender) -> Result<Rc<Self>, String> {
        let mut control = connection.open_uni().await.map_err(|error| error.to_string())?;
        let mut opening = Vec::with_capacity(32);
        put_varint(&mut opening, CONTROL);
        Settings::ours(sender == Sender::Client).put(&mut opening);
        control.write_all(&opening).await.map_err(|error| error.to_string())?;
        let peer = Rc::new(Self {
            connection,
            sender,
            control: RefCell::new(Some(control)),
            opened: Cell::default(),
            settings: watch::channel(None).0,
            is_leaving: Cell::default(),
            takers: RefCell::default(),
        });
        reactor::spawn(accept(peer.clone()));
        reactor::spawn(pass_datagrams(peer.clone()));
        Ok(peer)
    }

    /// The connection.
    pub const fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Waits until the peer has told its settings: then it has accepted us. Returns false if the connection is lost before.
    pub async fn told(&self) -> bool {
        let mut settings = self.settings.subscribe();
        tokio::select! {
            told = settings.wait_for(Option::is_some) => told.is_ok(),
            _ = self.connection.closed() => false,
        }
    }

    /// Whether the peer has said that it takes no more requests.
    pub fn is_leaving(&self) -> bool {
        self.is_leaving.get()
    }

    /// Whether a datagram of this length may be sent: the peer accepts datagrams, and the path has room for it.
    pub fn takes_datagram(&self, length: usize) -> bool {
        self.settings.borrow().is_some_and(|settings| settings.has_datagrams)
            && self.connection.max_datagram_size().is_some_and(|most| length <= most)
    }

    /// Registers for the datagrams of a stream.
    pub fn datagrams(self: &Rc<Self>, stream: u64) -> Datagrams {
        let (sender, waiting) = mpsc::channel(WAITING_MAX);
        self.takers.borrow_mut().insert(stream, sender);
        Datagrams { peer: self.clone(), stream, waiting }
    }

    /// Ends the connection because of an error of the peer.
    pub fn abort(&self, error: Error) {
        tracing::debug!(code = error.code.value(), why = error.why, "an HTTP/3 connection is aborted");
        self.connection.close(number(error.code), error.why.as_bytes());
    }

    /// Tells a client that requests from this stream id on are not processed.
    pub async fn goaway(&self, id: u64) {
        let Some(mut control) = self.control.take() else { return };
        let mut frame = Vec::with_capacity(12);
        put_goaway(&mut frame, id);
        // An error means that the connection is over.
        let _ = control.write_all(&frame).await;
        self.control.replace(Some(control));
    }
}

impl Datagrams {
    /// Returns the payload of the next datagram; never, if no more come.
    pub async fn next(&mut self) -> Bytes {
        match self.waiting.recv().await {
            Some(payload) => payload,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.peer.takers.borrow_mut().remove(&self.stream);
    }
}

/// Accepts the unidirectional streams of a peer.
async fn accept(peer: Rc<Peer>) {
    while let Ok(stream) = peer.connection.accept_uni().await {
        reactor::spawn(listen(peer.clone(), stream));
    }
}

/// Reads one unidirectional stream to its end.
async fn listen(peer: Rc<Peer>, mut stream: RecvStream) {
    let mut uni = Uni::new(peer.sender);
    loop {
        let bytes = match stream.read_chunk(READ_BYTES, true).await {
            Ok(Some(chunk)) => chunk.bytes,
            Ok(None) | Err(ReadError::Reset(_)) => {
                if let Err(error) = uni.end() {
                    peer.abort(error);
                }
                return;
            }
            Err(_) => return,
        };
        let mut rest = &bytes[..];
        loop {
            let mut opened = peer.opened.get();
            let said = uni.next(&mut rest, &mut opened);
            peer.opened.set(opened);
            match said {
                Ok(None) => break,
                Ok(Some(Said::Settings(settings))) => {
                    peer.settings.send_replace(Some(settings));
                }
                Ok(Some(Said::Goaway(_))) => peer.is_leaving.set(true),
                Ok(Some(Said::Unknown)) => {
                    // This fails only if the stream is over.
                    let _ = stream.stop(number(Code::StreamCreation));
                    return;
                }
                Err(error) => return peer.abort(error),
            }
        }
    }
}

/// Passes datagrams to their streams. Those that find no stream, or too many before them, are dropped.
async fn pass_datagrams(peer: Rc<Peer>) {
    while let Ok(bytes) = peer.connection.read_datagram().await {
        match datagram::read(&bytes) {
            Ok((stream, Some(payload))) => {
                if let Some(taker) = peer.takers.borrow().get(&stream) {
                    let _ = taker.try_send(bytes.slice_ref(payload));
                }
            }
            Ok((_, None)) => {}
            Err(error) => return peer.abort(error),
        }
    }
}

/// A part of a message.
#[derive(Debug)]
pub enum Came {
    /// The head of a request.
    Request(Request),
    /// The head of a response.
    Response(u16, Lines),
    /// Content.
    Content(Bytes),
    /// Trailers.
    Trailers(Lines),
}

/// Why a stream cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The peer has broken the protocol, or we abort the stream for this reason.
    #[error(transparent)]
    Protocol(#[from] Error),
    /// The peer has reset the stream, or the connection is lost.
    #[error(transparent)]
    Cut(ReadError),
    /// The peer takes no more, or the connection is lost.
    #[error("{0}")]
    Gone(String),
}

impl From<WriteError> for Broken {
    fn from(error: WriteError) -> Self {
        Self::Gone(error.to_string())
    }
}

/// Reads the messages of one stream.
#[derive(Debug)]
pub struct Reading {
    stream: RecvStream,
    message: Message,
    chunk: Bytes,
    held: Option<Came>,
    is_over: bool,
}

impl Reading {
    /// Reads a stream with this machine.
    pub const fn new(stream: RecvStream, message: Message) -> Self {
        Self { stream, message, chunk: Bytes::new(), held: None, is_over: false }
    }

    /// Puts a part back, which is then the next one.
    pub fn put_back(&mut self, came: Option<Came>) {
        self.held = came;
    }

    /// Returns the next part; `None` at the end of the message. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The stream cannot go on.
    pub async fn next(&mut self) -> Result<Option<Came>, Broken> {
        if let Some(held) = self.held.take() {
            return Ok(Some(held));
        }
        loop {
            let bytes = std::mem::take(&mut self.chunk);
            let mut rest = &bytes[..];
            let part = self.message.next(&mut rest)?;
            let used = bytes.len() - rest.len();
            let came = part.map(|part| match part {
                Part::Request(request) => Came::Request(request),
                Part::Response(status, lines) => Came::Response(status, lines),
                Part::Content(content) => Came::Content(bytes.slice_ref(content)),
                Part::Trailers(lines) => Came::Trailers(lines),
            });
            self.chunk = bytes.slice(used..);
            if came.is_some() || self.is_over {
                return Ok(came);
            }
            match self.stream.read_chunk(READ_BYTES, true).await {
                Ok(Some(chunk)) => self.chunk = chunk.bytes,
                Ok(None) => {
                    self.is_over = true;
                    self.message.end()?;
                }
                Err(error) => return Err(Broken::Cut(error)),
            }
        }
    }

    /// Tells the peer that the rest of the stream is not read.
    pub fn stop(&mut self, code: Code) {
        // This fails only if the stream is over.
        let _ = self.stream.stop(number(code));
    }
}

/// Sends content.
///
/// # Errors
/// The peer or the connection is gone.
pub async fn send_data(stream: &mut SendStream, content: Bytes) -> Result<(), Broken> {
    if content.is_empty() {
        return Ok(());
    }
    let mut header = Vec::with_capacity(9);
    put_header(&mut header, DATA, content.len());
    stream.write_all_chunks(&mut [header.into(), content]).await?;
    Ok(())
}
