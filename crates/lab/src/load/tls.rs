//! TLS of the generator: a new session for each connection, without resumption, and every certificate is accepted. So
//! the measured program always does a full handshake. The client's cost of checking certificates is left out for all
//! programs.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::net::SendFlags;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ClientConfig, ClientConnection, Resumption};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, SignatureScheme};

use super::connection::Failure;
use crate::site::ORIGIN_NAME;

/// One connection's TLS.
#[derive(Debug)]
pub(super) struct Tls(ClientConnection);

/// The configuration of all connections: TLS 1.3 or 1.2, HTTP/1.1.
///
/// # Panics Never: ring supports the requested versions.
#[must_use]
pub(super) fn config() -> Arc<ClientConfig> {
    let provider = Arc::new(ring::default_provider());
    let Ok(builder) = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()
    else {
        unreachable!("ring knows TLS 1.2 and 1.3")
    };
    let mut config =
        builder.dangerous().with_custom_certificate_verifier(Arc::new(Believing)).with_no_client_auth();
    config.resumption = Resumption::disabled();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Arc::new(config)
}

impl Tls {
    /// Makes a connection to the origin by its name.
    ///
    /// # Errors rustls rejects the configuration.
    pub(super) fn new(config: &Arc<ClientConfig>) -> Result<Self, Failure> {
        let name = ServerName::try_from(ORIGIN_NAME).map_err(|error| format!("TLS: {error}"))?;
        Ok(Self(ClientConnection::new(Arc::clone(config), name).map_err(|error| failure(&error))?))
    }

    /// Takes bytes for encryption; returns their number.
    ///
    /// # Errors None in practice: the bytes go to memory.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<usize, Failure> {
        self.0.writer().write(bytes).map_err(|error| format!("TLS: {error}").into())
    }

    /// Writes encrypted bytes, as far as the socket accepts them.
    ///
    /// # Errors The socket's error.
    pub(super) fn send(&mut self, socket: &OwnedFd) -> Result<(), Failure> {
        while self.0.wants_write() {
            match self.0.write_tls(&mut Socket(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(format!("write: {error}").into()),
            }
        }
        Ok(())
    }

    /// Decrypts bytes from the socket and appends their content.
    ///
    /// # Errors An error of rustls.
    pub(super) fn receive(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) -> Result<(), Failure> {
        while !bytes.is_empty() {
            self.0.read_tls(&mut bytes).map_err(|error| format!("TLS: {error}"))?;
            let state = self.0.process_new_packets().map_err(|error| failure(&error))?;
            let start = out.len();
            out.resize(start + state.plaintext_bytes_to_read(), 0);
            if let Some(room) = out.get_mut(start..).filter(|room| !room.is_empty()) {
                self.0.reader().read_exact(room).map_err(|error| format!("TLS: {error}"))?;
            }
        }
        Ok(())
    }
}

fn failure(error: &Error) -> Failure {
    format!("TLS: {error}").into()
}

struct Socket<'a>(&'a OwnedFd);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Accepts every certificate, because the client's own work is not measured.
#[derive(Debug)]
pub(crate) struct Believing;

impl ServerCertVerifier for Believing {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}
