//! What all experiments share: rows that take turns, samples by round, bars with their results, and the page they print.

mod bar;
mod missing;
mod page;
mod results;

pub use bar::{Bar, Bound, Need};
pub use missing::Missing;
pub use page::{Page, exit};
pub use results::{Results, STEAL_LIMIT_PERCENT, Sample, Timing, Unmeasured, in_turn};
