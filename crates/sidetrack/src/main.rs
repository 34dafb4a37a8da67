//! The one binary: sub-commands only.

fn main() {}
