//! Searches bytes that are not read as requests for placeholders. They may arrive in any pieces; nothing is copied but the beginning
//! of a placeholder.
//!
//! ```text
//!             .------. push: no placeholder begins at the end
//!             v      |
//!         [ clear ] ------ push: the bytes end with the beginning of one -----> [ begun ] --.
//!             ^                                                                  |  |  ^    | push: still a beginning
//!             '------------ push: something else follows ------------------------'  |  '----'
//!             |                                                                     |
//!             | push: it is complete in these bytes                                 | push: its last byte is in these bytes
//!             v                                                                     v
//!         [ found ]: the flow ends before these bytes are forwarded             [ found ]
//! ```

use super::secrets::Secrets;
use super::swap::{Misplaced, Spot};
use crate::flow::{EndReason, Side};
use crate::function::{Interest, Stage, Step, Stop};
use crate::time::Instant;
use std::sync::Arc;

/// Searches what the client of one flow sends. As a [`Stage`], it ends the flow with [`EndReason::SecretRefused`].
#[derive(Debug)]
pub struct Search {
    secrets: Arc<Secrets>,
    /// The beginning of a placeholder at the end of the bytes so far. Shorter than one placeholder.
    begun: Vec<u8>,
}

impl Search {
    /// Begins with the first byte of a flow.
    pub fn new(secrets: &Arc<Secrets>) -> Self {
        Self { secrets: secrets.clone(), begun: Vec::new() }
    }

    /// Looks at the next bytes.
    ///
    /// # Errors
    /// A placeholder is complete with these bytes, or in them.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), Misplaced> {
        let words = &self.secrets.words;
        let mut bytes = bytes;
        if !self.begun.is_empty() {
            // A placeholder that has begun before ends within its length.
            let seam = bytes.len().min(words.longest());
            self.begun.extend_from_slice(&bytes[..seam]);
            self.secrets.find(&self.begun)?;
            if seam == bytes.len() {
                let next = words.unfinished(&self.begun, 0);
                self.begun.drain(..next);
                return Ok(());
            }
            self.begun.clear();
        }
        self.secrets.find(bytes)?;
        bytes = &bytes[words.unfinished(bytes, 0)..];
        self.begun.extend_from_slice(bytes);
        Ok(())
    }
}

impl Stage for Search {
    fn interest(&self, from: Side) -> Interest {
        match from {
            Side::Client => Interest::Bytes,
            Side::Server => Interest::Nothing,
        }
    }

    fn handle(&mut self, _: Instant, _: Side, bytes: &[u8], _: &mut Vec<u8>) -> Step {
        match self.push(bytes) {
            Ok(()) => Step::Pass(bytes.len()),
            Err(misplaced) => Step::Stop(Stop {
                reason: EndReason::SecretRefused,
                detail: self.secrets.why(misplaced, None),
            }),
        }
    }
}

impl Secrets {
    /// Searches bytes that stand alone, such as a datagram.
    ///
    /// # Errors
    /// A placeholder is in them.
    pub fn find(&self, bytes: &[u8]) -> Result<(), Misplaced> {
        let found = self.words.find(bytes, 0);
        found.map_or(Ok(()), |found| Err(Misplaced { number: found.word, spot: Spot::Unread }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Named, Secret, placeholder};
    use super::*;

    /// Two secrets, whose placeholders begin alike.
    fn secrets() -> (Arc<Secrets>, [String; 2]) {
        let texts = [placeholder([0x11; 16]), placeholder([0x12; 16])];
        let named = |(name, text): (&str, &String)| Named {
            name: name.to_owned(),
            placeholder: text.clone(),
            secret: Secret::new(b"the-secret".to_vec()).unwrap(),
            hosts: vec!["api.example:443".parse().unwrap()],
        };
        let all: Vec<_> = ["A", "B"].into_iter().zip(&texts).map(named).collect();
        (Arc::new(Secrets::new(&all)), texts)
    }

    /// The number of the placeholder that is found, and in which piece.
    fn found(secrets: &Arc<Secrets>, pieces: &[&[u8]]) -> Option<(usize, usize)> {
        let mut search = Search::new(secrets);
        pieces.iter().enumerate().find_map(|(at, piece)| {
            let found = search.push(piece).err().map(|misplaced| (misplaced.number, at));
            assert!(search.begun.len() < 100, "{}", search.begun.len());
            found
        })
    }

    #[test]
    fn it_is_found_with_its_last_byte_wherever_the_bytes_are_divided() {
        let (secrets, [one, other]) = secrets();
        let bytes = format!("sidetrack-secret-sidetrack-s{one}").into_bytes();
        for first in 0..bytes.len() {
            for second in first..bytes.len() {
                let pieces = [&bytes[..first], &bytes[first..second], &bytes[second..]];
                assert_eq!(found(&secrets, &pieces), Some((0, 2)), "{first} {second}");
            }
        }
        let single: Vec<_> = bytes.chunks(1).collect();
        assert_eq!(found(&secrets, &single), Some((0, bytes.len() - 1)));
        assert_eq!(found(&secrets, &[b"GET / HTTP", format!("x{other}y{one}").as_bytes()]), Some((1, 1)));
    }

    #[test]
    fn beginnings_and_many_other_bytes_pass() {
        let (secrets, [one, _]) = secrets();
        let nearly = format!("{}x", &one[..one.len() - 1]);
        let bytes = nearly.repeat(50).into_bytes();
        for length in [1, 2, 7, 48, 49, 50, 51, 97, 98, 99, 4096] {
            let pieces: Vec<_> = bytes.chunks(length).collect();
            assert_eq!(found(&secrets, &pieces), None, "{length}");
        }
        let long = vec![b's'; 8 << 20];
        assert_eq!(found(&secrets, &[&long, one.as_bytes()]), Some((0, 1)));
        assert!(secrets.find(nearly.as_bytes()).is_ok() && secrets.find(one.as_bytes()).is_err());
    }

    #[test]
    fn the_flow_ends_with_the_reason_of_requests() {
        let (secrets, [one, _]) = secrets();
        let (mut search, mut out) = (Search::new(&secrets), Vec::new());
        let now = Instant::from_nanos(0);
        assert_eq!(search.handle(now, Side::Client, &one.as_bytes()[..48], &mut out), Step::Pass(48));
        let Step::Stop(stop) = search.handle(now, Side::Client, &one.as_bytes()[48..], &mut out) else {
            panic!("it passes");
        };
        assert_eq!(stop.reason, EndReason::SecretRefused);
        assert_eq!(
            stop.detail,
            "it has the placeholder of A, whose secret goes to api.example only, in requests by https"
        );
        assert!(out.is_empty() && search.interest(Side::Server) == Interest::Nothing);
    }
}
