//! Content of requests of a command that has secrets: their placeholders are replaced or refused.

use super::copy::{Outgoing, Stopped, Tee, copy_body, write_all};
use super::duplex::Duplex;
use super::exchange::{Turn, Unanswered};
use super::fetch::{Way, knows_interim};
use super::request::Asked;
use sidetrack_core::flow::Side;
use sidetrack_core::http::framing::{Decoder, Length};
use sidetrack_core::placeholder::{Guard, Misplaced, Swapping, Wiped};
use std::io::{self, IoSlice};

/// Tells the client to send its content (RFC 9110 Sec. 10.1.1).
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

impl Turn<'_> {
    /// Reads the whole content of a request and replaces or refuses its placeholders, if its head tells the length: the head that
    /// the server gets must tell the new one. `None`: there are no secrets, or the content is chunked, or it is too long.
    pub(super) async fn whole(&mut self) -> Result<Option<Wiped>, Unanswered> {
        let asked = self.asked;
        let (Some(guard), Length::Exact(length @ 1..=Guard::HELD_MAX)) = (&asked.guard, asked.length) else {
            return Ok(None);
        };
        if asked.hop.expects_continue && knows_interim(asked.version) {
            let sent = write_all(self.stream, &mut [IoSlice::new(CONTINUE)]).await;
            sent.map_err(|error| Unanswered::Client(format!("the client left: {error}")))?;
        }
        let mut tee = Tee::new(length, None);
        let progress = self.progress();
        let from = (self.stream, &mut *self.buffer);
        let mut decoder = Decoder::new(asked.length);
        let read = copy_body(from, &mut decoder, &mut Outgoing::nowhere(), Some(&mut tee), progress).await;
        if let Err(stopped) = read {
            let broke_off = || Unanswered::Client("the request's body broke off".to_owned());
            return Err(of_upload(asked, stopped).unwrap_or_else(broke_off));
        }
        if let Some(kept) = &asked.kept {
            kept.push(Side::Client, &tee.bytes);
        }
        let mut swapping = guard.up(&asked.request.fields, false);
        let mut whole = Wiped::new(Vec::with_capacity(tee.bytes.len()));
        let swapped = swapping.push(&tee.bytes, &mut whole).and_then(|()| swapping.finish(&mut whole));
        swapped.map_err(|misplaced| Unanswered::Misplaced(guard.why(misplaced)))?;
        Ok(Some(whole))
    }
}

/// What replaces or refuses placeholders in content that is forwarded as it arrives.
pub(super) fn upload_swapping(asked: &Asked) -> Option<Swapping> {
    let guard = asked.guard.as_ref()?;
    Some(guard.up(&asked.request.fields, matches!(asked.length, Length::Exact(_))))
}

/// Sends a request whose content is in memory.
pub(super) async fn send_whole(way: &Way<'_>, asked: &Asked, to: &Duplex, content: &[u8]) -> io::Result<()> {
    let head = way.head(&asked.request, Some(content.len() as u64));
    write_all(to, &mut [IoSlice::new(&head), IoSlice::new(content)]).await?;
    way.progress.live.count((head.len() + content.len()) as u64, 0);
    way.progress.mark();
    Ok(())
}

/// Why an upload stopped, if that ends the request. `None`: the server took no more, and may have answered.
pub(super) fn of_upload(asked: &Asked, stopped: Stopped) -> Option<Unanswered> {
    Some(match stopped {
        Stopped::Source(why) => Unanswered::Client(format!("the request's body broke off: {why}")),
        Stopped::Ended(error) => Unanswered::Ended(format!("the request's body broke off: {error}")),
        Stopped::Broken(error) => Unanswered::Broken(error),
        Stopped::Sink(error) => {
            let misplaced = error.get_ref().and_then(|error| error.downcast_ref::<Misplaced>())?;
            let why =
                asked.guard.as_ref().map_or_else(|| misplaced.to_string(), |guard| guard.why(*misplaced));
            Unanswered::Misplaced(why)
        }
    })
}
