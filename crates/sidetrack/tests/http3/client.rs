//! A client of HTTP/3 that can also say what it must not.

use quinn::crypto::rustls::QuicClientConfig;
use quinn::{
    ClientConfig, Connection, ConnectionError, Endpoint, EndpointConfig, ReadError, SendStream, VarInt,
};
use sidetrack::carry::h3::{Broken, Datagrams, Peer, Reading, id_of, send_data, transport};
use sidetrack::reactor::{QuicRuntime, block_on, timeout};
use sidetrack::tls::Roots;
use sidetrack_core::http::capsule::{Reader, put_datagram};
use sidetrack_core::http::h3::datagram;
use sidetrack_core::http::h3::message::{Message, Request, put_request};
use sidetrack_core::http::message::Sender;
use sidetrack_testkit::LIMIT;
use std::future::Future;
use std::net::{SocketAddr, UdpSocket};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::Came;

/// Runs a client's work to its end, in bounded time.
pub(super) fn run<T>(work: impl Future<Output = T>) -> T {
    block_on(async { timeout(LIMIT, work).await.expect("in time") }).unwrap()
}

/// The bytes of a request's head.
pub(super) fn ask(request: &Request) -> Vec<u8> {
    let mut out = Vec::new();
    put_request(&mut out, request);
    out
}

/// A connection.
pub(super) struct Client {
    pub(super) connection: Connection,
    peer: Rc<Peer>,
    endpoint: Endpoint,
}

/// A request stream.
pub(super) struct Stream {
    send: SendStream,
    reading: Reading,
    peer: Rc<Peer>,
    datagrams: Datagrams,
    capsules: Reader,
}

impl Client {
    pub(super) async fn connect(to: SocketAddr, ca: &str) -> Self {
        Self::named(to, ca, "proxy.example").await
    }

    /// Connects to a server whose certificate has this name.
    pub(super) async fn named(to: SocketAddr, ca: &str, name: &str) -> Self {
        let mut tls = Roots::of(ca).unwrap().client().unwrap();
        tls.alpn_protocols = vec![b"h3".to_vec()];
        let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(Arc::new(tls)).unwrap()));
        config.transport_config(Arc::new(transport()));
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let runtime = Arc::new(QuicRuntime);
        let endpoint = Endpoint::new(EndpointConfig::default(), None, socket, runtime).unwrap();
        let connection = endpoint.connect_with(config, to, name).unwrap().await.unwrap();
        let peer = Peer::begin(connection.clone(), Sender::Server).await.unwrap();
        assert!(peer.told().await, "the server begins HTTP/3");
        Self { connection, peer, endpoint }
    }

    /// Opens a request stream with these bytes.
    pub(super) async fn raw(&self, bytes: &[u8]) -> Stream {
        let (mut send, recv) = self.connection.open_bi().await.unwrap();
        // The server may have stopped reading already.
        let _ = send.write_all(bytes).await;
        let reading = Reading::new(recv, Message::new(Sender::Server));
        let datagrams = self.peer.datagrams(id_of(send.id()));
        Stream { send, reading, peer: self.peer.clone(), datagrams, capsules: Reader::default() }
    }

    pub(super) async fn open(&self, request: &Request) -> Stream {
        self.raw(&ask(request)).await
    }

    /// Sends a whole request, and returns the status and the content of the answer.
    pub(super) async fn fetch(&self, request: &Request, content: &[u8]) -> (u16, String) {
        let mut stream = self.open(request).await;
        stream.send(content).await;
        stream.finish();
        (stream.status().await, stream.rest().await)
    }

    /// Opens a unidirectional stream with these bytes, and leaves it open.
    pub(super) async fn uni(&self, bytes: &[u8]) {
        let mut stream = self.connection.open_uni().await.unwrap();
        stream.write_all(bytes).await.unwrap();
        std::mem::forget(stream);
    }

    /// The code with which the server closes the connection.
    pub(super) async fn closed(&self) -> u64 {
        match self.connection.closed().await {
            ConnectionError::ApplicationClosed(close) => close.error_code.into_inner(),
            other => panic!("{other}"),
        }
    }

    /// Closes the connection, and waits until the server knows.
    pub(super) async fn leave(self) {
        self.connection.close(VarInt::from_u32(0x100), b"");
        self.endpoint.wait_idle().await;
    }

    /// Whether one more stream can be opened now.
    pub(super) async fn opens_another(&self) -> bool {
        timeout(Duration::from_millis(100), self.connection.open_bi()).await.is_ok()
    }
}

impl Stream {
    /// The status of the final answer.
    pub(super) async fn status(&mut self) -> u16 {
        loop {
            match self.reading.next().await.unwrap() {
                Some(Came::Response(status, _)) if status >= 200 => return status,
                Some(Came::Response(..)) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// All content that is left.
    pub(super) async fn rest(&mut self) -> String {
        let mut all = Vec::new();
        while let Some(came) = self.reading.next().await.unwrap() {
            if let Came::Content(content) = came {
                all.extend_from_slice(&content);
            }
        }
        String::from_utf8(all).unwrap()
    }

    /// The code with which the server resets the stream.
    pub(super) async fn reset(&mut self) -> u64 {
        match self.reading.next().await {
            Err(Broken::Cut(ReadError::Reset(code))) => code.into_inner(),
            other => panic!("{other:?}"),
        }
    }

    pub(super) async fn send(&mut self, content: &[u8]) {
        // The server may have stopped reading already.
        let _ = send_data(&mut self.send, content.to_vec().into()).await;
    }

    pub(super) fn finish(&mut self) {
        let _ = self.send.finish();
    }

    pub(super) fn cancel(&mut self) {
        let _ = self.send.reset(VarInt::from_u32(0x10c));
    }

    pub(super) fn send_datagram(&self, payload: &[u8]) {
        let mut out = Vec::new();
        datagram::put(&mut out, id_of(self.send.id()), payload);
        self.peer.connection().send_datagram(out.into()).unwrap();
    }

    /// The next payload, and whether it came as a datagram of QUIC.
    pub(super) async fn payload(&mut self) -> (Vec<u8>, bool) {
        loop {
            if let Some(payload) = self.capsules.payload().unwrap() {
                return (payload.to_vec(), false);
            }
            tokio::select! {
                payload = self.datagrams.next() => return (payload.to_vec(), true),
                came = self.reading.next() => match came.unwrap() {
                    Some(Came::Content(content)) => self.capsules.push(&content),
                    other => panic!("{other:?}"),
                },
            }
        }
    }

    pub(super) async fn send_capsule(&mut self, payload: &[u8]) {
        let mut out = Vec::new();
        assert!(put_datagram(&mut out, payload));
        self.send(&out).await;
    }
}
