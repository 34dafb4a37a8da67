//! Reads the tables of contents of an archive: `manifest.json` (moby, `image/spec/v1.2.md`), `index.json` (OCI
//! Image Layout Specification 1.0), or both, which must agree.

use super::{ArchiveError, digest, expect, file, malformed, open, text};
use crate::image::tar::{Entry, Table};
use flate2::read::MultiGzDecoder;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::io::{self, Read, Seek};
use std::ops::Range;

/// Most indexes that lead to one another.
const DEPTH_MAX: usize = 3;
/// First bytes of gzip (RFC 1952 Sec. 2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Files of older formats, for each layer and for the whole archive. Readers of a manifest do not open them, and
/// the new archive does not contain them.
const LEGACY_OF_LAYER: [&str; 3] = ["VERSION", "json", "layer.tar"];
const LEGACY: &str = "repositories";

/// The one image of an archive.
pub(super) struct Image {
    /// The names that the archive gives it.
    pub names: Vec<String>,
    /// File name of its configuration.
    pub configuration: String,
    /// Its layers, the lowest first.
    pub layers: Vec<Layer>,
}

/// A layer in the archive.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    /// File name in the archive.
    pub name: String,
    range: Range<u64>,
    is_gzip: bool,
}

impl Layer {
    fn find(archive: &mut (impl Read + Seek), table: &Table, name: &str) -> Result<Self, ArchiveError> {
        let range = match table.get(name) {
            Some(Entry::Link(target)) => file(table, target)?,
            _ => file(table, name)?,
        };
        let mut magic = Vec::new();
        open(archive, range)?.take(2).read_to_end(&mut magic)?;
        Ok(Self { name: name.to_owned(), range: range.clone(), is_gzip: magic == GZIP })
    }

    /// Returns the decompressed content.
    ///
    /// # Errors
    /// Fails if lseek(2) does.
    pub(super) fn open<'a>(&self, archive: &'a mut (impl Read + Seek)) -> io::Result<Box<dyn Read + 'a>> {
        let content = open(archive, &self.range)?;
        Ok(if self.is_gzip { Box::new(MultiGzDecoder::new(content)) } else { Box::new(content) })
    }
}

/// One image of `manifest.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Described {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// An index or a manifest of OCI (Image Specification 1.0).
#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    manifests: Vec<Descriptor>,
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Descriptor {
    digest: String,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

impl Descriptor {
    /// Returns the name of the file whose content has this digest.
    fn file(&self) -> Result<String, ArchiveError> {
        let hex = self.digest.strip_prefix("sha256:").filter(|hex| is_digest(hex));
        let hex = hex.ok_or_else(|| malformed(format!("'{}' is not a digest of SHA-256", self.digest)))?;
        Ok(format!("blobs/sha256/{hex}"))
    }

    /// Whether this is provenance data, which has the form of a manifest but describes no image.
    fn is_attestation(&self) -> bool {
        self.annotations.get("vnd.docker.reference.type").is_some_and(|kind| kind == "attestation-manifest")
    }
}

fn is_digest(hex: &str) -> bool {
    hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns the one image of the archive. The archive contains nothing else, except blobs that have the digest in
/// their name.
///
/// # Errors
/// Fails unless there is exactly one image, if two tables of contents differ, or if the archive has an entry
/// that none mentions.
pub(super) fn read(archive: &mut (impl Read + Seek), table: &Table) -> Result<Image, ArchiveError> {
    let described = table.contains_key("manifest.json").then(|| described(archive, table)).transpose()?;
    let indexed = table.contains_key("index.json").then(|| indexed(archive, table)).transpose()?;
    let (configuration, layers) = match (&described, indexed) {
        (Some(described), None) => (described.config.clone(), described.layers.clone()),
        (None, Some(indexed)) => indexed,
        (Some(described), Some(indexed)) => {
            if (&described.config, &described.layers) != (&indexed.0, &indexed.1) {
                return Err(malformed("'manifest.json' and 'index.json' in it describe two images"));
            }
            indexed
        }
        (None, None) => return Err(malformed("it lacks the file 'manifest.json'")),
    };
    let mut image = Image {
        names: described.and_then(|described| described.repo_tags).unwrap_or_default(),
        configuration,
        layers: Vec::new(),
    };
    for name in &layers {
        image.layers.push(Layer::find(archive, table, name)?);
    }
    nothing_else(archive, table, &image, &layers.into_iter().collect())?;
    Ok(image)
}

fn described(archive: &mut (impl Read + Seek), table: &Table) -> Result<Described, ArchiveError> {
    let manifest = text(archive, table, "manifest.json")?;
    let mut images: Vec<Described> =
        serde_json::from_slice(&manifest).map_err(|error| malformed(format!("manifest.json: {error}")))?;
    match (images.pop(), images.len()) {
        (Some(image), 0) => Ok(image),
        (_, others) => Err(malformed(format!("it has {} images instead of one", others + 1))),
    }
}

/// Returns the configuration and the layers of the one image that the index leads to.
fn indexed(archive: &mut (impl Read + Seek), table: &Table) -> Result<(String, Vec<String>), ArchiveError> {
    let mut name = "index.json".to_owned();
    for _ in 0..DEPTH_MAX {
        let content = text(archive, table, &name)?;
        if let Some(hex) = name.strip_prefix("blobs/sha256/") {
            expect(&name, digest(&mut &content[..])?.0, &format!("sha256:{hex}"))?;
        }
        let document: Document =
            serde_json::from_slice(&content).map_err(|error| malformed(format!("{name}: {error}")))?;
        if let Some(configuration) = document.config {
            let layers = document.layers.iter().map(Descriptor::file).collect::<Result<_, _>>()?;
            return Ok((configuration.file()?, layers));
        }
        let images: Vec<_> =
            document.manifests.iter().filter(|descriptor| !descriptor.is_attestation()).collect();
        let [image] = images[..] else {
            return Err(malformed(format!("it has {} images instead of one", images.len())));
        };
        name = image.file()?;
    }
    Err(malformed("indexes in it lead to one another"))
}

/// Rejects links to anything but a layer, and files that no table of contents mentions. A blob with the digest
/// of its name may stay: no reader can confuse it with another.
fn nothing_else(
    archive: &mut (impl Read + Seek),
    table: &Table,
    image: &Image,
    layers: &BTreeSet<String>,
) -> Result<(), ArchiveError> {
    let known = |name: &str| {
        layers.contains(name)
            || name == image.configuration
            || matches!(name, "manifest.json" | "index.json" | "oci-layout" | LEGACY)
    };
    for (name, entry) in table {
        match entry {
            Entry::Folder => {}
            Entry::Link(target) => {
                let is_of_layer = layers.contains(name) || is_legacy(name);
                if !is_of_layer || !layers.contains(target) {
                    return Err(malformed(format!(
                        "it has a link '{name}' to '{target}', which is not a layer"
                    )));
                }
            }
            Entry::File(_) if known(name) || is_legacy(name) => {}
            Entry::File(range) => {
                let hex = name.strip_prefix("blobs/sha256/").filter(|hex| is_digest(hex));
                let Some(hex) = hex else {
                    return Err(malformed(format!(
                        "it has a file '{name}' that its manifest does not mention"
                    )));
                };
                let found = digest(&mut open(archive, range)?)?.0;
                expect(&format!("the blob '{name}'"), found, &format!("sha256:{hex}"))?;
            }
        }
    }
    Ok(())
}

fn is_legacy(name: &str) -> bool {
    let parts = name.split_once('/');
    parts.is_some_and(|(folder, file)| is_digest(folder) && LEGACY_OF_LAYER.contains(&file))
}
