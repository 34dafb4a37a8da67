//! Archives made here, whole and harmed.

use super::{ArchiveError, check, digest};
use std::io::Cursor;

const NAME: &str = "localhost/audit:1";
const LAYER: &[u8] = b"a layer";

fn digest_of(mut content: &[u8]) -> String {
    digest(&mut content).expect("read")
}

fn entry(kind: u8, name: &str, content: &[u8]) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
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

/// What is said of an archive.
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
    assert!(said(&archive(&two)).contains("2 images"));
}

#[test]
fn a_layer_that_was_changed_is_seen() {
    let mut changed = parts();
    changed[0] = entry(b'0', "layer.tar", b"b layer");
    assert!(said(&archive(&changed)).starts_with("the layer 'layer.tar' has the digest sha256:"));
    let mut lacking = parts();
    lacking.remove(0);
    assert!(said(&archive(&lacking)).contains("it lacks the file 'layer.tar'"));
    lacking.insert(0, entry(b'2', "layer.tar", b""));
    assert!(said(&archive(&lacking)).contains("it lacks the file 'layer.tar'"), "links lead nowhere");
}

#[test]
fn what_could_be_read_in_two_ways_is_refused() {
    for (with, words) in [
        (entry(b'0', "manifest.json", b"[]"), "two files 'manifest.json'"),
        (entry(b'0', "./manifest.json", b"[]"), "two files 'manifest.json'"),
        (entry(b'0', "index.json", b"{}"), "'index.json'"),
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
        // Only what fills blocks up may change.
        let _ = check(Cursor::new(&harmed), NAME, &id());
    }
    let noise = [7; 2048];
    assert!(said(&noise).contains("not in the format of tar"));
}
