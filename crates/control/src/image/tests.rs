//! Archives made by these tests, valid and damaged.

use super::{ArchiveError, check, digest};
use flate2::{Compression, write::GzEncoder};
use std::io::{Cursor, Write};

/// The name of the image in these archives.
pub const NAME: &str = "localhost/audit:1";
const LAYER: &[u8] = b"a layer";

fn digest_of(mut content: &[u8]) -> String {
    digest(&mut content).expect("read").0
}

fn entry(kind: u8, name: &str, content: &[u8]) -> Vec<u8> {
    whole_entry(kind, name, "", content)
}

fn link(kind: u8, name: &str, target: &str) -> Vec<u8> {
    whole_entry(kind, name, target, b"")
}

fn whole_entry(kind: u8, name: &str, target: &str, content: &[u8]) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[157..157 + target.len()].copy_from_slice(target.as_bytes());
    header[124..136].copy_from_slice(format!("{:011o}\0", content.len()).as_bytes());
    header[148..156].fill(b' ');
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header.extend_from_slice(content);
    header.resize(header.len().next_multiple_of(512), 0);
    header
}

fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    [entries.concat(), vec![0; 1024]].concat()
}

fn configuration() -> Vec<u8> {
    let diff = digest_of(LAYER);
    format!(r#"{{"os":"linux","rootfs":{{"type":"layers","diff_ids":["{diff}"]}}}}"#).into_bytes()
}

fn id() -> String {
    digest_of(&configuration())
}

fn manifest(tag: &str) -> Vec<u8> {
    format!(r#"[{{"Config":"config.json","RepoTags":["{tag}"],"Layers":["layer.tar"]}}]"#).into_bytes()
}

fn parts() -> Vec<Vec<u8>> {
    vec![
        entry(b'0', "layer.tar", LAYER),
        entry(b'0', "config.json", &configuration()),
        entry(b'0', "manifest.json", &manifest(NAME)),
    ]
}

/// Returns a valid archive and the digest of its image.
pub fn whole() -> (Vec<u8>, String) {
    (archive(&parts()), id())
}

/// Returns the error message for an archive.
fn said(archive: &[u8]) -> String {
    check(Cursor::new(archive), NAME, &id()).expect_err("it is not taken").to_string()
}

#[test]
fn the_image_that_was_asked_for_is_taken() {
    check(Cursor::new(archive(&parts())), NAME, &id()).expect("it is the one");
    // SHA-256 of "abc", FIPS 180-2.
    assert_eq!(digest_of(b"abc"), "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    let mut with_times = parts();
    with_times.insert(0, entry(b'x', "times", b"30 mtime=1700000000.000000001\n"));
    with_times.push(entry(b'5', "folder/", b""));
    check(Cursor::new(archive(&with_times)), NAME, &id()).expect("times do no harm");
}

#[test]
fn other_images_and_other_names_are_refused() {
    let whole = archive(&parts());
    let other = format!("sha256:{}", "0".repeat(64));
    let error = check(Cursor::new(&whole), NAME, &other).expect_err("another image");
    assert!(matches!(error, ArchiveError::Digest { .. }), "{error}");
    let mut named = parts();
    named[2] = entry(b'0', "manifest.json", &manifest("localhost/base:1"));
    let words = "the archive names 'localhost/base:1': it may name 'localhost/audit:1' and nothing else";
    assert_eq!(said(&archive(&named)), words);
    let mut two = parts();
    let both = [&b"["[..], &manifest(NAME)[1..manifest(NAME).len() - 1], b",", &manifest(NAME)[1..]].concat();
    two[2] = entry(b'0', "manifest.json", &both);
    assert!(said(&archive(&two)).contains("2 images instead of one"));
}

#[test]
fn a_layer_that_was_changed_is_seen() {
    let mut changed = parts();
    changed[0] = entry(b'0', "layer.tar", b"b layer");
    assert!(said(&archive(&changed)).starts_with("the layer 'layer.tar' has the digest sha256:"));
    let mut lacking = parts();
    lacking.remove(0);
    assert!(said(&archive(&lacking)).contains("it lacks the file 'layer.tar'"));
    lacking.insert(0, link(b'2', "layer.tar", "gone.tar"));
    assert!(said(&archive(&lacking)).contains("it lacks the file 'gone.tar'"));
}

#[test]
fn what_could_be_read_in_two_ways_is_refused() {
    for (with, words) in [
        (entry(b'0', "manifest.json", b"[]"), "two entries 'manifest.json'"),
        (entry(b'0', "./manifest.json", b"[]"), "two entries 'manifest.json'"),
        (entry(b'0', "index.json", b"{}"), "0 images instead of one"),
        (link(b'2', "manifest.json", "evil.json"), "two entries 'manifest.json'"),
        (link(b'1', "manifest.json", "evil.json"), "two entries 'manifest.json'"),
        (entry(b'5', "manifest.json", b""), "two entries 'manifest.json'"),
        (entry(b'5', "manifest.json/", b""), "two entries 'manifest.json'"),
        (
            link(b'2', "other.json", "manifest.json"),
            "a link 'other.json' to 'manifest.json', which is not a layer",
        ),
        (link(b'2', "other.json", "layer.tar"), "a link 'other.json' to 'layer.tar'"),
        (link(b'2', "a/layer.tar", "../../etc/passwd"), "a link to '../../etc/passwd'"),
        (link(b'2', "a/layer.tar", "/etc/passwd"), "a link to '/etc/passwd'"),
        (entry(b'0', "evil.json", b"{}"), "a file 'evil.json' that its manifest does not mention"),
        (entry(b'0', "blobs/sha256/evil", b"{}"), "that its manifest does not mention"),
        (entry(b'0', &format!("blobs/sha256/{}", "0".repeat(64)), b"{}"), "the blob 'blobs/sha256/000"),
        (entry(b'0', "a/../manifest.json", b"[]"), "a/../manifest.json"),
        (entry(b'L', "././@LongLink", b"manifest.json\0"), "kind 'L'"),
        (entry(b'x', "names", b"22 path=manifest.json\n"), "'path'"),
        (entry(b'x', "names", b"99 path=manifest.json\n"), "extended header"),
        (entry(b'x', "names", b"nonsense"), "extended header"),
    ] {
        let mut entries = parts();
        entries.insert(0, with);
        assert!(said(&archive(&entries)).contains(words), "{words}: {}", said(&archive(&entries)));
    }
    let behind = [parts().concat(), vec![0; 512], parts().concat(), vec![0; 1024]].concat();
    assert!(said(&behind).contains("behind its end"));
}

#[test]
fn wherever_it_is_cut_it_is_not_taken_and_harm_does_no_harm() {
    let whole = archive(&parts());
    for length in 0..whole.len() {
        assert!(check(Cursor::new(&whole[..length]), NAME, &id()).is_err(), "{length}");
    }
    let entries = parts().concat().len();
    assert_eq!(said(&whole[..entries]), "the archive of the image is truncated");
    for at in 0..entries {
        let mut harmed = whole.clone();
        harmed[at] ^= 0xff;
        // Only padding may change without an error.
        let _ = check(Cursor::new(&harmed), NAME, &id());
    }
    let noise = [7; 2048];
    assert!(said(&noise).contains("not in the format of tar"));
}

/// Returns the output of [`super::Checked::write`] for an archive, and checks it again.
fn rewritten(from: &[u8]) -> Vec<u8> {
    let checked = check(Cursor::new(from), NAME, &id()).expect("it is the one");
    let mut fresh = Vec::new();
    checked.write(Cursor::new(from), &mut fresh).expect("memory can be written");
    check(Cursor::new(&fresh), NAME, &id()).expect("what we write is an archive of the same image");
    fresh
}

fn names(archive: &[u8]) -> Vec<String> {
    super::tar::table(&mut Cursor::new(archive)).expect("a table").into_keys().collect()
}

#[test]
fn the_new_archive_has_only_what_was_checked() {
    let digits = |digest: &str| digest.strip_prefix("sha256:").expect("a digest").to_owned();
    let layer = format!("{}.tar", digits(&digest_of(LAYER)));
    let mut expected = vec![layer.clone(), format!("{}.json", digits(&id())), "manifest.json".to_owned()];
    expected.sort();
    // As podman writes it: the layer again as a link, and files of older formats.
    let old = "1".repeat(64);
    let mut podman = parts();
    podman.push(link(b'2', &format!("{old}/layer.tar"), "../layer.tar"));
    podman.push(entry(b'0', &format!("{old}/VERSION"), b"1.0"));
    podman.push(entry(b'0', &format!("{old}/json"), b"{}"));
    podman.push(entry(b'0', "repositories", b"{}"));
    for from in [archive(&parts()), archive(&podman)] {
        assert_eq!(names(&rewritten(&from)), expected);
    }
}

/// Returns the blobs of an image in the OCI layout, and the digest of its manifest.
fn blobs(layer: &[u8]) -> (Vec<Vec<u8>>, String) {
    let manifest = format!(
        r#"{{"schemaVersion":2,"config":{{"digest":"{}"}},"layers":[{{"digest":"{}"}}]}}"#,
        id(),
        digest_of(layer)
    );
    let blob = |content: &[u8]| entry(b'0', &format!("blobs/sha256/{}", &digest_of(content)[7..]), content);
    let entries = vec![
        entry(b'5', "blobs/", b""),
        entry(b'5', "blobs/sha256/", b""),
        blob(layer),
        blob(&configuration()),
        blob(manifest.as_bytes()),
        entry(b'0', "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#),
    ];
    (entries, digest_of(manifest.as_bytes()))
}

fn index(manifests: &[&str]) -> Vec<u8> {
    let each: Vec<_> = manifests.iter().map(|digest| format!(r#"{{"digest":"{digest}"}}"#)).collect();
    entry(b'0', "index.json", format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, each.join(",")).as_bytes())
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(content).expect("memory");
    encoder.finish().expect("memory")
}

#[test]
fn the_layout_of_oci_is_read_compressed_or_not_alone_or_beside_a_manifest() {
    for layer in [LAYER.to_vec(), gzip(LAYER)] {
        let (mut entries, manifest) = blobs(&layer);
        entries.push(index(&[&manifest]));
        rewritten(&archive(&entries));
        // As `docker save` has written since version 25.
        let of_docker = format!(
            r#"[{{"Config":"blobs/sha256/{}","RepoTags":["{NAME}"],"Layers":["blobs/sha256/{}"]}}]"#,
            &id()[7..],
            &digest_of(&layer)[7..]
        );
        entries.push(entry(b'0', "manifest.json", of_docker.as_bytes()));
        let fresh = rewritten(&archive(&entries));
        assert!(!names(&fresh).iter().any(|name| name.contains("blobs")));
        // Two tables of contents that differ.
        entries.pop();
        entries.push(entry(b'0', "manifest.json", of_docker.replace("Layers", "Layer").as_bytes()));
        assert!(said(&archive(&entries)).contains("manifest.json"));
        entries.pop();
        entries.push(entry(b'0', "manifest.json", &manifest_of_nothing()));
        assert!(said(&archive(&entries)).contains("describe two images"));
    }
}

fn manifest_of_nothing() -> Vec<u8> {
    format!(r#"[{{"Config":"blobs/sha256/{}","RepoTags":null,"Layers":[]}}]"#, &id()[7..]).into_bytes()
}

#[test]
fn a_layout_that_is_harmed_or_has_two_images_is_refused() {
    let (entries, manifest) = blobs(LAYER);
    for (index, words) in [
        (index(&[]), "0 images"),
        (index(&[&manifest, &manifest]), "2 images"),
        (index(&["sha256:../../manifest.json"]), "is not a digest of SHA-256"),
        (index(&[&digest_of(b"gone")]), "it lacks the file"),
        (entry(b'0', "index.json", b"nonsense"), "index.json"),
    ] {
        let mut with = entries.clone();
        with.push(index);
        assert!(said(&archive(&with)).contains(words), "{words}: {}", said(&archive(&with)));
    }
    // A blob whose content does not have the digest in its name.
    let mut harmed = entries;
    let at = harmed[4].len() - 512;
    harmed[4][at + 1] ^= 1;
    harmed.push(index(&[&manifest]));
    assert!(said(&archive(&harmed)).contains("has the digest"), "{}", said(&archive(&harmed)));
}

#[test]
fn numbers_have_digits_only() {
    for size in [b"+0000000007\0", b"-0000000007\0", b"0x000000007\0", b"0000000 007\0"] {
        let mut layer = entry(b'0', "layer.tar", LAYER);
        layer[124..136].copy_from_slice(size);
        layer[148..156].fill(b' ');
        let sum: u64 = layer[..512].iter().map(|byte| u64::from(*byte)).sum();
        layer[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let mut entries = parts();
        entries[0] = layer;
        assert!(said(&archive(&entries)).contains("a size in it is not a number"), "{size:?}");
    }
}
