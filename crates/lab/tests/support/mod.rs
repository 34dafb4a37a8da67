//! Shared code of the namespace tests: programs that fetch from the origin, and counts of cases that ran and did not
//! run.

pub(crate) mod programs;

use std::fmt::Write as _;

use sidetrack_lab::launch::find_program;
use sidetrack_lab::peers::{Unavailable, ours};
use sidetrack_lab::site::Site;

/// Returns why an experiment with links, our program and rules of the packet filter cannot be made here.
pub(crate) fn obstacle() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("namespaces with links need root".into());
    }
    if let Err(missing) = ours::program() {
        return Some(missing.to_string());
    }
    find_program("nft").is_none().then(|| "nft is not installed".into())
}

/// The end of a case that did not fail.
pub(crate) enum Done {
    /// It ran and was correct.
    Ran,
    /// It could not run; why.
    Skipped(String),
}

/// Why a case failed.
pub(crate) type Failure = String;

/// Counts cases; a failure or, with `SIDETRACK_REQUIRE_ALL=1`, a skip fails the test at the end.
#[derive(Default)]
pub(crate) struct Tally {
    ran: u32,
    skipped: u32,
    failures: String,
}

impl Tally {
    /// Notes how a case ended.
    pub(crate) fn note(&mut self, case: &str, result: Result<Done, Failure>) {
        match result {
            Ok(Done::Ran) => {
                self.ran += 1;
                println!("ok      {case}");
            }
            Ok(Done::Skipped(why)) => {
                self.skipped += 1;
                println!("skipped {case}: {why}");
            }
            Err(why) => {
                println!("FAILED  {case}: {why}");
                let _ = writeln!(self.failures, "{case}: {why}");
            }
        }
    }

    /// Ends the test.
    pub(crate) fn finish(self) {
        println!("{} ran, {} skipped", self.ran, self.skipped);
        assert!(self.failures.is_empty(), "\n{}", self.failures);
        assert!(
            !requires_all() || self.skipped == 0,
            "{} cases were skipped and SIDETRACK_REQUIRE_ALL is set",
            self.skipped
        );
        assert!(self.ran + self.skipped > 0, "no case was tried");
    }
}

fn requires_all() -> bool {
    std::env::var_os("SIDETRACK_REQUIRE_ALL").is_some_and(|value| value == "1")
}

/// Returns the site, or `None` if this user cannot make one, which is printed and counts as a skip.
pub(crate) fn site(tally: &mut Tally) -> Option<Site> {
    if !rustix::process::geteuid().is_root() {
        tally.note("everything", Ok(Done::Skipped("namespaces with links need root".into())));
        return None;
    }
    Some(Site::new().expect("the site can be built"))
}

/// An absent peer is a skip; one that does not start is a failure.
pub(crate) fn skip_if_absent(unavailable: Unavailable) -> Result<Done, Failure> {
    match unavailable {
        Unavailable::Absent(what) => Ok(Done::Skipped(what)),
        failed @ Unavailable::Failed(_) => Err(failed.to_string()),
    }
}
