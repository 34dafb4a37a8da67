//! A QUIC server that sends what it is asked for, and a client that takes it: bulk data of a program that knows nothing of its
//! relay. Both are `quinn` with its defaults, and with bbr.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use quinn::congestion::BbrConfig;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::{Report, Spec};
use crate::load::Believing;

const ALPN: &[u8] = b"bulk";
/// Time for a connection.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of one write.
const PIECE: usize = 64 << 10;

/// Options of the server.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Where it listens.
    #[arg(long)]
    pub listen: SocketAddr,
    /// Its certificate, in PEM.
    #[arg(long)]
    pub certificate: PathBuf,
    /// Its key, in PEM.
    #[arg(long)]
    pub key: PathBuf,
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

fn transport() -> Arc<quinn::TransportConfig> {
    let mut transport = quinn::TransportConfig::default();
    transport.congestion_controller_factory(Arc::new(BbrConfig::default()));
    Arc::new(transport)
}

/// Serves until it is killed: each stream gets bytes for as long as it is read.
///
/// # Errors
/// The address is taken, or the files hold no certificate.
pub fn serve(options: &Options) -> Result<()> {
    let chain = CertificateDer::pem_file_iter(&options.certificate)?.collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_file(&options.key)?;
    let mut tls = rustls::ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
    config.transport_config(transport());
    runtime()?.block_on(async {
        let endpoint = quinn::Endpoint::server(config, options.listen).context("the server's address")?;
        while let Some(incoming) = endpoint.accept().await {
            tokio::spawn(async move {
                let connection = incoming.await?;
                let mut stream = connection.open_uni().await?;
                let piece = vec![7; PIECE];
                while stream.write_all(&piece).await.is_ok() {}
                anyhow::Ok(())
            });
        }
        Ok(())
    })
}

/// The client's part: takes bytes, and counts those within the window.
pub(super) fn take(spec: &Spec, begin: impl FnOnce() -> Result<()>) -> Result<Report> {
    let mut tls = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Believing))
        .with_no_client_auth();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let mut config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
    config.transport_config(transport());
    runtime()?.block_on(async {
        let own: SocketAddr = if spec.dial.is_ipv4() { ([0; 4], 0).into() } else { ([0_u16; 8], 0).into() };
        let mut endpoint = quinn::Endpoint::client(own)?;
        endpoint.set_default_client_config(config);
        let connecting = endpoint.connect(spec.dial, "bulk.lab")?;
        let connection =
            tokio::time::timeout(PATIENCE, connecting).await.context("no connection in time")??;
        let mut stream = connection.accept_uni().await?;
        let began = Instant::now();
        let (warm, window) = (Duration::from_millis(spec.warmup_ms), Duration::from_millis(spec.window_ms));
        let mut report = Report { open: 1, ..Report::default() };
        let (mut begin, mut since) = (Some(begin), None::<Instant>);
        while let Some(piece) = stream.read_chunk(PIECE, true).await? {
            match since {
                Some(since) => {
                    report.bytes += piece.bytes.len() as u64;
                    if since.elapsed() >= window {
                        report.window_ns = u64::try_from(since.elapsed().as_nanos())?;
                        return Ok(report);
                    }
                }
                None if began.elapsed() >= warm => {
                    begin.take().map_or(Ok(()), |begin| begin())?;
                    since = Some(Instant::now());
                }
                None => {}
            }
        }
        anyhow::bail!("the server ended its stream")
    })
}
