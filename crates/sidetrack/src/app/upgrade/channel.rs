//! One end of a hand-over: parts in the format of [`sidetrack_core::upgrade`], with their descriptors beside them.

use super::steps::{Act, Side, Step, reached};
use anyhow::{Context, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sidetrack_core::upgrade::{self, Found, Kind, Reader};
use sidetrack_sys::scm;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long the other process may take to read what it is sent.
const SENT_WITHIN: Duration = Duration::from_secs(10);

/// Most descriptors of one part.
pub(super) const DESCRIPTORS_MAX: usize = scm::MAX_FDS;

/// A part that has come.
pub(crate) struct Came {
    pub kind: Kind,
    body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Came {
    /// Its content. Fields that this version does not know are left out.
    pub(in crate::app) fn body<T: DeserializeOwned>(&self) -> anyhow::Result<T> {
        serde_json::from_slice(&self.body).with_context(|| format!("the part {:?} of a hand-over", self.kind))
    }
}

/// One end.
pub(super) struct Channel {
    end: OwnedFd,
    side: Side,
    reader: Reader,
    fds: VecDeque<OwnedFd>,
    is_greeted: bool,
}

impl Channel {
    /// `side`: that of this process.
    pub(super) fn new(end: OwnedFd, side: Side) -> Self {
        // Without the limit a process that hangs could make this one wait for ever.
        let _ = scm::send_within(&end, SENT_WITHIN);
        Self { end, side, reader: Reader::default(), fds: VecDeque::new(), is_greeted: false }
    }

    /// Sends a part that the other process must understand.
    pub(super) fn send(
        &mut self,
        kind: Kind,
        body: &impl Serialize,
        fds: &[BorrowedFd<'_>],
    ) -> anyhow::Result<()> {
        self.send_with(0, kind, body, fds)
    }

    /// Sends a part that an older program leaves out.
    pub(super) fn send_optional(
        &mut self,
        kind: Kind,
        body: &impl Serialize,
        fds: &[BorrowedFd<'_>],
    ) -> anyhow::Result<()> {
        self.send_with(upgrade::OPTIONAL, kind, body, fds)
    }

    fn send_with(
        &mut self,
        flags: u8,
        kind: Kind,
        body: &impl Serialize,
        fds: &[BorrowedFd<'_>],
    ) -> anyhow::Result<()> {
        reached(Step(self.side, Act::Sends(kind)));
        let json = serde_json::to_vec(body)?;
        let count = u8::try_from(fds.len()).context("too many descriptors")?;
        let mut bytes = if self.is_greeted { Vec::new() } else { upgrade::greeting() };
        self.is_greeted = true;
        bytes.extend(
            upgrade::part(kind, flags, count, &json).context("a part of the hand-over is too large")?,
        );
        let mut fds = Some(fds);
        for piece in bytes.chunks(scm::MAX_BYTES / 2) {
            let sent = scm::send(&self.end, piece, fds.take().unwrap_or_default());
            sent.context("the other process does not take the hand-over")?;
        }
        Ok(())
    }

    /// The next part within `patience`, which must be of one of these kinds. `None`: the other end is closed.
    pub(super) fn next(&mut self, patience: Duration) -> anyhow::Result<Option<Came>> {
        let until = Instant::now() + patience;
        loop {
            match self.reader.next_part()? {
                Some(Found::Part(part)) => {
                    let fds = self.take(part.descriptors)?;
                    reached(Step(self.side, Act::Gets(part.kind)));
                    return Ok(Some(Came { kind: part.kind, body: part.body, fds }));
                }
                Some(Found::Skipped(descriptors)) => {
                    self.take(descriptors)?;
                    continue;
                }
                None => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if !scm::wait(&self.end, Some(left))? {
                if left.is_zero() {
                    return Err(io::Error::from(io::ErrorKind::TimedOut).into());
                }
                continue;
            }
            match scm::receive(&self.end) {
                Ok(Some(message)) => {
                    self.reader.push(&message.bytes);
                    self.fds.extend(message.fds);
                }
                Ok(None) => return Ok(None),
                // A killed process may leave a reset.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn take(&mut self, count: u8) -> anyhow::Result<Vec<OwnedFd>> {
        if self.fds.len() < usize::from(count) {
            bail!("descriptors of the hand-over are missing");
        }
        Ok(self.fds.drain(..usize::from(count)).collect())
    }

    /// The next part, which must be of this kind. A reported failure is an error with its reason.
    pub(super) fn expect(&mut self, kind: Kind, patience: Duration) -> anyhow::Result<Came> {
        self.expect_one_of(&[kind], patience)
    }

    /// As [`Self::expect`], for several kinds.
    pub(super) fn expect_one_of(&mut self, kinds: &[Kind], patience: Duration) -> anyhow::Result<Came> {
        let came = self.next(patience).map_err(|error| match error.downcast_ref::<io::Error>() {
            Some(late) if late.kind() == io::ErrorKind::TimedOut => {
                anyhow::anyhow!("the other process has not said {kinds:?} within {} s", patience.as_secs())
            }
            _ => error,
        })?;
        let came = came.context("the other process has ended; its log says why")?;
        match came.kind {
            Kind::Failed => Err(anyhow::anyhow!("{}", came.body::<String>()?)),
            found if kinds.contains(&found) => Ok(came),
            found => bail!("the other process has said {found:?} instead of {kinds:?}"),
        }
    }

    /// Whether something can be received, the end included.
    pub(super) fn has_more(&self) -> bool {
        scm::wait(&self.end, Some(Duration::ZERO)).unwrap_or(true)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }
}
