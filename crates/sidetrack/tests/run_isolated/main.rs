//! `sidetrack run` with programs that know nothing of it: curl, Python, Node, Java, static Go and C.
//!
//! The parent of the command answers every connection itself and dials none: what a program gets can only have come
//! through it.

mod cgroup;
mod programs;
mod scenarios;
mod served;

use sidetrack_testkit::apart::{Outcome, Suite};
use std::process::ExitCode;

const SUITE: Suite<Outcome> = Suite {
    title: "run isolated",
    // Java compiles its source first.
    limit_seconds: 300,
    for_everybody: &[
        ("curl by name and by address", programs::curl),
        ("python", programs::python),
        ("node", programs::node),
        ("java", programs::java),
        ("static go", programs::go),
        ("static c", programs::musl),
        ("names arrive as the program says them", scenarios::names),
        ("dns over tcp", scenarios::dns_over_tcp),
        ("exit code and signals", scenarios::exit_codes),
        ("a terminal's interrupt", scenarios::terminal),
        ("children are served too", scenarios::children),
    ],
    for_root: &[
        ("nothing leaks (root)", scenarios::no_leak_as_root),
        ("nothing leaks (nobody)", scenarios::no_leak_as_nobody),
        ("cgroup: connections, names and the rest", cgroup::serves),
        ("cgroup: nothing is left behind", cgroup::leaves_nothing),
        ("cgroup: nothing survives a kill", cgroup::survives_nothing),
        ("cgroup: rights can be given up before the end", cgroup::without_rights),
    ],
    internal: &[
        ("on a terminal", scenarios::on_terminal),
        ("cgroup: start and wait", cgroup::start_and_wait),
    ],
};

fn main() -> ExitCode {
    SUITE.main(programs::build)
}
