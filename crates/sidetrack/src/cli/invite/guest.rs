//! The end that was invited: connects to the host, and proves that it has the secret.

use super::host::{receive, send};
use super::{now, shown};
use crate::tls::RawKey;
use anyhow::Context as _;
use ring::hmac;
use rustls::pki_types::ServerName;
use sidetrack_core::flow::Destination;
use sidetrack_core::invitation::{ALPN, EXPORTER, Invitation, Message, proven};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// How long a connection to one address of the host may take.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);

/// How long each answer of the host may take. It reloads its node before the second one.
const ANSWER_PATIENCE: Duration = Duration::from_secs(60);

/// A join that the host has let begin.
pub(super) struct Joining {
    stream: TlsStream<TcpStream>,
}

/// Connects and asks. Returns the host's offer.
///
/// # Errors
/// Why there is no connection, or why the host refuses.
pub(super) async fn ask(
    invitation: &Invitation,
    key: &RawKey,
    addresses: Vec<Destination>,
) -> anyhow::Result<(Joining, Message)> {
    let stream = connect(invitation).await?;
    let client = Arc::new(key.client(invitation.pin.into(), ALPN)?);
    // The name plays no part: the host shows a key without a certificate.
    let name = ServerName::from(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let stream = timeout(CONNECT_PATIENCE, TlsConnector::from(client).connect(name, stream)).await;
    let stream = stream.context("the host does not answer in time")?.map_err(|error| {
        let is_other_key = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).is_some_and(
            |error| matches!(error, rustls::Error::InvalidCertificate(_)),
        );
        if is_other_key {
            anyhow::anyhow!(
                "the host shows another key than the invitation says. Its key was replaced after it made the invitation, or \
                 another host answers in its place. Ask for a new invitation"
            )
        } else {
            anyhow::Error::new(error).context("what answers at the invitation's address is not waiting for a guest")
        }
    })?;
    let mut exported = [0; 32];
    stream.get_ref().1.export_keying_material(&mut exported, EXPORTER, None)?;
    let bytes = proven(&exported, &invitation.pin, &key.pin().into(), &invitation.name);
    let secret = hmac::Key::new(hmac::HMAC_SHA256, &invitation.secret.0);
    let tag = hmac::sign(&secret, &bytes);
    let proof = tag.as_ref().try_into().context("HMAC-SHA-256 has 32 bytes")?;
    let mut joining = Joining { stream };
    send(&mut joining.stream, &Message::Ask { proof, addresses }).await?;
    let offer = joining.answer().await?;
    Ok((joining, offer))
}

async fn connect(invitation: &Invitation) -> anyhow::Result<TcpStream> {
    let mut failures = Vec::new();
    for address in &invitation.addresses {
        match timeout(CONNECT_PATIENCE, TcpStream::connect(address.to_string())).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => failures.push(format!("{address}: {error}")),
            Err(_) => failures.push(format!("{address}: no answer")),
        }
    }
    // The host's clock decides; a wrong clock here must not stop a join.
    let expires = if now() > invitation.expires {
        let time = shown(invitation.expires);
        format!(
            "It has expired at {time}, if this host's clock ({}) is right: ask for a new one",
            shown(now())
        )
    } else {
        format!("'sidetrack {} invite' must still run there, and its port must be open", invitation.kind)
    };
    anyhow::bail!("the address of the invitation does not answer ({}). {expires}", failures.join("; "))
}

impl Joining {
    /// Lets the host write this end to its configuration. Returns what is left to do there, in words.
    ///
    /// # Errors
    /// Why the host cannot, or that its answer did not come.
    pub(super) async fn take(&mut self) -> anyhow::Result<String> {
        let again = "the host may have added this host already: run the same command again while the invitation is valid";
        send(&mut self.stream, &Message::Take).await.context(again)?;
        match self.answer().await? {
            Message::Given { left } => Ok(left),
            _ => anyhow::bail!("the host sent another message than it should"),
        }
    }

    /// Tells the host that this end is done.
    ///
    /// # Errors
    /// The host could not be told.
    pub(super) async fn finish(mut self) -> anyhow::Result<()> {
        send(&mut self.stream, &Message::Finish).await?;
        Ok(timeout(CONNECT_PATIENCE, self.stream.shutdown()).await??)
    }

    async fn answer(&mut self) -> anyhow::Result<Message> {
        let answer = timeout(ANSWER_PATIENCE, receive(&mut self.stream)).await;
        match answer.context("the host does not answer in time")?? {
            Message::Refused { reason, words } if words.is_empty() => anyhow::bail!("{reason}"),
            Message::Refused { reason, words } => anyhow::bail!("{reason}: {words}"),
            message => Ok(message),
        }
    }
}
