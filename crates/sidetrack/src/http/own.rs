//! TLS with clients of the listener itself, by its own certificate.

use super::connection::Connection;
use super::duplex::Duplex;
use super::h3;
use super::keylog::KeyLogs;
use crate::carry::tls::Tls;
use crate::carry::{Stream, Wire};
use crate::config::HttpListener;
use crate::reactor::timeout;
use crate::session::{Entry, undecided};
use crate::worker::{CROWDED, Place};
use rustls::ServerConfig;
use sidetrack_core::flow::EndReason;
use std::sync::Arc;
use std::time::Duration;

/// How a listener that has a certificate speaks with its clients.
#[derive(Clone, Debug)]
pub struct Secured {
    /// TLS over TCP.
    tls: Arc<ServerConfig>,
    /// QUIC, if HTTP/3 is served.
    pub(super) quic: Option<quinn::ServerConfig>,
}

impl Secured {
    /// Makes it from the configuration of a listener. `None`: it has no certificate.
    ///
    /// # Errors
    /// rustls rejects it.
    pub(super) fn new(settings: &HttpListener) -> anyhow::Result<Option<Self>> {
        let Some(own) = &settings.own else { return Ok(None) };
        let mut tls = own.server(&[&b"h2"[..], b"http/1.1"])?;
        tls.key_log = Arc::new(KeyLogs::default());
        let tls = Arc::new(tls);
        let quic = settings.http3.then(|| h3::config(own)).transpose()?;
        Ok(Some(Self { tls, quic }))
    }
}

impl Connection {
    /// Shakes hands with the client, if the listener has a certificate. `None`: that failed, and has a record.
    pub(super) async fn secured(mut self) -> Option<Self> {
        let Some(config) = self.proxy.secured.as_ref().map(|secured| secured.tls.clone()) else {
            return Some(self);
        };
        let patience = Duration::from_millis(self.worker.config().limits.handshake_timeout_ms);
        let place = Place::enter(&self.worker);
        let mut held = self.buffer.take();
        let (below, peeked) = self.stream.into_stream();
        held.extend(peeked);
        let failed = match Tls::server(below, config, held) {
            Err(error) => (EndReason::Internal, error.to_string()),
            Ok(mut tls) => {
                let shaken = Place::while_kept(Some(&place), timeout(patience, tls.handshake())).await;
                let failed = match shaken {
                    Some(Ok(Ok(()))) => {
                        let is_multiplexed = tls.protocol() == Some(b"h2");
                        let stream = Duplex::from(Stream::Tls(Box::new(tls)));
                        return Some(Self { stream, is_multiplexed, ..self });
                    }
                    Some(Ok(Err(error))) => (EndReason::TlsFailed, format!("TLS with the client: {error}")),
                    Some(Err(_)) => {
                        (EndReason::HandshakeTimeout, "TLS with the client took too long".to_owned())
                    }
                    None => (EndReason::Limit, CROWDED.to_owned()),
                };
                Stream::Tls(Box::new(tls)).close(false);
                failed
            }
        };
        let mut entry = Entry::new(&self.worker);
        entry.live().decide(undecided(&self.listening, self.peer));
        entry.end(failed.0, Some(failed.1));
        None
    }
}
