//! Replaces texts in bytes that may arrive in pieces.
//!
//! ```text
//!             push: no text begins in it -> all is passed on
//!            .------.
//!            v      |  push: it ends with the beginning of a text
//!        [ nothing held ] -------------------------------------> [ held ]
//!            ^                                                   |    ^ |
//!            |  push: the text is complete (replaced), or another|    | | push: still a beginning
//!            '---------------------------------------------------'    '-'
//!            |                                                   |
//!            | finish                                            | finish: what is held is passed on
//!            v                                                   v
//!        [ over ]                                            [ over ]
//! ```

use super::value::Wiped;
use crate::http::fields::Fields;
use data_encoding::BASE64;
use std::fmt;
use std::sync::Arc;

/// Where a placeholder stands that must not be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spot {
    /// In the URL.
    Url,
    /// In a field of the head, or behind the content.
    Field,
    /// In the content.
    Content,
    /// In a connection or a datagram that is not read as a request.
    Unread,
}

/// A placeholder stands where its secret does not go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the placeholder of a secret is in a request that does not get the secret")]
pub struct Misplaced {
    /// The number of the secret.
    pub number: usize,
    /// Where its placeholder stands.
    pub spot: Spot,
}

/// What replaces a text.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Put {
    /// These bytes.
    Bytes(Wiped),
    /// Nothing: the placeholder of this secret must not be here.
    Nothing(usize),
}

/// Texts and what replaces them. If one is the beginning of another, the longer one is replaced.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Swap {
    pairs: Vec<(Wiped, Put)>,
    /// Whether a text begins with this byte.
    firsts: Box<[bool; 256]>,
}

impl fmt::Debug for Swap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Swap({})", self.pairs.len())
    }
}

impl Swap {
    /// Texts must not be empty.
    pub(super) fn new(mut pairs: Vec<(Wiped, Put)>) -> Self {
        pairs.sort_by_key(|(find, _)| std::cmp::Reverse(find.len()));
        let mut firsts = Box::new([false; 256]);
        for (find, _) in &pairs {
            if let Some(first) = find.first() {
                firsts[usize::from(*first)] = true;
            }
        }
        Self { pairs, firsts }
    }

    /// Whether these bytes are the beginning of a longer text.
    fn is_beginning(&self, bytes: &[u8]) -> bool {
        self.pairs.iter().any(|(find, _)| find.len() > bytes.len() && find.starts_with(bytes))
    }

    /// Appends the bytes with their texts replaced. If more bytes may follow, it stops at what may be the beginning of a text.
    /// Returns where it stopped.
    fn run(&self, bytes: &[u8], is_last: bool, out: &mut Vec<u8>) -> Result<usize, usize> {
        let (mut begin, mut at) = (0, 0);
        while let Some(next) = bytes[at..].iter().position(|byte| self.firsts[usize::from(*byte)]) {
            at += next;
            let rest = &bytes[at..];
            if !is_last && self.is_beginning(rest) {
                out.extend_from_slice(&bytes[begin..at]);
                return Ok(at);
            }
            match self.pairs.iter().find(|(find, _)| rest.starts_with(find)) {
                Some((_, Put::Nothing(number))) => return Err(*number),
                Some((find, Put::Bytes(new))) => {
                    out.extend_from_slice(&bytes[begin..at]);
                    out.extend_from_slice(new);
                    at += find.len();
                    begin = at;
                }
                None => at += 1,
            }
        }
        out.extend_from_slice(&bytes[begin..]);
        Ok(bytes.len())
    }

    /// Whether a text stands in these bytes.
    fn is_in(&self, bytes: &[u8]) -> bool {
        let begins = |at: usize| self.pairs.iter().any(|(find, _)| bytes[at..].starts_with(find));
        bytes.iter().enumerate().any(|(at, byte)| self.firsts[usize::from(*byte)] && begins(at))
    }

    /// Returns the bytes with their texts replaced, if there is one.
    pub(super) fn whole(&self, bytes: &[u8], spot: Spot) -> Result<Option<Wiped>, Misplaced> {
        if !self.is_in(bytes) {
            return Ok(None);
        }
        // Room for all: a buffer that grows leaves copies behind.
        let longest =
            self.pairs.iter().map(|(_, put)| if let Put::Bytes(new) = put { new.len() } else { 0 }).max();
        let shortest = self.pairs.iter().map(|(find, _)| find.len()).min().unwrap_or(1).max(1);
        let most = bytes.len() + (bytes.len() / shortest) * longest.unwrap_or(0);
        let mut out = Wiped::new(Vec::with_capacity(most));
        self.run(bytes, true, &mut out).map_err(|number| Misplaced { number, spot })?;
        Ok(Some(out))
    }

    /// Returns the value of a field with its texts replaced, if there is one. The password of the Basic scheme is in Base64
    /// (RFC 7617 Sec. 2).
    pub(super) fn value(&self, value: &[u8]) -> Result<Option<Wiped>, Misplaced> {
        if let Some(new) = self.whole(value, Spot::Field)? {
            return Ok(Some(new));
        }
        let Some((scheme, token)) = value.iter().position(|byte| *byte == b' ').map(|at| value.split_at(at))
        else {
            return Ok(None);
        };
        if !scheme.eq_ignore_ascii_case(b"basic") {
            return Ok(None);
        }
        let Ok(login) = BASE64.decode(token.trim_ascii()) else { return Ok(None) };
        let Some(login) = self.whole(&login, Spot::Field)? else { return Ok(None) };
        let mut out = Wiped::new(Vec::with_capacity(scheme.len() + 1 + BASE64.encode_len(login.len())));
        out.extend_from_slice(scheme);
        out.push(b' ');
        let start = out.len();
        out.resize(start + BASE64.encode_len(login.len()), 0);
        BASE64.encode_mut(&login, &mut out[start..]);
        Ok(Some(out))
    }

    /// Replaces texts in the values of fields.
    pub(super) fn fields(&self, fields: &mut Fields) -> Result<(), Misplaced> {
        let mut has = false;
        for (_, value) in fields.iter() {
            has |= self.value(value)?.is_some();
        }
        if !has {
            return Ok(());
        }
        let mut new = Fields::new();
        for (name, value) in fields.iter() {
            match self.value(value)? {
                Some(swapped) => new.push(name, swapped.as_slice()),
                None => new.push(name, value),
            }
        }
        *fields = new;
        Ok(())
    }
}

/// Replaces texts in content that arrives in pieces.
#[derive(Debug)]
pub struct Swapping {
    swap: Arc<Swap>,
    /// What may be the beginning of a text.
    held: Wiped,
}

impl Swapping {
    pub(super) fn new(swap: &Arc<Swap>) -> Self {
        Self { swap: swap.clone(), held: Wiped::default() }
    }

    /// Appends a piece to `out`, with its texts replaced. Bytes that may be the beginning of a text are held back.
    ///
    /// # Errors
    /// A placeholder that must not be there is complete.
    pub fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), Misplaced> {
        let misplaced = |number| Misplaced { number, spot: Spot::Content };
        if self.held.is_empty() {
            let end = self.swap.run(bytes, false, out).map_err(misplaced)?;
            self.held.extend_from_slice(&bytes[end..]);
            return Ok(());
        }
        self.held.extend_from_slice(bytes);
        let end = self.swap.run(&self.held, false, out).map_err(misplaced)?;
        self.held.drain(..end);
        Ok(())
    }

    /// Appends what is held at the end of the content.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), Misplaced> {
        let held = std::mem::take(&mut self.held);
        let end = self.swap.run(&held, true, out);
        end.map(drop).map_err(|number| Misplaced { number, spot: Spot::Content })
    }

    /// Replaces texts in the fields behind the content.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn trailers(&self, fields: &mut Fields) -> Result<(), Misplaced> {
        self.swap.fields(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn swap(pairs: &[(&str, Option<&str>)]) -> Arc<Swap> {
        let wiped = |text: &str| Wiped::new(text.as_bytes().to_vec());
        let pair = |(number, (find, put)): (usize, &(&str, Option<&str>))| {
            (wiped(find), put.map_or(Put::Nothing(number), |put| Put::Bytes(wiped(put))))
        };
        Arc::new(Swap::new(pairs.iter().enumerate().map(pair).collect()))
    }

    /// The result of every way to divide the bytes into two or three pieces.
    fn divided(swap: &Arc<Swap>, bytes: &[u8]) -> Vec<Result<String, Misplaced>> {
        let mut results = Vec::new();
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let (mut swapping, mut out) = (Swapping::new(swap), Vec::new());
                let pieces = [&bytes[..first], &bytes[first..second], &bytes[second..]];
                let done = pieces.iter().try_for_each(|piece| swapping.push(piece, &mut out));
                let done = done.and_then(|()| swapping.finish(&mut out));
                results.push(done.map(|()| String::from_utf8(out).unwrap()));
            }
        }
        results
    }

    #[test]
    fn texts_are_replaced_wherever_the_pieces_are_divided() {
        let swap = swap(&[("abab", Some("X")), ("ababc", Some("long text")), ("bcb", Some(""))]);
        for (bytes, expected) in [
            ("", ""),
            ("aba", "aba"),
            ("abab", "X"),
            ("ababc", "long text"),
            ("abababab", "XX"),
            ("aabab bcb ababd", "aX  Xd"),
            ("ababababc", "Xlong text"),
            ("bcbcb", "cb"),
        ] {
            for result in divided(&swap, bytes.as_bytes()) {
                assert_eq!(result.as_deref(), Ok(expected), "{bytes}");
            }
            let whole = swap.whole(bytes.as_bytes(), Spot::Field).unwrap();
            assert_eq!(
                whole.map_or(bytes.to_owned(), |new| String::from_utf8(new.to_vec()).unwrap()),
                expected
            );
        }
    }

    #[test]
    fn a_misplaced_text_is_found_wherever_the_pieces_are_divided() {
        let swap = swap(&[("good", Some("fine")), ("goods", None)]);
        for result in divided(&swap, b"a good, goods") {
            assert_eq!(result, Err(Misplaced { number: 1, spot: Spot::Content }));
        }
    }

    #[test]
    fn nothing_is_held_that_cannot_begin_a_text() {
        let swap = swap(&[("secret-1", Some("*"))]);
        let (mut swapping, mut out) = (Swapping::new(&swap), Vec::new());
        swapping.push(b"event: s\n", &mut out).unwrap();
        assert_eq!(out, b"event: s\n");
        swapping.push(b"sec", &mut out).unwrap();
        assert_eq!(out, b"event: s\n");
        swapping.push(b"ond", &mut out).unwrap();
        assert_eq!(out, b"event: s\nsecond");
    }

    #[test]
    fn basic_is_decoded_and_encoded_again() {
        let swap = swap(&[("placeholder", Some("the secret")), ("other", None)]);
        let value = |text: &str| {
            let new = swap.value(text.as_bytes())?;
            Ok::<_, Misplaced>(new.map(|new| String::from_utf8(new.to_vec()).unwrap()))
        };
        let basic = |login: &str| format!("Basic {}", BASE64.encode(login.as_bytes()));
        assert_eq!(value("Bearer placeholder"), Ok(Some("Bearer the secret".to_owned())));
        assert_eq!(value(&basic("ann:placeholder")), Ok(Some(basic("ann:the secret"))));
        assert_eq!(value(&basic("ann:bob")), Ok(None));
        assert_eq!(value("Basic ?"), Ok(None));
        assert!(value(&basic("other:x")).is_err() && value("other").is_err());
        let mut fields = Fields::from([("A", "b"), ("Authorization", "Bearer placeholder"), ("C", "d")]);
        swap.fields(&mut fields).unwrap();
        assert_eq!(fields, Fields::from([("A", "b"), ("Authorization", "Bearer the secret"), ("C", "d")]));
    }
}
