//! `sidetrack-lab`: one command per table or figure of the seeds.

fn main() {}
