//! Images as archives: whether one is the image that it is said to be, and a new archive of just that, which a container
//! engine is given.
//!
//! Container engines read archives in more than one way: which of two files of one name counts, whether a link is followed,
//! whether `manifest.json` or `index.json` is the table of contents. An engine that reads an archive differently than this
//! check would load another image than was checked. So what could be read in two ways is refused, and an engine never sees the
//! archive that came: it gets a new one that [`Checked::write`] makes of the checked parts.
//!
//! Three forms are read: that of `podman save --format docker-archive` and of `docker save` up to version 24; that of `docker
//! save` since version 25, with an OCI layout beside the manifest; and the OCI layout alone, of `podman save --format
//! oci-archive` (OCI Image Layout Specification 1.0).

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
/// Most layers of an image; engines have a bound of about this.
const LAYERS_MAX: usize = 256;
/// Longest layer after decompression, bytes: what a compressed one may cost a reader has a bound.
const LAYER_MAX: u64 = 64 << 30;
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

#[derive(Deserialize)]
struct Configured {
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

/// An image whose parts were all found to be what its digest says.
#[derive(Debug)]
pub struct Checked {
    /// What it names the image, if it names it.
    name: Option<String>,
    configuration: Vec<u8>,
    layers: Vec<CheckedLayer>,
}

/// A layer in the archive that came, whose uncompressed content has its digest.
#[derive(Debug)]
struct CheckedLayer {
    layer: Layer,
    /// Digest of the uncompressed content.
    diff_id: String,
    /// Length of the uncompressed content, bytes.
    len: u64,
}

/// Checks that the archive holds the image whose configuration has the digest `id` (`sha256:` and 64 digits), names it `name`
/// or not at all, holds all its layers unharmed, and holds nothing else that an engine could take for an image.
///
/// # Errors
/// What is wrong with it.
pub fn check(mut archive: impl Read + Seek, name: &str, id: &str) -> Result<Checked, ArchiveError> {
    let table = tar::table(&mut archive)?;
    let image = layout::read(&mut archive, &table)?;
    if let Some(other) = image.names.iter().find(|tag| *tag != name) {
        return Err(ArchiveError::Name(other.clone(), name.to_owned()));
    }
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

/// A file's content.
fn open<'a, R: Read + Seek>(archive: &'a mut R, range: &Range<u64>) -> io::Result<io::Take<&'a mut R>> {
    archive.seek(SeekFrom::Start(range.start))?;
    Ok(archive.take(range.end - range.start))
}

/// The place of a file that has to be there.
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

/// The digest as images name it, and the number of bytes.
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
