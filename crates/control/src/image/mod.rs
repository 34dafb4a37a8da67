//! Images as archives: checks that an archive contains exactly the expected image, and writes a new archive of
//! it for the container engine.
//!
//! Container engines read archives in different ways. Which of two files with one name counts? Is a link
//! followed? Is `manifest.json` or `index.json` the table of contents? An engine that reads an archive
//! differently from this check would load an unchecked image. So this check rejects archives that can be read in
//! two ways. The engine never gets the received archive either: it gets a new one that [`Checked::write`] makes
//! of the checked parts.
//!
//! Three forms are accepted: that of `podman save --format docker-archive` and of `docker save` up to version
//! 24; that of `docker save` since version 25, with an OCI layout beside the manifest; and the OCI layout alone,
//! of `podman save --format oci-archive` (OCI Image Layout Specification 1.0).

mod layout;
pub mod stream;
mod tar;
mod write;

use layout::Layer;
use ring::digest::{Context, SHA256};
use serde::Deserialize;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use tar::{Entry, Table};

/// Longest manifest or configuration that is read, bytes.
const TEXT_MAX: u64 = 1 << 20;
/// Most layers of an image. Engines have a similar limit.
const LAYERS_MAX: usize = 256;
/// Longest layer after decompression, bytes. It limits the work that a compressed layer can cause.
const LAYER_MAX: u64 = 64 << 30;
/// Bytes read at a time.
const PIECE: usize = 64 << 10;

/// Why an archive is rejected.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// It is not an archive of an image, or it can be read in two ways.
    #[error("this is not an archive of an image: {0}")]
    Malformed(String),
    /// It is truncated.
    #[error("the archive of the image is truncated")]
    Truncated,
    /// It is a different image, or a part does not have the right digest.
    #[error("{what} has the digest {found}, and not {expected}")]
    Digest {
        /// The part.
        what: String,
        /// Its digest.
        found: String,
        /// The expected digest.
        expected: String,
    },
    /// It has a name for the image that was not asked for.
    #[error("the archive names '{0}': it may name '{1}' and nothing else")]
    Name(String, String),
    /// It cannot be read.
    #[error("the archive cannot be read: {0}")]
    Io(#[from] io::Error),
}

fn malformed(why: impl Into<String>) -> ArchiveError {
    ArchiveError::Malformed(why.into())
}

#[derive(Deserialize)]
struct Configured {
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

/// An image whose parts all have the right digests.
#[derive(Debug)]
pub struct Checked {
    /// The name in the archive, if it has one.
    name: Option<String>,
    configuration: Vec<u8>,
    layers: Vec<CheckedLayer>,
}

/// A layer in the received archive, whose uncompressed content has the right digest.
#[derive(Debug)]
struct CheckedLayer {
    layer: Layer,
    /// Digest of the uncompressed content.
    diff_id: String,
    /// Length of the uncompressed content, bytes.
    len: u64,
}

/// Checks that the archive contains the image whose configuration has the digest `id` (`sha256:` and 64 digits).
/// The archive names the image `name` or does not name it. All its layers must be valid, and nothing else may
/// look like an image.
///
/// # Errors
/// Says what is wrong with it.
pub fn check(mut archive: impl Read + Seek, name: &str, id: &str) -> Result<Checked, ArchiveError> {
    let table = tar::table(&mut archive)?;
    let image = layout::read(&mut archive, &table)?;
    if let Some(other) = image.names.iter().find(|tag| *tag != name) {
        return Err(ArchiveError::Name(other.clone(), name.to_owned()));
    }
    // The digest of the configuration is the expected one, and the configuration has the digests of the layers.
    // So the whole image is checked.
    let configuration = text(&mut archive, &table, &image.configuration)?;
    expect("the configuration of the image", digest(&mut &configuration[..])?.0, id)?;
    let configured: Configured = serde_json::from_slice(&configuration)
        .map_err(|error| malformed(format!("{}: {error}", image.configuration)))?;
    let diff_ids = configured.rootfs.diff_ids;
    if diff_ids.len() != image.layers.len() || diff_ids.len() > LAYERS_MAX {
        return Err(malformed(format!("{} layers for {} digests", image.layers.len(), diff_ids.len())));
    }
    let mut layers = Vec::new();
    for (layer, diff_id) in image.layers.into_iter().zip(diff_ids) {
        let (found, len) = digest(&mut layer.open(&mut archive)?.take(LAYER_MAX + 1))?;
        if len > LAYER_MAX {
            return Err(malformed(format!("the layer '{}' has more than {LAYER_MAX} bytes", layer.name)));
        }
        expect(&format!("the layer '{}'", layer.name), found, &diff_id)?;
        layers.push(CheckedLayer { layer, diff_id, len });
    }
    Ok(Checked { name: image.names.into_iter().next(), configuration, layers })
}

/// Returns a file's content.
fn open<'a, R: Read + Seek>(archive: &'a mut R, range: &Range<u64>) -> io::Result<io::Take<&'a mut R>> {
    archive.seek(SeekFrom::Start(range.start))?;
    Ok(archive.take(range.end - range.start))
}

/// Returns the place of a file that must exist.
fn file<'t>(table: &'t Table, name: &str) -> Result<&'t Range<u64>, ArchiveError> {
    match table.get(name) {
        Some(Entry::File(range)) => Ok(range),
        Some(_) => Err(malformed(format!("'{name}' in it is not a regular file"))),
        None => Err(malformed(format!("it lacks the file '{name}'"))),
    }
}

fn text<R: Read + Seek>(archive: &mut R, table: &Table, name: &str) -> Result<Vec<u8>, ArchiveError> {
    let mut content = open(archive, file(table, name)?)?;
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

/// Returns the digest in the form that images use, and the number of bytes.
fn digest(content: &mut impl Read) -> io::Result<(String, u64)> {
    let mut context = Context::new(&SHA256);
    let (mut piece, mut len) = (vec![0; PIECE], 0);
    loop {
        match content.read(&mut piece)? {
            0 => break,
            read => {
                context.update(&piece[..read]);
                len += read as u64;
            }
        }
    }
    Ok((format!("sha256:{}", data_encoding::HEXLOWER.encode(context.finish().as_ref())), len))
}

#[cfg(test)]
pub mod tests;
