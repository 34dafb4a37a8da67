//! All secrets of a command, and which server gets which.

use super::PREFIX;
use super::swap::{Misplaced, Put, Spot, Swap};
use super::value::{Secret, Wiped};
use crate::flow::{Destination, Host};
use crate::function::Words;
use crate::http::fields::Fields;
use std::fmt;
use std::sync::Arc;

/// A secret with its name, its placeholder and its servers.
#[derive(Clone, Debug)]
pub struct Named {
    /// The variable that the command has.
    pub name: String,
    /// What stands in it.
    pub placeholder: String,
    /// What the servers get.
    pub secret: Secret,
    /// The servers that get it.
    pub hosts: Vec<Destination>,
}

/// How content writes characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// As they are.
    Plain,
    /// In strings of JSON (RFC 8259 Sec. 7).
    Json,
    /// As `application/x-www-form-urlencoded` (WHATWG URL Sec. 5).
    Form,
}

impl Coding {
    const ALL: [Self; 3] = [Self::Plain, Self::Json, Self::Form];

    /// Returns the coding of content. `None`: it is compressed, or has lengths inside (gRPC), so that nothing can be replaced.
    pub fn of(fields: &Fields) -> Option<Self> {
        let is_plain = |coding: &[u8]| coding.eq_ignore_ascii_case(b"identity");
        if !fields.members("content-encoding").all(is_plain) {
            return None;
        }
        let kind = fields.first("content-type").unwrap_or_default();
        let kind =
            kind.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii().to_ascii_lowercase();
        if kind.starts_with(b"application/grpc") {
            return None;
        }
        Some(match &*kind {
            b"application/json" | b"text/json" => Self::Json,
            b"application/x-www-form-urlencoded" => Self::Form,
            kind if kind.ends_with(b"+json") => Self::Json,
            _ => Self::Plain,
        })
    }

    fn write(self, secret: &[u8]) -> Wiped {
        // Room for the longest form of each byte.
        let mut out = Wiped::new(Vec::with_capacity(secret.len() * 3));
        for byte in secret {
            match (self, byte) {
                (Self::Json, b'"' | b'\\') => out.extend([b'\\', *byte]),
                (Self::Form, b'*' | b'-' | b'.' | b'_' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z')
                | (Self::Plain | Self::Json, _) => out.push(*byte),
                (Self::Form, b' ') => out.push(b'+'),
                (Self::Form, _) => {
                    let digit = |four: u8| b"0123456789ABCDEF"[usize::from(four)];
                    out.extend([b'%', digit(byte >> 4), digit(byte & 15)]);
                }
            }
        }
        out
    }
}

/// A server that gets secrets.
#[derive(Debug)]
pub(super) struct Place {
    to: Destination,
    /// Placeholders to secrets, by [`Coding`].
    pub(super) up: [Arc<Swap>; 3],
    /// Secrets to placeholders.
    pub(super) down: Arc<Swap>,
}

/// All secrets of a command.
pub struct Secrets {
    /// Name, placeholder, and servers as text.
    names: Vec<(String, String, Vec<String>)>,
    pub(super) places: Vec<Place>,
    /// Refuses all placeholders.
    pub(super) none: Arc<Swap>,
    /// The placeholders, by the number of their secret.
    pub(super) words: Words,
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names.iter().map(|(name, ..)| name)).finish()
    }
}

impl Secrets {
    /// Prepares the replacements.
    pub fn new(all: &[Named]) -> Self {
        let placeholder = |one: &Named| Wiped::new(one.placeholder.clone().into_bytes());
        let mut servers: Vec<Destination> = Vec::new();
        for host in all.iter().flat_map(|one| &one.hosts) {
            if !servers.contains(host) {
                servers.push(host.clone());
            }
        }
        let place = |to: Destination| {
            let up = Coding::ALL.map(|coding| {
                let put = |(number, one): (usize, &Named)| {
                    let is_for = one.hosts.contains(&to);
                    let bytes = || Put::Bytes(coding.write(one.secret.bytes()));
                    (placeholder(one), if is_for { bytes() } else { Put::Nothing(number) })
                };
                Arc::new(Swap::new(all.iter().enumerate().map(put).collect()))
            });
            // A server may show every form of a secret that it got.
            let mut shown: Vec<(Wiped, Put)> = Vec::new();
            for one in all.iter().filter(|one| one.hosts.contains(&to)) {
                for form in Coding::ALL.map(|coding| coding.write(one.secret.bytes())) {
                    if shown.iter().all(|(other, _)| *other != form) {
                        shown.push((form, Put::Bytes(placeholder(one))));
                    }
                }
            }
            Place { to, up, down: Arc::new(Swap::new(shown)) }
        };
        let none = all.iter().enumerate().map(|(number, one)| (placeholder(one), Put::Nothing(number)));
        let texts: Vec<_> = all.iter().map(|one| one.placeholder.clone().into_bytes()).collect();
        let name = |one: &Named| {
            let hosts = one.hosts.iter().map(shown).collect();
            (one.name.clone(), one.placeholder.clone(), hosts)
        };
        Self {
            names: all.iter().map(name).collect(),
            none: Arc::new(Swap::new(none.collect())),
            places: servers.into_iter().map(place).collect(),
            words: Words::new(&texts, false).unwrap_or_else(|_| any_placeholder()),
        }
    }

    /// Returns the servers that get secrets.
    pub fn servers(&self) -> impl Iterator<Item = &Destination> {
        self.places.iter().map(|place| &place.to)
    }

    /// Whether a server of this host gets secrets, at any port.
    pub fn is_for(&self, host: &Host) -> bool {
        self.servers().any(|server| server.host == *host)
    }

    /// Returns the number of the place that this server is.
    pub(super) fn place(&self, server: &Destination) -> Option<usize> {
        self.places.iter().position(|place| place.to.host == server.host && place.to.port == server.port)
    }

    /// Says what is wrong with a misplaced placeholder, and what to do. `to`: the server that the request was for, if TLS has
    /// verified it.
    pub fn why(&self, misplaced: Misplaced, to: Option<&Destination>) -> String {
        let Some((name, _, hosts)) = self.names.get(misplaced.number) else { return misplaced.to_string() };
        let all = hosts.join(",");
        match (misplaced.spot, to) {
            (Spot::Unread, _) => {
                format!(
                    "it has the placeholder of {name}, whose secret goes to {all} only, in requests by https"
                )
            }
            (Spot::Url, Some(to)) if hosts.contains(&shown(to)) => format!(
                "the placeholder of {name} is in a URL, where it is not replaced, because servers log URLs; send it in a field or \
                 in the content"
            ),
            (_, Some(to)) if hosts.contains(&shown(to)) => {
                format!("the placeholder of {name} is in content that cannot be changed: {UNCHANGED}")
            }
            (_, Some(to)) => format!(
                "it has the placeholder of {name}, whose secret is for {all} only; to give the secret to this host, too: --secret \
                 {name}=…@{all},{}",
                shown(to)
            ),
            (_, None) => format!(
                "it has the placeholder of {name} in clear text, and the secret goes to {all} only, over TLS; ask by https"
            ),
        }
    }
}

/// More secrets than [`Words`] can hold: whatever begins like a placeholder is refused.
fn any_placeholder() -> Words {
    Words::new(&[PREFIX.as_bytes().to_vec()], false).expect("it is neither empty nor long")
}

/// What content cannot be changed.
const UNCHANGED: &str = "it is compressed, or gRPC, or longer than 1 MiB with its length in the head";

/// A server as the command line writes it.
fn shown(to: &Destination) -> String {
    if to.port == 443 { to.host.to_string() } else { to.to_string() }
}
