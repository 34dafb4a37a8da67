//! The end that invites: waits for the guest, and lets it in once.

use crate::tls::{Pin, RawKey};
use anyhow::Context as _;
use ring::hmac;
use sidetrack_core::flow::Destination;
use sidetrack_core::invitation::host::{End, Host, Take};
use sidetrack_core::invitation::{ALPN, EXPORTER, Invitation, Message, Refusal, proven};
use sidetrack_core::tunnel::{BODY_MAX, Parsed};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, LocalSet};
use tokio_rustls::TlsAcceptor;

/// Most connections whose guest has not proven the secret. For one more, the oldest is closed.
const UNPROVEN_MAX: usize = 32;

/// How long a guest may take until its proof is here, and then until its last message is here.
const PROOF_PATIENCE: Duration = Duration::from_secs(10);
const JOIN_PATIENCE: Duration = Duration::from_secs(60);

/// How long to wait after an error of accept: it is one of resources.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a guest has shown.
pub(super) struct Guest {
    /// The hash of its key.
    pub pin: Pin,
    /// Its key (SubjectPublicKeyInfo).
    pub key: Vec<u8>,
    /// Where other nodes may dial it.
    pub addresses: Vec<Destination>,
}

/// What is particular to a tunnel or an overlay.
pub(super) trait Inviting {
    /// What the guest needs. Nothing is changed yet.
    ///
    /// # Errors
    /// Why this guest cannot join, in words for the guest.
    fn offer(&self, guest: &Guest) -> anyhow::Result<Message>;

    /// Writes the guest to the configuration. Returns what is left to do at this host, in words.
    ///
    /// # Errors
    /// Why it cannot be written. Then nothing was changed.
    async fn write(&self, guest: &Guest) -> anyhow::Result<String>;
}

struct Joins<I> {
    inviting: I,
    invitation: Invitation,
    host: RefCell<Host<Pin>>,
    acceptor: TlsAcceptor,
    changed: Notify,
}

/// Serves the invitation until it is over.
///
/// # Errors
/// The socket or the key cannot be used.
pub(super) async fn serve<I: Inviting + 'static>(
    listener: std::net::TcpListener,
    key: &RawKey,
    invitation: Invitation,
    expires: Duration,
    inviting: I,
) -> anyhow::Result<End> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let acceptor = TlsAcceptor::from(Arc::new(key.server(ALPN)?));
    let (host, changed) = (RefCell::default(), Notify::new());
    let joins = Rc::new(Joins { inviting, invitation, host, acceptor, changed });
    let tasks = LocalSet::new();
    Ok(tasks.run_until(joins.run(listener, expires)).await)
}

impl<I: Inviting + 'static> Joins<I> {
    async fn run(self: Rc<Self>, listener: TcpListener, expires: Duration) -> End {
        let mut unproven: VecDeque<(AbortHandle, Rc<Cell<bool>>)> = VecDeque::new();
        let mut deadline = std::pin::pin!(tokio::time::sleep(expires));
        let mut is_late = false;
        loop {
            if let Some(end) = self.host.borrow().end() {
                return end;
            }
            tokio::select! {
                accepted = listener.accept() => {
                    let Ok((stream, from)) = accepted else {
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    };
                    unproven.retain(|(task, is_proven)| !task.is_finished() && !is_proven.get());
                    if unproven.len() >= UNPROVEN_MAX && let Some((oldest, _)) = unproven.pop_front() {
                        oldest.abort();
                    }
                    let is_proven = Rc::<Cell<bool>>::default();
                    let task = tokio::task::spawn_local(self.clone().connection(stream, from, is_proven.clone()));
                    unproven.push_back((task.abort_handle(), is_proven));
                }
                () = self.changed.notified() => {}
                () = &mut deadline, if !is_late => is_late = true,
            }
            if is_late {
                self.host.borrow_mut().expire();
            }
        }
    }

    async fn connection(self: Rc<Self>, stream: TcpStream, from: SocketAddr, is_proven: Rc<Cell<bool>>) {
        if let Err(error) = self.join(stream, &is_proven).await {
            // Scanners end here too, so an address is all that is said about a guest without the secret.
            eprintln!("{}: {error:#}", sidetrack_sys::sockopt::canonical(from));
        }
        self.changed.notify_one();
    }

    async fn join(&self, stream: TcpStream, is_proven: &Cell<bool>) -> anyhow::Result<()> {
        let asked = tokio::time::timeout(PROOF_PATIENCE, self.asked(stream)).await;
        let (mut stream, guest, is_right) = asked.map_err(|_| anyhow::anyhow!("no proof came in time"))??;
        is_proven.set(is_right);
        let joined =
            tokio::time::timeout(JOIN_PATIENCE, self.with_guest(&mut stream, &guest, is_right)).await;
        let joined = joined.map_err(|_| anyhow::anyhow!("the guest did not go on in time"))?;
        // The end of TLS (close_notify) tells the guest that nothing was cut off.
        let _ = tokio::time::timeout(PROOF_PATIENCE, stream.shutdown()).await;
        joined
    }

    /// Does the handshake, and reads the guest's first message. Returns whether its proof is right.
    async fn asked(
        &self,
        stream: TcpStream,
    ) -> anyhow::Result<(tokio_rustls::server::TlsStream<TcpStream>, Guest, bool)> {
        let mut stream = self.acceptor.accept(stream).await.context("the handshake failed")?;
        let mut exported = [0; 32];
        let (_, connection) = stream.get_ref();
        anyhow::ensure!(
            connection.alpn_protocol() == Some(ALPN),
            "it wants to do something else than to join"
        );
        connection.export_keying_material(&mut exported, EXPORTER, None)?;
        let key = connection.peer_certificates().and_then(<[_]>::first).context("it shows no key")?.to_vec();
        let Message::Ask { proof, addresses } = receive(&mut stream).await? else {
            anyhow::bail!("it began with another message than it should");
        };
        let guest = Guest { pin: Pin::of_key(&key), key, addresses };
        let Invitation { pin, name, secret, .. } = &self.invitation;
        let bytes = proven(&exported, pin, &guest.pin.into(), name);
        let is_right = hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, &secret.0), &bytes, &proof).is_ok();
        Ok((stream, guest, is_right))
    }

    async fn with_guest<S>(&self, stream: &mut S, guest: &Guest, is_right: bool) -> anyhow::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let asked = self.host.borrow_mut().ask(&guest.pin, is_right);
        if let Err(refusal) = asked {
            return refuse(stream, refusal, "").await;
        }
        let offer = match self.inviting.offer(guest) {
            Ok(offer) => offer,
            Err(error) => return refuse(stream, Refusal::Failed, &format!("{error:#}")).await,
        };
        send(stream, &offer).await?;
        anyhow::ensure!(receive(stream).await? == Message::Take, "it sent another message than it should");
        let taken = self.host.borrow_mut().take(&guest.pin);
        let left = match taken {
            Err(refusal) => return refuse(stream, refusal, "").await,
            Ok(Take::Again) => String::new(),
            Ok(Take::Write) => {
                let mut writing = Writing { host: &self.host, is_written: false };
                match self.inviting.write(guest).await {
                    Ok(left) => {
                        writing.is_written = true;
                        left
                    }
                    Err(error) => {
                        drop(writing);
                        return refuse(stream, Refusal::Failed, &format!("{error:#}")).await;
                    }
                }
            }
        };
        send(stream, &Message::given(&left)).await?;
        anyhow::ensure!(receive(stream).await? == Message::Finish, "it sent another message than it should");
        self.host.borrow_mut().finish(&guest.pin);
        Ok(())
    }
}

/// Ends the state `Writing`, also if the task is dropped meanwhile.
struct Writing<'h> {
    host: &'h RefCell<Host<Pin>>,
    is_written: bool,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.host.borrow_mut().written(self.is_written);
    }
}

async fn refuse<S: AsyncWrite + Unpin>(stream: &mut S, refusal: Refusal, words: &str) -> anyhow::Result<()> {
    send(stream, &Message::refused(refusal, words)).await?;
    let colon = if words.is_empty() { "" } else { ": " };
    anyhow::bail!("refused a guest: {refusal}{colon}{words}")
}

/// Sends a message.
pub(super) async fn send<S: AsyncWrite + Unpin>(stream: &mut S, message: &Message) -> anyhow::Result<()> {
    stream.write_all(&message.encode()?).await?;
    stream.flush().await?;
    Ok(())
}

/// Receives one message. The other end sends nothing behind it before it has an answer.
pub(super) async fn receive<S: AsyncRead + Unpin>(stream: &mut S) -> anyhow::Result<Message> {
    let mut bytes = Vec::new();
    loop {
        match Message::parse(&bytes) {
            Parsed::Message(message, consumed) if consumed == bytes.len() => return Ok(message),
            Parsed::Message(..) => anyhow::bail!("the other end sent more than it should"),
            Parsed::Malformed(error) => anyhow::bail!("the other end sent a wrong message: {error}"),
            Parsed::Incomplete if bytes.len() > BODY_MAX + 3 => anyhow::bail!("the message is too long"),
            Parsed::Incomplete => {}
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof)).context("the connection broke");
        }
    }
}
