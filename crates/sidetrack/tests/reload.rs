//! Reload with real files and signals: a right file takes the place of the old one as a whole, a wrong one changes
//! nothing.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use sidetrack::config::Config;
use sidetrack::reload::{Change, ReloadHandle, Reloader};
use sidetrack_testkit::LIMIT;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use tokio::sync::{Mutex, MutexGuard, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// A signal goes to the whole process: one test at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

fn text(rule: &str) -> String {
    format!("version = 1\ndefault = \"deny\"\n[[rule]]\nname = \"{rule}\"\ncarrier = \"direct\"\n")
}

fn rule(config: &Config) -> String {
    config.policy.rules()[0].name.to_string()
}

/// A file that is watched.
struct Watched {
    folder: TempDir,
    handle: ReloadHandle,
    /// Names of the first rules, old and new, of every configuration that was applied.
    applied: mpsc::UnboundedReceiver<(String, String)>,
    task: JoinHandle<std::io::Result<()>>,
    _alone: MutexGuard<'static, ()>,
}

impl Watched {
    async fn new(refuse: &'static str) -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("sidetrack.toml");
        std::fs::write(&path, text("first")).unwrap();
        Self::at(folder, &path, refuse).await
    }

    async fn at(folder: TempDir, path: &Path, refuse: &'static str) -> Self {
        let _alone = ONE_AT_A_TIME.lock().await;
        let config = Arc::new(Config::load(path).unwrap());
        let (sender, applied) = mpsc::unbounded_channel();
        let apply = Box::new(move |change: &Change<'_>| {
            anyhow::ensure!(rule(change.new) != refuse, "the packet filter refused it");
            sender.send((rule(change.old), rule(change.new)))?;
            Ok(())
        });
        let (reloader, handle) = Reloader::new(path, config, apply);
        let (ready, is_ready) = oneshot::channel();
        let task = tokio::spawn(reloader.run(ready));
        is_ready.await.unwrap();
        Self { folder, handle, applied, task, _alone }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("sidetrack.toml")
    }

    async fn next(&mut self) -> (String, String) {
        timeout(LIMIT, self.applied.recv()).await.expect("no reload came").unwrap()
    }

    fn in_use(&self) -> String {
        rule(&self.handle.current().load())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn pair(old: &str, new: &str) -> (String, String) {
    (old.to_owned(), new.to_owned())
}

#[tokio::test]
async fn a_file_written_in_place_or_renamed_over_is_taken() {
    let mut watched = Watched::new("").await;
    std::fs::write(watched.path(), text("second")).unwrap();
    assert_eq!(watched.next().await, pair("first", "second"));
    let other = watched.folder.path().join(".sidetrack.toml.swp");
    std::fs::write(&other, text("third")).unwrap();
    std::fs::rename(&other, watched.path()).unwrap();
    assert_eq!(watched.next().await, pair("second", "third"));
    std::fs::remove_file(watched.path()).unwrap();
    std::fs::write(watched.path(), text("fourth")).unwrap();
    assert_eq!(watched.next().await, pair("third", "fourth"));
    watched.handle.reload().await.unwrap();
    assert_eq!(watched.in_use(), "fourth");
}

#[tokio::test]
async fn a_link_that_is_moved_is_followed() {
    let folder = TempDir::new().unwrap();
    for name in ["one", "two"] {
        std::fs::create_dir(folder.path().join(name)).unwrap();
        std::fs::write(folder.path().join(name).join("sidetrack.toml"), text(name)).unwrap();
    }
    let link =
        |to: &str, at: &str| std::os::unix::fs::symlink(folder.path().join(to), folder.path().join(at));
    link("one", "data").unwrap();
    link("data/sidetrack.toml", "sidetrack.toml").unwrap();
    link("two", "data.new").unwrap();
    let path = folder.path().join("sidetrack.toml");
    let mut watched = Watched::at(folder, &path, "").await;
    std::fs::rename(watched.folder.path().join("data.new"), watched.folder.path().join("data")).unwrap();
    assert_eq!(watched.next().await, pair("one", "two"));
}

#[tokio::test]
async fn a_wrong_file_changes_nothing_and_says_why() {
    let watched = Watched::new("").await;
    let before = watched.handle.current().load_full();
    for (bad, why) in [
        ("version = 1\n[[rule]]\nname = \"x\"\ncarrier = \"direct\"\n", "default"),
        ("version = [", "is not TOML"),
    ] {
        std::fs::write(watched.path(), bad).unwrap();
        let error = watched.handle.reload().await.unwrap_err();
        assert!(error.contains(why), "{error}");
        let standing = watched.handle.standing();
        assert_eq!(standing.generation, 1);
        assert_eq!(standing.last_error, Some(error));
    }
    std::fs::remove_file(watched.path()).unwrap();
    assert!(watched.handle.reload().await.unwrap_err().contains("cannot read"));
    assert!(Arc::ptr_eq(&before, &watched.handle.current().load_full()));
    std::fs::write(watched.path(), text("good")).unwrap();
    let generation = watched.handle.reload().await.unwrap();
    assert_eq!(watched.in_use(), "good");
    let standing = watched.handle.standing();
    assert!(standing.generation >= generation && standing.last_error.is_none());
}

#[tokio::test]
async fn what_cannot_be_applied_changes_nothing() {
    let watched = Watched::new("refused").await;
    std::fs::write(watched.path(), text("refused")).unwrap();
    assert_eq!(watched.handle.reload().await.unwrap_err(), "the packet filter refused it");
    assert_eq!((watched.in_use().as_str(), watched.handle.standing().generation), ("first", 1));
}

#[tokio::test]
async fn sighup_reloads_even_an_unchanged_file() {
    let mut watched = Watched::new("").await;
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::HUP).unwrap();
    assert_eq!(watched.next().await, pair("first", "first"));
}

#[tokio::test]
async fn a_holder_keeps_its_snapshot() {
    let watched = Watched::new("").await;
    let held = watched.handle.current().load_full();
    std::fs::write(watched.path(), text("second")).unwrap();
    let generation = watched.handle.reload().await.unwrap();
    assert!(generation >= 2);
    assert_eq!((rule(&held).as_str(), watched.in_use().as_str()), ("first", "second"));
}
