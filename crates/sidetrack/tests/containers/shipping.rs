//! Images that a domain lacks (step 6): shipped by the orchestrator to a real engine, or refused with the reason, and then nothing
//! of them is left.

use crate::engine::Engine;
use crate::plane::{Images, Plane};
use crate::steps::{function, is_carried};
use sidetrack::control::api::{Progress, Step};
use sidetrack_testkit::{eventually, in_namespace};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const NAME: &str = "localhost/function:1";

/// An engine that has lost its image, the archive of that image, and its digest.
struct Lost {
    engine: Engine,
    folder: tempfile::TempDir,
    archive: PathBuf,
    id: String,
}

fn said(engine: &Engine, arguments: &[&str]) -> String {
    let output = engine.podman(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

impl Lost {
    fn new() -> Self {
        Self::saved_as("docker-archive")
    }

    /// `form`: of what `podman save` writes.
    fn saved_as(form: &str) -> Self {
        let (engine, folder) = (Engine::alone(), tempfile::tempdir().expect("a folder"));
        let archive = folder.path().join("function.tar");
        let file = archive.display().to_string();
        said(&engine, &["save", "--quiet", "--format", form, "--output", &file, NAME]);
        let id = format!("sha256:{}", said(&engine, &["image", "inspect", "--format", "{{.Id}}", NAME]));
        said(&engine, &["rmi", "--force", NAME]);
        Self { engine, folder, archive, id }
    }

    /// What the files say: this archive at the orchestrator, this digest at the domain.
    fn images(&self, archive: &Path, id: &str) -> Images {
        Images {
            orchestrator: format!("[image.\"{NAME}\"]\narchive = \"{}\"\n", archive.display()),
            centre_top: format!("engine = \"{}\"\n", self.engine.socket().display()),
            centre: format!("[image.\"{NAME}\"]\nid = \"{id}\"\n"),
        }
    }

    fn plane(&self, trial: usize, images: &Images) -> Plane {
        Plane::shipping("[[grant]]\n", &function(&self.engine, trial), images)
    }

    fn has_images(&self) -> String {
        said(&self.engine, &["images", "--all", "--quiet"])
    }
}

fn is_ready(lines: &[Progress]) -> bool {
    matches!(lines.last(), Some(Progress::Done { step: Step::Ready, .. }))
}

fn underway(lines: &[Progress]) -> Vec<(u64, u64)> {
    let far = |line: &Progress| match line {
        Progress::Underway { step: Step::Ship, domain, image, bytes, bytes_total } => {
            assert_eq!((domain.as_str(), image.as_str()), ("centre", NAME));
            Some((*bytes, *bytes_total))
        }
        _ => None,
    };
    lines.iter().filter_map(far).collect()
}

#[test]
fn an_image_that_a_domain_lacks_is_shipped_once_and_flows_pass_it() {
    in_namespace(|| {
        let lost = Lost::new();
        let mut plane = lost.plane(20, &lost.images(&lost.archive, &lost.id));
        assert!(lost.has_images().is_empty() && !is_carried(plane.entry()));
        let before = plane.files();
        let lines = plane.submit("first", 0, |_| {});
        assert!(is_ready(&lines), "{lines:?}");
        let size = fs::metadata(&lost.archive).expect("the archive").len();
        let told = underway(&lines);
        assert!(
            !told.is_empty() && told.iter().all(|(bytes, total)| bytes <= total && *total == size),
            "{told:?}"
        );
        eventually("flows pass the function", || is_carried(plane.entry()));
        // Another one finds it there.
        let lines = plane.submit("second", 0, |_| {});
        assert!(is_ready(&lines) && underway(&lines).is_empty(), "{lines:?}");
        assert_eq!(plane.files(), before, "an archive is left");
        plane.end("first");
        plane.end("second");
        assert!(!is_carried(plane.entry()));
    });
}

#[test]
fn an_archive_in_the_layout_of_oci_is_taken_too() {
    in_namespace(|| {
        let lost = Lost::saved_as("oci-archive");
        let mut plane = lost.plane(25, &lost.images(&lost.archive, &lost.id));
        let lines = plane.submit("first", 0, |_| {});
        assert!(is_ready(&lines) && !underway(&lines).is_empty(), "{lines:?}");
        eventually("flows pass the function", || is_carried(plane.entry()));
        plane.end("first");
    });
}

/// The header of a symbolic link, as the first entry of an archive.
fn link(folder: &Path, name: &str, target: &str) -> Vec<u8> {
    std::os::unix::fs::symlink(target, folder.join(name)).expect("a link");
    let tar =
        Command::new("tar").args(["--format=ustar", "-c", "-f", "-", "-C"]).arg(folder).arg(name).output();
    tar.expect("tar").stdout[..512].to_vec()
}

#[test]
fn what_is_not_the_image_that_a_domain_takes_never_gets_to_its_engine() {
    in_namespace(|| {
        let lost = Lost::new();
        let whole = fs::read(&lost.archive).expect("the archive");
        let cut = lost.folder.path().join("cut.tar");
        fs::write(&cut, &whole[..whole.len() / 2]).expect("written");
        let twofold = lost.folder.path().join("twofold.tar");
        let link = link(lost.folder.path(), "manifest.json", "evil.json");
        fs::write(&twofold, [link, whole].concat()).expect("written");
        let other = format!("sha256:{}", "0".repeat(64));
        let right = || lost.images(&lost.archive, &lost.id);
        let small =
            Images { centre_top: format!("image_bytes_max = 100000\n{}", right().centre_top), ..right() };
        let trials = [
            (
                Images { centre: String::new(), ..right() },
                "takes none: its file has no [image.\"localhost/function:1\"]",
            ),
            (
                Images { orchestrator: String::new(), ..right() },
                "the orchestrator's file has no [image.\"localhost/function:1\"]",
            ),
            (lost.images(&cut, &lost.id), "the archive of the image is truncated"),
            (lost.images(&twofold, &lost.id), "two entries 'manifest.json'"),
            (lost.images(&lost.archive, &other), "and not sha256:0000"),
            (small, "more than the 100000 bytes that `image_bytes_max` allows"),
        ];
        for (trial, (images, wrong)) in trials.iter().enumerate() {
            let mut plane = lost.plane(30 + trial, images);
            let before = plane.files();
            let lines = plane.submit("trial", 0, |_| {});
            let Some(Progress::Failed { step, domain, error }) = lines.last() else { panic!("{lines:?}") };
            assert_eq!((*step, domain.as_deref()), (Step::Ship, Some("centre")), "{error}");
            assert!(error.contains(wrong), "{wrong}: {error}");
            assert!(!plane.settled() && !is_carried(plane.entry()), "{wrong}");
            assert!(lost.has_images().is_empty(), "{wrong}");
            assert_eq!(plane.files(), before, "{wrong}");
        }
    });
}

#[test]
fn an_agent_that_is_killed_while_it_receives_leaves_nothing_and_takes_it_the_next_time() {
    in_namespace(|| {
        let lost = Lost::new();
        let mut plane = lost.plane(40, &lost.images(&lost.archive, &lost.id));
        let before = plane.files();
        // Five steps are done, and the image is on its way.
        let lines = plane.submit("first", 6, |plane| plane.centre.kill());
        assert!(!is_ready(&lines), "{lines:?}");
        plane.centre.restart();
        assert!(!plane.settled() && !is_carried(plane.entry()));
        assert_eq!(plane.files(), before, "an archive is left");
        let lines = plane.submit("first", 0, |_| {});
        assert!(is_ready(&lines), "{lines:?}");
        eventually("flows pass the function", || is_carried(plane.entry()));
    });
}
