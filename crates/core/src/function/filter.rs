//! A filter: refuses flows by host name, and by words in their bytes.

use super::search::Words;
use super::{FilterSpec, Interest, Stage, Step, Stop};
use crate::flow::{HostName, Side};
use crate::http::{SNIFF_MAX, Sniff, sniff};
use crate::time::Instant;
use std::sync::Arc;

/// The filter of one flow.
///
/// It uses the host that the interceptor knows. Otherwise it looks for the host in the client's first bytes. It holds
/// these bytes until the host is found or cannot be found (at most [`SNIFF_MAX`] bytes). It looks for words in the
/// bytes as they are, so it does not see encrypted or compressed words.
#[derive(Debug)]
pub struct Filter {
    spec: Arc<FilterSpec>,
    words: Arc<Words>,
    /// The client's first bytes, while they do not show the host yet.
    head: Option<Vec<u8>>,
    /// By side: the last bytes that passed. They are one byte less than the longest word.
    tails: [Vec<u8>; 2],
}

impl Filter {
    /// Makes a filter for a flow to `host`, if that is known.
    ///
    /// # Errors
    /// Fails if the host is refused.
    pub fn new(spec: Arc<FilterSpec>, words: Arc<Words>, host: Option<&HostName>) -> Result<Self, Stop> {
        let by_host = !spec.allow_hosts.is_empty() || !spec.deny_hosts.is_empty();
        if host.is_some() {
            permits(&spec, host)?;
        }
        let head = (by_host && host.is_none()).then(Vec::new);
        Ok(Self { spec, words, head, tails: [Vec::new(), Vec::new()] })
    }

    /// Examines the first bytes, and appends those that may pass.
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

    /// Continues when the host is known, or will never be known.
    fn settle(&mut self, host: Option<&HostName>, out: &mut Vec<u8>) -> Result<(), Stop> {
        permits(&self.spec, host)?;
        let head = self.head.take().unwrap_or_default();
        self.scan(Side::Client, &head)?;
        out.extend_from_slice(&head);
        Ok(())
    }

    /// Looks for words in bytes that are about to pass, together with those that passed just before.
    fn scan(&mut self, from: Side, bytes: &[u8]) -> Result<(), Stop> {
        if self.words.is_empty() || !self.spec.directions.contains(from) {
            return Ok(());
        }
        let keep = self.words.longest() - 1;
        let tail = &mut self.tails[from as usize];
        // A word across the border is in the old bytes and in the same number of new ones.
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

/// Fails if a flow to this host must not pass.
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
