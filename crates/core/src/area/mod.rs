//! The area logic of the EPI framework, Sec. III (Eqs. 1 to 5): which nodes may exchange data as they are, and which bridging
//! functions have to stand between those that may not.
//!
//! - Nodes N_App with their attributes A_j (Eqs. 1 to 3); an *area* is the class of nodes with equal attributes.
//! - A *channel* g => h exists iff A_g is a subset of A_h (Eq. 4). It has a direction.
//! - Where there is none, the *missing attributes* are e = A_h minus A_g (Eq. 5). They are bridged by functions that apply
//!   exactly e, the cheapest such chain, in an order that satisfies the declared constraints. If functions cannot, the pair
//!   is *unfeasible*, with the attributes that are to blame.
//!
//! Eq. 5 says nothing of what g has and h has not. A pair without a channel whose e is empty is therefore bridged by an
//! empty chain, as the seed's formula has it; [`Areas::surplus`] tells what the destination lacks, for a policy that
//! minds.
//!
//! Everything here is a pure function of its input. [`Areas`] keeps the answer for all pairs and follows changes of single
//! nodes at the cost of one row and one column.

mod catalogue;
mod cover;
mod set;
mod table;

pub use catalogue::{
    AttributeSet, Bridge, BridgingFunction, Catalogue, CatalogueError, FunctionSet, Position,
};
pub use set::SmallSet;
pub use table::{Areas, Counts, Outcome};
