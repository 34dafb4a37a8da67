//! A filter: who may be talked to, and what must not be said.

use super::search::Words;
use super::{FilterSpec, Interest, Stage, Step, Stop};
use crate::flow::{HostName, Side};
use crate::http::{SNIFF_MAX, Sniff, sniff};
use crate::time::Instant;
use std::sync::Arc;

/// The filter at work on one flow.
///
/// Hosts are those that the interceptor knew, else the one in the client's first bytes, which are held until it is found
/// or cannot be (at most [`SNIFF_MAX`] of them). Words are looked for in the bytes as they are: what is encrypted or
/// compressed is not seen.
#[derive(Debug)]
pub struct Filter {
    spec: Arc<FilterSpec>,
    words: Arc<Words>,
    /// The client's first bytes, while they do not say yet which host is meant.
    head: Option<Vec<u8>>,
    /// By side: the last bytes that passed, one less than the longest word has.
    tails: [Vec<u8>; 2],
}

impl Filter {
    /// A filter for a flow to `host`, if that is known.
    ///
    /// # Errors
    /// The host is refused.
    pub fn new(spec: Arc<FilterSpec>, words: Arc<Words>, host: Option<&HostName>) -> Result<Self, Stop> {
        let by_host = !spec.allow_hosts.is_empty() || !spec.deny_hosts.is_empty();
        if host.is_some() {
            permits(&spec, host)?;
        }
        let head = (by_host && host.is_none()).then(Vec::new);
        Ok(Self { spec, words, head, tails: [Vec::new(), Vec::new()] })
    }

    /// Looks at the first bytes; those that may go on are appended.
    fn look(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<usize, Stop> {
        let Some(head) = &mut self.head else { return Ok(0) };
        let taken = bytes.len().min(SNIFF_MAX.saturating_sub(head.len()).max(1));
        head.extend_from_slice(&bytes[..taken]);
        let host = match sniff(head) {
            Sniff::NeedMore if head.len() < SNIFF_MAX => return Ok(taken),
            Sniff::Host { name, .. } => Some(name),
            Sniff::NeedMore | Sniff::None => None,
        };
        self.settle(host.as_ref(), out)?;
        Ok(taken)
    }

    /// The host is known, or never will be.
    fn settle(&mut self, host: Option<&HostName>, out: &mut Vec<u8>) -> Result<(), Stop> {
        permits(&self.spec, host)?;
        let head = self.head.take().unwrap_or_default();
        self.scan(Side::Client, &head)?;
        out.extend_from_slice(&head);
        Ok(())
    }

    /// Looks for words in bytes that are about to pass, and in what passed just before them.
    fn scan(&mut self, from: Side, bytes: &[u8]) -> Result<(), Stop> {
        if self.words.is_empty() || !self.spec.directions.contains(from) {
            return Ok(());
        }
        let keep = self.words.longest() - 1;
        let tail = &mut self.tails[from as usize];
        // A word over the border lies in the old bytes and as many of the new ones.
        tail.extend_from_slice(&bytes[..bytes.len().min(keep)]);
        let found = self.words.find(tail, 0).or_else(|| self.words.find(bytes, 0));
        if let Some(found) = found {
            let word = String::from_utf8_lossy(self.words.word(found.word)).into_owned();
            let whose = if from == Side::Client { "client" } else { "server" };
            return Err(Stop::refused(format!("the {whose} said {word:?}")));
        }
        if bytes.len() >= keep {
            tail.clear();
            tail.extend_from_slice(&bytes[bytes.len() - keep..]);
        } else {
            tail.drain(..tail.len().saturating_sub(keep));
        }
        Ok(())
    }
}

/// Whether a flow to this host may pass.
fn permits(spec: &FilterSpec, host: Option<&HostName>) -> Result<(), Stop> {
    let in_list = |list: &[crate::policy::HostPattern]| {
        host.is_some_and(|host| list.iter().any(|pattern| pattern.matches(host)))
    };
    match host {
        Some(host) if in_list(&spec.deny_hosts) => Err(Stop::refused(format!("the host {host} is refused"))),
        Some(host) if !spec.allow_hosts.is_empty() && !in_list(&spec.allow_hosts) => {
            Err(Stop::refused(format!("the host {host} is not among those allowed")))
        }
        None if !spec.allow_hosts.is_empty() => {
            Err(Stop::refused("the flow names no host, and only some hosts are allowed"))
        }
        _ => Ok(()),
    }
}

impl Stage for Filter {
    fn interest(&self, from: Side) -> Interest {
        let looks = from == Side::Client && self.head.is_some();
        let scans = !self.words.is_empty() && self.spec.directions.contains(from);
        if looks || scans { Interest::Bytes } else { Interest::Nothing }
    }

    fn handle(&mut self, _now: Instant, from: Side, bytes: &[u8], out: &mut Vec<u8>) -> Step {
        if from == Side::Client && self.head.is_some() {
            return self.look(bytes, out).map_or_else(Step::Stop, Step::Taken);
        }
        self.scan(from, bytes).map_or_else(Step::Stop, |()| Step::Pass(bytes.len()))
    }

    fn finish(&mut self, _now: Instant, from: Side, out: &mut Vec<u8>) -> Result<bool, Stop> {
        if from == Side::Client && self.head.is_some() {
            self.settle(None, out)?;
        }
        Ok(true)
    }
}
