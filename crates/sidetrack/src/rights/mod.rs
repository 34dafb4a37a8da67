//! What processes give up before they read what peers send: root's user id, capabilities, and files that they do not need.

mod files;
mod user;

pub use files::{allow, restrict, system};
pub use user::{DataUser, TO_BECOME, become_or_stay, is_refused};
