//! Policy: ordered rules, a pure function from a flow to a verdict. (Types land first; rules follow.)

use std::sync::Arc;

/// What policy says about a flow, with its reason.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The rule that decided; none if the default did.
    pub rule: Option<Arc<str>>,
}
