//! Sends stored content to a client: all of it, one range, or several.

use super::content::{Content, End};
use super::copy::{Outgoing, Progress, Stopped};
use super::store::Object;
use sidetrack_core::http::cache::{Body, Extent};
use sidetrack_core::http::fields::Fields;

/// Pieces fetched from the store at a time.
const PIECES: usize = 16;

/// Sends the content of an answer.
pub(super) async fn send_content(
    out: &mut Outgoing<'_>,
    object: &Object,
    body: &Body,
    progress: Progress<'_>,
) -> Result<(), Stopped> {
    let start = match object.stored.extent {
        Extent::Whole => 0,
        Extent::Part(part) => part.first,
    };
    let offset = |position: &u64| position.saturating_sub(start);
    match body {
        Body::None => {}
        Body::All => send_range(out, &object.content, (0, u64::MAX), progress).await?,
        Body::Range(first, last) => {
            send_range(out, &object.content, (offset(first), offset(last)), progress).await?;
        }
        Body::Multipart(parts, end) => {
            for (lead, first, last) in parts {
                out.push(lead).await.map_err(Stopped::Sink)?;
                send_range(out, &object.content, (offset(first), offset(last)), progress).await?;
            }
            out.push(end).await.map_err(Stopped::Sink)?;
        }
    }
    out.finish(&Fields::new()).await.map_err(Stopped::Sink)
}

/// Sends the bytes from `first` to `last`, both included, as they arrive.
async fn send_range(
    out: &mut Outgoing<'_>,
    content: &Content,
    (first, last): (u64, u64),
    progress: Progress<'_>,
) -> Result<(), Stopped> {
    if out.sends_pages()
        && let Some(pages) = content.pages()
    {
        let end = last.saturating_add(1).min(content.length);
        return out.push_pages(&pages, first..end, progress).await.map_err(Stopped::Sink);
    }
    let (mut index, mut position) = content.begin_at(first);
    loop {
        let (pieces, end) = content.pieces(index, PIECES).await;
        index += pieces.len();
        let mut wanted: [&[u8]; PIECES] = [&[]; PIECES];
        for (piece, wanted) in pieces.iter().zip(&mut wanted) {
            let length = piece.len() as u64;
            let within =
                |at: u64| usize::try_from(at.saturating_sub(position).min(length)).unwrap_or(piece.len());
            *wanted = piece.get(within(first)..within(last.saturating_add(1))).unwrap_or_default();
            position += length;
        }
        out.push_all(&wanted).await.map_err(Stopped::Sink)?;
        progress.mark();
        if position > last || (pieces.len() < PIECES && end == End::Whole) {
            return Ok(());
        }
        if pieces.is_empty() && end == End::Cut {
            return Err(Stopped::Source("the server broke off".to_owned()));
        }
        if end == End::Coming {
            out.flush().await.map_err(Stopped::Sink)?;
        }
    }
}
