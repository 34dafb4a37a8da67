//! What one request does with the secrets.

use super::secrets::{Coding, Place, Secrets};
use super::swap::{Misplaced, Spot, Swapping};
use super::value::Wiped;
use crate::flow::Destination;
use crate::http::fields::Fields;
use crate::http::message::Request;
use std::sync::Arc;

/// The secrets, as one request may use them.
#[derive(Clone, Debug)]
pub struct Guard {
    secrets: Arc<Secrets>,
    /// The server, if TLS verifies it.
    to: Option<Destination>,
    place: Option<usize>,
}

impl Guard {
    /// Most bytes of a request's content that are held in memory, so that its length can be told before it.
    pub const HELD_MAX: u64 = 1024 * 1024;

    /// `to` is the server of the request, if the connection to it is by TLS and its certificate is verified.
    pub fn new(secrets: &Arc<Secrets>, to: Option<&Destination>) -> Self {
        let place = to.and_then(|to| secrets.place(to));
        Self { secrets: secrets.clone(), to: to.cloned(), place }
    }

    fn place(&self) -> Option<&Place> {
        self.place.and_then(|place| self.secrets.places.get(place))
    }

    /// Says what is wrong with a misplaced placeholder, and what to do.
    pub fn why(&self, misplaced: Misplaced) -> String {
        self.secrets.why(misplaced, self.to.as_ref())
    }

    /// Checks the head of a request.
    ///
    /// # Errors
    /// It has a placeholder that is not replaced there.
    pub fn check(&self, request: &Request) -> Result<(), Misplaced> {
        self.secrets.none.whole(&request.target, Spot::Url)?;
        let swap = self.place().map_or(&self.secrets.none, |place| &place.up[Coding::Plain as usize]);
        for (_, value) in request.fields.iter() {
            swap.value(value)?;
        }
        Ok(())
    }

    /// Writes the head of a request as the server gets it. `length` is that of its content, if it has changed. Asks for
    /// content that is not compressed, because the answer is searched for secrets.
    pub fn head(&self, request: &Request, length: Option<u64>) -> Wiped {
        let mut request = request.clone();
        if let Some(place) = self.place() {
            request.fields.set("Accept-Encoding", "identity");
            // It was checked before.
            let _ = place.up[Coding::Plain as usize].fields(&mut request.fields);
        }
        if let Some(length) = length {
            request.fields.set_number("Content-Length", length);
            request.fields.remove("expect");
        }
        let mut head = Wiped::new(Vec::with_capacity(HEAD_ROOM));
        request.write_to(&mut head);
        head
    }

    /// Returns what replaces placeholders in the content of a request, or refuses them. `is_framed` says that the head tells
    /// the length of the content already.
    pub fn up(&self, fields: &Fields, is_framed: bool) -> Swapping {
        let coding = Coding::of(fields).filter(|_| !is_framed);
        let swap = self.place().zip(coding).map(|(place, coding)| &place.up[coding as usize]);
        Swapping::new(swap.unwrap_or(&self.secrets.none))
    }

    /// Replaces secrets in the fields of an answer.
    pub fn cover(&self, fields: &mut Fields) {
        if let Some(place) = self.place() {
            // Nothing is refused there.
            let _ = place.down.fields(fields);
        }
    }

    /// Returns what replaces secrets in the content of an answer, if that is possible.
    pub fn down(&self, fields: &Fields) -> Option<Swapping> {
        let place = self.place()?;
        Coding::of(fields).map(|_| Swapping::new(&place.down))
    }
}

/// Room for the head of a request.
const HEAD_ROOM: usize = 8 * 1024;
