//! Responses on their way into the store, and parts that are combined with stored ones.

use super::Cache;
use super::content::{Content, End};
use super::copy::Progress;
use super::pool::Server;
use super::store::{Object, Store};
use sidetrack_core::http::cache::{ContentRange, Extent, Rules, Stored, combine};
use sidetrack_core::http::framing::{Decoder, Length};
use std::sync::Arc;

/// Most pieces of a combined part.
const PIECES_MAX: usize = 256;

/// Content in memory.
type Pieces = Vec<Arc<[u8]>>;

/// A response on its way into the store. If its transfer is cut, the bytes so far are kept as a part, if the rest can be
/// fetched later. Requests that read along see the cut.
pub(super) struct Filling {
    store: Arc<Store>,
    key: Arc<[u8]>,
    object: Arc<Object>,
    /// Most bytes of a combined part.
    most: u64,
    rules: Rules,
    /// The stored parts that it completes, and the bytes of the part behind it.
    completes: (Vec<Arc<Object>>, Pieces),
}

impl Filling {
    /// Stores an object whose content is still to arrive.
    pub(super) fn begin(cache: &Cache, key: &[u8], object: &Arc<Object>) -> Self {
        let (store, most) = (&cache.store, cache.in_memory_max);
        store.insert(key, object.clone());
        let (store, key, rules) = (store.clone(), key.into(), cache.rules.clone());
        Self { store, key, object: object.clone(), most, rules, completes: Default::default() }
    }

    /// The same for an object that completes stored parts. Its content already has the bytes before the arriving ones;
    /// `behind` follows them.
    #[must_use]
    pub(super) fn completing(mut self, parts: Vec<Arc<Object>>, behind: Pieces) -> Self {
        self.completes = (parts, behind);
        self
    }

    /// Reads the content from the server; returns whether all of it arrived.
    pub(super) async fn run(self, server: &mut Server, length: Length, progress: Progress<'_>) -> bool {
        let mut decoder = Decoder::new(length);
        loop {
            while !decoder.is_done() && !server.buffer.is_empty() {
                let Ok(decoded) = decoder.decode(server.buffer.data()) else { return false };
                self.object.content.push(decoded.data);
                let consumed = decoded.consumed;
                server.buffer.consume(consumed);
            }
            if decoder.is_done() {
                self.completes.1.iter().for_each(|piece| self.object.content.push(piece));
                self.object.content.finish(true);
                self.arrived();
                return true;
            }
            match server.buffer.fill(&server.stream).await {
                Ok(1..) => progress.mark(),
                _ => return false,
            }
        }
    }

    /// The content is complete: it replaces the parts whose bytes it contains.
    fn arrived(&self) {
        if self.object.content.end() != End::Whole {
            return;
        }
        if self.object.stored.extent == Extent::Whole {
            // Before the object goes to the disk: dropping parts also drops writes that are under way.
            self.store.drop_parts(&self.key, &self.object.stored);
        } else if !self.completes.0.is_empty() {
            let parts: Vec<_> = self.completes.0.iter().chain([&self.object]).collect();
            self.store.merge(&self.key, &parts, &self.object);
        }
        self.store.settled(&self.key, &self.object);
        self.combine(self.object.clone());
    }

    /// Returns the bytes of a cut transfer as a part.
    fn cut(&self, stored: &Stored) -> Option<Arc<Object>> {
        let pieces = self.object.content.so_far()?;
        let held = pieces.iter().map(|piece| piece.len() as u64).sum();
        let stored = stored.cut(held, self.object.content.length)?;
        Some(Arc::new(Object { stored, content: Arc::new(Content::of_pieces(pieces)) }))
    }

    /// Combines a part that has arrived with the stored parts that it touches (RFC 9111 Sec. 3.4), if they are in
    /// memory.
    fn combine(&self, mut object: Arc<Object>) {
        let Extent::Part(part) = object.stored.extent else { return };
        if part.is_whole() {
            let stored = object.stored.with_range(part);
            let whole = Arc::new(Object { stored, content: object.content.clone() });
            self.store.merge(&self.key, &[&object], &whole);
            return;
        }
        // The combined part may touch a third one.
        loop {
            let others = self.store.find(&self.key);
            let Some((other, both)) =
                others.iter().find_map(|other| Some((other, self.both(&object, other)?)))
            else {
                return;
            };
            if !self.store.merge(&self.key, &[&object, other], &both) {
                return;
            }
            object = both;
        }
    }

    /// Combines two objects, if they are parts of one representation.
    fn both(&self, newer: &Arc<Object>, older: &Arc<Object>) -> Option<Arc<Object>> {
        let (Extent::Part(a), Extent::Part(b)) = (newer.stored.extent, older.stored.extent) else {
            return None;
        };
        let stored = combine(&newer.stored, &older.stored, &self.rules)?;
        let length = a.last.max(b.last) - a.first.min(b.first) + 1;
        let fits = !Arc::ptr_eq(newer, older) && length <= self.most;
        let (bytes, others) = (newer.content.in_memory().filter(|_| fits)?, older.content.in_memory()?);
        let pieces = joined((a, bytes), (b, &others));
        let content = Arc::new(Content::of_pieces(pieces));
        Some(Arc::new(Object { stored, content }))
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        if self.object.content.end() == End::Whole {
            return;
        }
        // Store first, then announce the cut: a request that sees it and asks again finds the part.
        let kept = self.store.replace_content(&self.key, &self.object.content, |stored| self.cut(stored));
        self.object.content.finish(false);
        if let Some(kept) = kept {
            self.combine(kept);
        }
    }
}

/// Joins the bytes of two parts that touch. Where they overlap, the newer part's bytes are taken.
fn joined((newer, bytes): (ContentRange, Pieces), (older, others): (ContentRange, &[Arc<[u8]>])) -> Pieces {
    let before = newer.first.saturating_sub(older.first);
    let behind = newer.last.saturating_add(1).saturating_sub(older.first);
    let mut pieces = cut(others, 0, before);
    pieces.extend(bytes);
    pieces.extend(cut(others, behind, u64::MAX));
    // Limit the number of pieces, however small the parts were.
    if pieces.len() > PIECES_MAX { vec![pieces.concat().into()] } else { pieces }
}

/// Returns the bytes between two positions.
fn cut(pieces: &[Arc<[u8]>], from: u64, to: u64) -> Pieces {
    let (mut position, mut kept) = (0_u64, Vec::new());
    for piece in pieces {
        let length = piece.len() as u64;
        let within =
            |at: u64| usize::try_from(at.saturating_sub(position).min(length)).unwrap_or(piece.len());
        match (within(from), within(to)) {
            (0, end) if end == piece.len() => kept.push(piece.clone()),
            (start, end) if start < end => kept.push(piece.get(start..end).unwrap_or_default().into()),
            _ => {}
        }
        position += length;
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_parts_make_every_byte_once_and_the_newer_counts() {
        let of = |first: u64, last: u64, letter: u8| -> (ContentRange, Pieces) {
            let bytes: Vec<u8> = (first..=last).map(|at| letter + u8::try_from(at).unwrap()).collect();
            let pieces = bytes.chunks(3).map(Arc::from).collect();
            (ContentRange { first, last, total: None }, pieces)
        };
        for (newer, older) in [
            ((0, 4), (5, 9)),
            ((5, 9), (0, 4)),
            ((3, 6), (0, 9)),
            ((0, 9), (3, 6)),
            ((0, 6), (3, 9)),
            ((4, 9), (2, 5)),
            ((2, 2), (2, 2)),
        ] {
            let (range, bytes) = of(newer.0, newer.1, b'A');
            let (other, others) = of(older.0, older.1, b'a');
            let found: Vec<u8> =
                joined((range, bytes), (other, &others)).iter().flat_map(|piece| piece.to_vec()).collect();
            let wanted: Vec<u8> = (range.first.min(other.first)..=range.last.max(other.last))
                .map(|at| {
                    let letter = if (range.first..=range.last).contains(&at) { b'A' } else { b'a' };
                    letter + u8::try_from(at).unwrap()
                })
                .collect();
            assert_eq!(found, wanted, "{newer:?} {older:?}");
        }
    }
}
