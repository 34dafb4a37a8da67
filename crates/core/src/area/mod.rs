//! The area logic of the EPI framework, Sec. III (Eqs. 1 to 5). It decides which nodes may exchange data directly,
//! and which bridging functions are needed between the others.
//!
//! - Nodes N_App have attributes A_j (Eqs. 1 to 3). An *area* is the class of nodes with equal attributes.
//! - A *channel* g => h exists if and only if A_g is a subset of A_h (Eq. 4). It has a direction.
//! - Without a channel, the *missing attributes* are e = A_h minus A_g (Eq. 5). Functions bridge them: the cheapest
//!   chain that applies exactly e, in an order that satisfies the declared constraints.
//! - If functions cannot bridge e, the pair is *unfeasible*, and the result names the attributes that cause it.
//!
//! Eq. 5 ignores attributes that g has and h lacks. If a pair without a channel has an empty e, there is nothing to
//! bridge. The result is then [`Outcome::Surplus`] with the attributes that the destination lacks, and a policy
//! decides about it.
//!
//! All functions here are pure. [`Areas`] stores the result for all pairs. A change of one node costs one row and one
//! column.

mod catalogue;
mod cover;
mod set;
mod table;

pub use catalogue::{
    AttributeSet, Bridge, BridgingFunction, Catalogue, CatalogueError, FunctionSet, Position,
};
pub use set::SmallSet;
pub use table::{Areas, Counts, Outcome};
