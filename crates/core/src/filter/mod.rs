//! The filter language, which selects flows on the command line, in the admin interface and in scripts.
//!
//! ```text
//! proc == curl and dst in 10.0.0.0/8 and port in [443, 8000-8100]
//! host ~ "*.example" and not (reason == ok or state == live)
//! bytes > 1MiB and age > 10s
//! ```
//!
//! * `and`, `or`, `not` (also `&&`, `||`, `!`) and parentheses; `and` binds tighter than `or`.
//! * Words: `proc`, `user`, `rule`, `chain`, `carrier`, `listener`, `intercept`, `protocol`, `reason`, `state` (`live` or
//!   `ended`) and `host` take `==`, `!=`, `in [a, b]` and, with `*` and `?`, `~` and `!~`.
//! * Addresses: `src` and `dst` take `==` and `!=` (address or name), `in` (a network, or a list) and `~` (a pattern).
//! * Numbers: `id`, `port`, `sport`, `packets`, `packets_up`, `packets_down`; sizes: `bytes`, `up`, `down` (`1500`, `64KiB`, `1.5MB`); times: `age`, `connect`,
//!   `first_byte` (`250ms`, `10s`, `5m`, `1h`): `==`, `!=`, `<`, `<=`, `>`, `>=`, `in`.
//! * An unknown property matches nothing. For a flow without a host name, both `host == a` and `host != a` are false,
//!   and `not host == a` is true.

mod complete;
mod error;
mod glob;
mod lexer;
mod needs;
mod parser;
mod test;
mod value;

pub use complete::Completion;
pub use error::FilterError;
pub(crate) use glob::fits;
pub use needs::{Property, Required};

use crate::flow::{Destination, EndReason, Intercept, Protocol};
use std::borrow::Cow;
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;
use test::Test;

/// The properties of a flow that a filter can test. `None` means not known (yet).
#[derive(Clone, Debug, Default)]
pub struct FlowFacts<'a> {
    /// `id`: the flow's number.
    pub id: u64,
    /// `src`, `sport`: the client's address.
    pub client: Option<SocketAddr>,
    /// `dst`, `port`: the destination that the application requested.
    pub dst: Option<&'a Destination>,
    /// `host`: the host name.
    pub host: Option<&'a str>,
    /// `proc`: base name of the local program.
    pub process: Option<&'a str>,
    /// `user`: the user that opened the flow.
    pub user: Option<&'a str>,
    /// `rule`: the rule that decided.
    pub rule: Option<&'a str>,
    /// `chain`: the functions that the flow passes, in order, with commas between them.
    pub chain: Option<Cow<'a, str>>,
    /// `carrier`: how the flow is carried.
    pub carrier: Option<&'a str>,
    /// `listener`: the listener that caught the flow.
    pub listener: Option<&'a str>,
    /// `intercept`: how the flow was caught.
    pub intercept: Option<Intercept>,
    /// `protocol`: its transport protocol.
    pub protocol: Option<Protocol>,
    /// `reason`: how the flow ended. `None` for a live flow (`state == live`).
    pub reason: Option<EndReason>,
    /// `up`: bytes from client to server (`bytes` is the sum of both).
    pub bytes_up: u64,
    /// `down`: bytes from server to client.
    pub bytes_down: u64,
    /// `packets_up`: datagrams from client to server (`packets` is the sum of both). 0 for TCP.
    pub packets_up: u64,
    /// `packets_down`: datagrams from server to client.
    pub packets_down: u64,
    /// `age`: the time from the interception until now, or until the end.
    pub age: Duration,
    /// `connect`: the time until the path to the server was established.
    pub connect: Option<Duration>,
    /// `first_byte`: the time until the server's first byte.
    pub first_byte: Option<Duration>,
}

/// A parsed filter. The empty text is the filter that matches every flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    source: Box<str>,
    root: Node,
}

/// A node of the expression. [`parser::DEPTH_MAX`] limits the depth.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    /// True if all are true. Empty, it matches everything.
    All(Vec<Node>),
    /// True if at least one is true.
    Any(Vec<Node>),
    Not(Box<Node>),
    Test(Test),
}

impl Filter {
    /// Longest filter text, in bytes.
    pub const TEXT_MAX: usize = 4096;

    /// The filter that matches every flow.
    pub fn everything() -> Self {
        Self { source: "".into(), root: Node::All(Vec::new()) }
    }

    /// Parses a filter.
    ///
    /// # Errors
    /// Fails with what is wrong, where in the text, and what would be right.
    pub fn parse(text: &str) -> Result<Self, FilterError> {
        if text.len() > Self::TEXT_MAX {
            let message =
                format!("a filter has at most {} bytes, this one has {}", Self::TEXT_MAX, text.len());
            return Err(FilterError::new(0..0, message));
        }
        if text.trim().is_empty() {
            return Ok(Self::everything());
        }
        Ok(Self { source: text.into(), root: parser::parse(text)? })
    }

    /// Returns the words that may stand at byte `at` of a text that is being written. What follows is not looked at.
    /// `values` gives values of a field that only the caller knows, such as the names of rules.
    pub fn complete(text: &str, at: usize, values: impl Fn(&str) -> Vec<String>) -> Completion {
        complete::complete(text, at, values)
    }

    /// Whether this filter matches every flow because it is empty.
    pub fn is_everything(&self) -> bool {
        self.root == Node::All(Vec::new())
    }

    /// Returns the text that this filter was parsed from.
    pub fn as_str(&self) -> &str {
        &self.source
    }

    /// Whether the filter matches a flow.
    pub fn matches(&self, flow: &FlowFacts<'_>) -> bool {
        self.root.matches(flow)
    }
}

impl Node {
    fn matches(&self, flow: &FlowFacts<'_>) -> bool {
        match self {
            Self::All(nodes) => nodes.iter().all(|node| node.matches(flow)),
            Self::Any(nodes) => nodes.iter().any(|node| node.matches(flow)),
            Self::Not(node) => !node.matches(flow),
            Self::Test(test) => test.matches(flow),
        }
    }
}

impl FromStr for Filter {
    type Err = FilterError;

    fn from_str(text: &str) -> Result<Self, FilterError> {
        Self::parse(text)
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source)
    }
}
