//! Jobs: what people use Sidetrack for. `sidetrack help JOB` says how a job is done, and `sidetrack init JOB` asks some
//! questions and writes a configuration for it.

mod answers;
pub mod help;
pub mod init;
mod table;

use answers::Question;

/// What has to be made before a configuration is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Makes {
    /// Nothing.
    Nothing,
    /// The key of an overlay node, `overlay.key`. Its public half fills `{{public_key}}`.
    OverlayKey,
    /// The authority for opened TLS connections, in the folder `ca`, for the names of the answer `names`.
    Authority,
}

/// A job.
#[derive(Debug)]
struct Job {
    /// Its name on the command line.
    name: &'static str,
    /// What it does, in one line.
    about: &'static str,
    /// The questions whose answers fill the templates.
    questions: &'static [Question],
    /// The files and their templates. The first is the configuration.
    files: &'static [(&'static str, &'static str)],
    makes: Makes,
    /// The commands after `init`, each with what it does.
    steps: &'static [(&'static str, &'static str)],
    /// The example that shows it, a folder of examples/.
    example: &'static str,
    /// The pages of docs/ that explain it.
    pages: &'static [&'static str],
}

/// Finds a job by its name.
fn find(name: &str) -> Option<&'static Job> {
    table::JOBS.iter().find(|job| job.name == name)
}

/// The names of all jobs, separated by commas.
fn names() -> String {
    table::JOBS.iter().map(|job| job.name).collect::<Vec<_>>().join(", ")
}
