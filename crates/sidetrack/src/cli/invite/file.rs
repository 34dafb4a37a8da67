//! Changes to a configuration file that a person wrote: comments, order, owner and mode stay. The new text is checked before it
//! replaces the old one, which happens in one step.

use crate::config::{At, Config, List};
use anyhow::Context as _;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

/// The ending of a file that is not in its place yet.
const NEW: &str = ".sidetrack-new";

/// A checked text that is on the disk beside its file. On drop, it is removed.
#[derive(Debug)]
pub(super) struct Prepared {
    /// The file, with links followed.
    path: PathBuf,
    beside: PathBuf,
    before: Option<String>,
    is_committed: bool,
}

impl Prepared {
    /// Writes a text beside the file and checks it there. `before` is the text that it was made from; `None`: there is no file.
    ///
    /// # Errors
    /// The file cannot be written, or the text has mistakes. Nothing is left then.
    pub(super) fn new(path: &Path, before: Option<String>, text: &str) -> anyhow::Result<Self> {
        // Relative paths in the text start from the folder of the name that the user gave, also if that is a link.
        if let Err(error) = Config::from_text(&path.display().to_string(), text) {
            let shown = error.render(false);
            anyhow::bail!(
                "with this change {} would be wrong, so it was not changed:\n{}",
                path.display(),
                shown.trim_end()
            );
        }
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let name = path.file_name().with_context(|| format!("{} is not a file", path.display()))?;
        let mut beside = name.to_owned();
        beside.push(NEW);
        let beside = path.with_file_name(beside);
        let cannot = || format!("cannot write {}", beside.display());
        match fs::remove_file(&beside) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error).with_context(cannot),
            _ => {}
        }
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside);
        let mut file = file.with_context(cannot)?;
        let prepared = Self { path, beside: beside.clone(), before, is_committed: false };
        file.write_all(text.as_bytes()).with_context(cannot)?;
        prepared.like_before(&file)?;
        file.sync_all().with_context(cannot)?;
        Ok(prepared)
    }

    /// Gives the new file the owner and mode of the old one. A new file has the usual mode.
    fn like_before(&self, file: &File) -> anyhow::Result<()> {
        let (mode, owner) = match fs::metadata(&self.path) {
            Ok(old) => (old.mode() & 0o7777, Some((old.uid(), old.gid()))),
            Err(_) => (0o644, None),
        };
        let ours = file.metadata()?;
        if let Some((uid, gid)) = owner.filter(|owner| *owner != (ours.uid(), ours.gid())) {
            fchown(file, Some(uid), Some(gid)).with_context(|| {
                format!("cannot give the new text to the owner of {}", self.path.display())
            })?;
        }
        Ok(file.set_permissions(fs::Permissions::from_mode(mode))?)
    }

    /// Puts the text in its place.
    ///
    /// # Errors
    /// The file has changed since its text was read, or cannot be replaced.
    pub(super) fn commit(mut self) -> anyhow::Result<()> {
        anyhow::ensure!(
            read(&self.path)? == self.before,
            "{} was changed by another program meanwhile: try again",
            self.path.display()
        );
        let cannot = || format!("cannot replace {}", self.path.display());
        fs::rename(&self.beside, &self.path).with_context(cannot)?;
        self.is_committed = true;
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        // The name must survive a power cut, too.
        File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all()).with_context(cannot)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if !self.is_committed {
            let _ = fs::remove_file(&self.beside);
        }
    }
}

/// Reads a configuration. `None`: there is no file.
pub(super) fn read(path: &Path) -> anyhow::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Returns the path of a file that a configuration names.
pub(super) fn beside(config: &Path, file: &str) -> PathBuf {
    config.parent().unwrap_or(Path::new("")).join(file)
}

/// The parts of a configuration that invitations change, with their places. All else is skipped.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Places {
    #[serde(default)]
    pub listen: Vec<Listen>,
    #[serde(default)]
    pub tunnel: Vec<Tunnel>,
    pub overlay: Option<Overlay>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Listen {
    pub name: Option<String>,
    pub kind: Option<String>,
    pub identity: Option<String>,
    pub pins: Option<List<String>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Tunnel {
    pub name: Option<String>,
    pub identity: Option<String>,
    pub pins: Option<List<String>>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Overlay {
    pub name: Option<String>,
    pub key_file: Option<String>,
    #[serde(default)]
    pub node: BTreeMap<String, Node>,
    #[serde(default)]
    pub topology: Vec<Edge>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Node {
    pub key: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Edge {
    pub ends: Option<[String; 2]>,
}

impl Places {
    /// Finds them in a text that `check` has accepted.
    ///
    /// # Errors
    /// The text is not TOML.
    pub(super) fn of(text: &str) -> anyhow::Result<Self> {
        Ok(toml::from_str(text)?)
    }
}

/// Returns the text with one more item at the beginning of a list, so that a comment behind an item stays with it.
pub(super) fn with_item(text: &str, list: &List<String>, item: &str) -> String {
    let item = toml::Value::String(item.to_owned()).to_string();
    let insert = |at: usize, what: &str| {
        let (before, after) = text.split_at_checked(at).unwrap_or((text, ""));
        format!("{before}{what}{after}")
    };
    let Range { start, end } = list.span();
    match list.items().first().map(At::span) {
        // One value without brackets.
        Some(first) if first == list.span() => {
            let value = text.get(first).unwrap_or_default();
            let (before, after) =
                (text.get(..start).unwrap_or_default(), text.get(end..).unwrap_or_default());
            format!("{before}[{item}, {value}]{after}")
        }
        Some(first) => {
            let line =
                text.get(..first.start).and_then(|before| before.rsplit('\n').next()).unwrap_or_default();
            let is_alone = line.trim().is_empty() && start + 1 < first.start;
            insert(first.start, &if is_alone { format!("{item},\n{line}") } else { format!("{item}, ") })
        }
        None => insert(start + 1, &item),
    }
}

/// Returns the text with a block behind it.
pub(super) fn with_block(text: &str, block: &str) -> String {
    let text = text.trim_end_matches('\n');
    if text.is_empty() { block.to_owned() } else { format!("{text}\n\n{block}") }
}

/// Returns a key of TOML.
pub(super) fn key(name: &str) -> String {
    let is_bare = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    if is_bare { name.to_owned() } else { value(name) }
}

/// Returns a text as TOML writes it.
pub(super) fn value(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// Returns texts as TOML writes a list, or one text without brackets.
pub(super) fn values<T: ToString>(texts: &[T]) -> String {
    match texts {
        [one] => value(&one.to_string()),
        texts => {
            let all: Vec<_> = texts.iter().map(|text| value(&text.to_string())).collect();
            format!("[{}]", all.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(pins: &str) -> String {
        let text = format!("a = 1 # one\n[[listen]]\npins = {pins} # last\n[b]\n");
        let places = Places::of(&text).expect("TOML");
        let new = with_item(&text, places.listen[0].pins.as_ref().expect("a list"), "new");
        let items: Vec<_> = Places::of(&new).expect("TOML").listen[0]
            .pins
            .iter()
            .flat_map(|list| list.items().iter().map(|item| item.to_string()).collect::<Vec<_>>())
            .collect();
        assert!(items.contains(&"new".to_owned()), "{new}");
        new.trim_start_matches("a = 1 # one\n[[listen]]\npins = ")
            .trim_end_matches(" # last\n[b]\n")
            .to_owned()
    }

    #[test]
    fn an_item_comes_first_and_comments_stay() {
        assert_eq!(added("[\"x\"]"), "[\"new\", \"x\"]");
        assert_eq!(added("'x'"), "[\"new\", 'x']");
        assert_eq!(added("[]"), "[\"new\"]");
        assert_eq!(added("[ # all\n]"), "[\"new\" # all\n]");
        assert_eq!(
            added("[\n    \"x\", # of x\n    \"y\", # of y\n]"),
            "[\n    \"new\",\n    \"x\", # of x\n    \"y\", # of y\n]"
        );
    }

    #[test]
    fn names_become_keys_and_values() {
        assert_eq!((key("a-1_b"), key("a.b"), key("")), ("a-1_b".into(), "\"a.b\"".into(), "\"\"".into()));
        assert_eq!(values(&["a"]), "\"a\"");
        assert_eq!(values(&["a", "b"]), "[\"a\", \"b\"]");
    }

    #[test]
    fn a_file_is_replaced_in_one_step_and_keeps_its_mode() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("sidetrack.toml");
        let old = "version = 1\ndefault = \"deny\" # mine\n".to_owned();
        fs::write(&path, &old).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("a mode");
        let entries = || fs::read_dir(folder.path()).expect("listed").count();

        let wrong =
            Prepared::new(&path, Some(old.clone()), "version = 1\nwrong = 2\n").expect_err("a mistake");
        assert!(wrong.to_string().contains("was not changed"), "{wrong}");
        assert_eq!((entries(), fs::read_to_string(&path).expect("read")), (1, old.clone()));

        let new = format!("{old}# more\n");
        drop(Prepared::new(&path, Some(old.clone()), &new).expect("prepared"));
        assert_eq!((entries(), fs::read_to_string(&path).expect("read")), (1, old.clone()), "not committed");

        let prepared = Prepared::new(&path, Some("another text".to_owned()), &new).expect("prepared");
        assert!(prepared.commit().expect_err("changed").to_string().contains("meanwhile"));
        assert_eq!(entries(), 1);

        Prepared::new(&path, Some(old), &new).expect("prepared").commit().expect("replaced");
        assert_eq!((entries(), fs::read_to_string(&path).expect("read")), (1, new));
        assert_eq!(fs::metadata(&path).expect("there").mode() & 0o7777, 0o640);
    }
}
