//! The TCP states of the two sides of a connection, as records show them.

use serde::{Deserialize, Serialize};
use sidetrack_core::engine::Stamp;
use sidetrack_core::flow::Side;
use std::borrow::Cow;

/// One state that one side reached, written as `["client","ESTABLISHED",0.000412]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reached(
    /// `client` or `server`.
    pub Cow<'static, str>,
    /// The state's name in RFC 9293, section 3.3.2.
    pub Cow<'static, str>,
    /// Seconds after the capture of the flow, exact to 2 us.
    pub f64,
);

impl From<Stamp> for Reached {
    fn from(stamp: Stamp) -> Self {
        let side = match stamp.side {
            Side::Client => "client",
            Side::Server => "server",
        };
        Self(side.into(), stamp.state.as_str().into(), f64::from(stamp.after_us) / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidetrack_core::engine::State;

    #[test]
    fn a_state_reads_as_it_was_written() {
        let reached =
            Reached::from(Stamp { side: Side::Server, state: State::SynReceived, after_us: 1_000_412 });
        let text = serde_json::to_string(&reached).expect("JSON");
        assert_eq!(text, r#"["server","SYN-RECEIVED",1.000412]"#);
        assert_eq!(serde_json::from_str::<Reached>(&text).expect("read again"), reached);
        assert!(serde_json::from_str::<Reached>(r#"["server",1.0]"#).is_err());
    }
}
