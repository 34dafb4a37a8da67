//! Images as archives (`podman save --format docker-archive`, `docker save`): whether one is the image that it is said to be, and
//! nothing else, before a container engine is given it.
//!
//! Engines read archives in more than one way. What could be read differently here and there is therefore refused: long names,
//! two files of one name, an OCI index beside the manifest.

pub mod stream;
mod tar;

use ring::digest::{Context, SHA256};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;

/// Longest manifest or configuration that is read, bytes.
const TEXT_MAX: u64 = 1 << 20;
/// Most layers of an image; engines have a bound of about this.
const LAYERS_MAX: usize = 256;
/// Bytes that are read at a time.
const PIECE: usize = 64 << 10;

/// Why an archive is not taken.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// It is no archive of an image, or one that could be read in two ways.
    #[error("this is no archive of an image: {0}")]
    Malformed(String),
    /// It ends before its end.
    #[error("the archive of the image is truncated")]
    Truncated,
    /// It is another image, or its parts are not those it was made of.
    #[error("{what} has the digest {found}, and not {expected}")]
    Digest {
        /// What.
        what: String,
        /// As it is.
        found: String,
        /// As it should be.
        expected: String,
    },
    /// It would give names to images that nobody asked for.
    #[error("the archive names '{0}': it may name '{1}' and nothing else")]
    Name(String, String),
    /// It cannot be read.
    #[error("the archive cannot be read: {0}")]
    Io(#[from] io::Error),
}

fn malformed(why: impl Into<String>) -> ArchiveError {
    ArchiveError::Malformed(why.into())
}

/// One image of `manifest.json` (moby, `image/spec/v1.2.md`).
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Described {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

#[derive(Deserialize)]
struct Configured {
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

/// Whether the archive holds the image whose configuration has the digest `id` (`sha256:` and 64 digits), names it `name` or not
/// at all, and holds all its layers unharmed. Reads it twice.
///
/// # Errors
/// What is wrong with it.
pub fn check(mut archive: impl Read + Seek, name: &str, id: &str) -> Result<(), ArchiveError> {
    let files = tar::files(&mut archive)?;
    for index in ["index.json", "oci-layout"] {
        if files.contains_key(index) {
            return Err(malformed(format!(
                "it has '{index}': save it with `podman save --format docker-archive`"
            )));
        }
    }
    let manifest = text(&mut archive, &files, "manifest.json")?;
    let manifest: Vec<Described> =
        serde_json::from_slice(&manifest).map_err(|error| malformed(format!("manifest.json: {error}")))?;
    let [image] = &manifest[..] else {
        return Err(malformed(format!("it has {} images in place of one", manifest.len())));
    };
    if let Some(other) = image.repo_tags.iter().flatten().find(|tag| *tag != name) {
        return Err(ArchiveError::Name(other.clone(), name.to_owned()));
    }
    let configuration = text(&mut archive, &files, &image.config)?;
    expect("the configuration of the image", digest(&mut &configuration[..])?, id)?;
    let configured: Configured = serde_json::from_slice(&configuration)
        .map_err(|error| malformed(format!("{}: {error}", image.config)))?;
    let expected = configured.rootfs.diff_ids;
    if expected.len() != image.layers.len() || expected.len() > LAYERS_MAX {
        return Err(malformed(format!("{} layers for {} digests", image.layers.len(), expected.len())));
    }
    for (layer, expected) in image.layers.iter().zip(&expected) {
        let mut content = open(&mut archive, &files, layer)?;
        expect(&format!("the layer '{layer}'"), digest(&mut content)?, expected)?;
    }
    Ok(())
}

/// A file's content, which is there in full.
fn open<'a, R: Read + Seek>(
    archive: &'a mut R,
    files: &BTreeMap<String, Range<u64>>,
    name: &str,
) -> Result<io::Take<&'a mut R>, ArchiveError> {
    let range = files.get(name).ok_or_else(|| malformed(format!("it lacks the file '{name}'")))?;
    archive.seek(SeekFrom::Start(range.start))?;
    Ok(archive.take(range.end - range.start))
}

fn text<R: Read + Seek>(
    archive: &mut R,
    files: &BTreeMap<String, Range<u64>>,
    name: &str,
) -> Result<Vec<u8>, ArchiveError> {
    let mut content = open(archive, files, name)?;
    if content.limit() > TEXT_MAX {
        return Err(malformed(format!("'{name}' has more than {TEXT_MAX} bytes")));
    }
    let mut text = Vec::new();
    content.read_to_end(&mut text)?;
    Ok(text)
}

fn expect(what: &str, found: String, expected: &str) -> Result<(), ArchiveError> {
    if found == expected {
        return Ok(());
    }
    Err(ArchiveError::Digest { what: what.to_owned(), found, expected: expected.to_owned() })
}

/// The digest as images name it.
fn digest(content: &mut impl Read) -> io::Result<String> {
    let mut context = Context::new(&SHA256);
    let mut piece = vec![0; PIECE];
    loop {
        match content.read(&mut piece)? {
            0 => break,
            read => context.update(&piece[..read]),
        }
    }
    Ok(format!("sha256:{}", data_encoding::HEXLOWER.encode(context.finish().as_ref())))
}

#[cfg(test)]
mod tests;
