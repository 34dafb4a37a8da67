//! A server of the test's own behind TLS, and a client's end of it.

use crate::client::{Both, Client};
use crate::origin::{Act, Acting, Request, answer};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use sidetrack::tls::{Made, authority, provider, signed};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// An authority of the world outside, which signs for servers.
pub(crate) struct World {
    made: Made,
}

impl World {
    /// One more world.
    pub(crate) fn new() -> Self {
        Self { made: authority(30).unwrap() }
    }

    /// The certificate to trust, in PEM.
    pub(crate) fn pem(&self) -> &str {
        &self.made.certificate_pem
    }

    /// A server's certificate and key.
    pub(crate) fn identity(&self, name: &str, days: u32) -> Made {
        signed(name, days, &self.made.identity_pem()).unwrap()
    }
}

pub(crate) fn roots(pem: &str) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        roots.add(certificate.unwrap()).unwrap();
    }
    roots
}

pub(crate) fn chain(made: &Made) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let certificates = CertificateDer::pem_slice_iter(made.certificate_pem.as_bytes());
    let key = PrivateKeyDer::from_pem_slice(made.key_pem.as_bytes()).unwrap();
    (certificates.map(Result::unwrap).collect(), key)
}

/// What a server asks of clients.
pub(crate) enum Asks {
    Nothing,
    /// A certificate that this world signed.
    Certificate(String),
}

/// An origin server with TLS.
pub(crate) struct TlsOrigin {
    /// Where it listens.
    pub address: SocketAddr,
    /// What it was asked.
    pub asked: Arc<Mutex<Vec<Request>>>,
    /// Connections whose handshake was made.
    pub connections: Arc<Mutex<usize>>,
    /// How many of them resumed an earlier session.
    pub resumed: Arc<Mutex<usize>>,
}

impl TlsOrigin {
    /// A server with this certificate.
    pub(crate) fn start(
        identity: &Made,
        asks: Asks,
        act: impl Fn(&Request) -> Act + Send + Sync + 'static,
    ) -> Self {
        let builder =
            ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
        let (certificates, key) = chain(identity);
        let builder = match asks {
            Asks::Nothing => builder.with_no_client_auth(),
            Asks::Certificate(pem) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(roots(&pem).into(), provider());
                builder.with_client_cert_verifier(verifier.build().unwrap())
            }
        };
        let config = Arc::new(builder.with_single_cert(certificates, key).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (asked, connections) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(0)));
        let act: Arc<Acting> = Arc::new(act);
        let (seen, count) = (asked.clone(), connections.clone());
        let resumed = Arc::new(Mutex::new(0));
        let resuming = resumed.clone();
        std::thread::spawn(move || {
            for mut socket in listener.incoming().flatten() {
                let (config, act, seen, count) = (config.clone(), act.clone(), seen.clone(), count.clone());
                let resuming = resuming.clone();
                std::thread::spawn(move || {
                    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                    let mut connection = ServerConnection::new(config).unwrap();
                    while connection.is_handshaking() {
                        if connection.complete_io(&mut socket).is_err() {
                            // The alert that says why.
                            let _ = connection.write_tls(&mut socket);
                            return;
                        }
                    }
                    *count.lock().unwrap() += 1;
                    let is_resumed = connection.handshake_kind() == Some(rustls::HandshakeKind::Resumed);
                    *resuming.lock().unwrap() += usize::from(is_resumed);
                    answer(StreamOwned::new(connection, socket), &*act, &seen);
                });
            }
        });
        Self { address, asked, connections, resumed }
    }
}

/// What a client saw of a handshake.
pub(crate) struct Shaken {
    /// The connection.
    pub client: Client,
    /// The certificates it was shown.
    pub shown: Vec<CertificateDer<'static>>,
    /// The protocol that was agreed on.
    pub protocol: Option<Vec<u8>>,
}

/// TLS as a client that trusts `pem`, over a connection that leads to the server.
pub(crate) fn shake_hands(
    client: Client,
    pem: &str,
    name: &str,
    alpn: &[&str],
) -> Result<Shaken, std::io::Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots(pem))
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    let mut connection =
        ClientConnection::new(Arc::new(config), name.to_owned().try_into().unwrap()).unwrap();
    let (mut result, mut shown, mut protocol) = (Ok(()), Vec::new(), None);
    let client = client.wrapped(|mut stream: Box<dyn Both>| {
        while connection.is_handshaking() && result.is_ok() {
            result = connection.complete_io(&mut stream).map(drop);
        }
        if result.is_err() {
            // The alert that says why.
            let _ = connection.write_tls(&mut stream);
            return stream;
        }
        shown = connection
            .peer_certificates()
            .unwrap_or_default()
            .iter()
            .map(|one| one.clone().into_owned())
            .collect();
        protocol = connection.alpn_protocol().map(<[u8]>::to_vec);
        Box::new(StreamOwned::new(connection, stream))
    });
    result.map(|()| Shaken { client, shown, protocol })
}

/// A connection without TLS: reads and writes as it is.
pub(crate) fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(n @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..n]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}
