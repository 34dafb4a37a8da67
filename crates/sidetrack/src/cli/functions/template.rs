//! `fn new`: a first version of a function in a container.

use anyhow::Context;
use sidetrack_core::flow::HostName;
use std::fs;
use std::path::{Path, PathBuf};

/// The files of a new function: name and text. `NAME` in a text is replaced by the function's name.
const FILES: [(&str, &str); 3] = [
    ("function.py", include_str!("template/function.py")),
    ("Containerfile", include_str!("template/Containerfile")),
    ("sidetrack.toml", include_str!("template/sidetrack.toml")),
];

/// Writes a function `name` into a new folder of that name; returns the files.
///
/// # Errors
/// The name is not valid, the folder exists already, or it cannot be written.
pub(super) fn write(name: &str, below: &Path) -> anyhow::Result<Vec<PathBuf>> {
    anyhow::ensure!(
        name.parse::<HostName>().is_ok() && !name.contains('.') && !name.contains('_'),
        "'{name}' is no name for a function and an image: use letters, digits and '-'"
    );
    let folder = below.join(name);
    fs::create_dir(&folder)
        .with_context(|| format!("cannot make the folder {} (is it there already?)", folder.display()))?;
    let write = |(file, text): (&str, &str)| {
        let path = folder.join(file);
        fs::write(&path, text.replace("NAME", &name.to_lowercase()))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    };
    FILES.into_iter().map(write).collect()
}
