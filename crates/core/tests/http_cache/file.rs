//! What a crash, a bad disk or another program may leave of a file: it reads as it was written, or not at all.

use crate::{T, fields, response, stored_for};
use sidetrack_core::http::cache::file::{BLOCK, Plan, block_sum, read_head, variant_of, write_head};
use sidetrack_core::http::cache::{Rules, Stored};

const KEY: &[u8] = b"http://web.example:80/page?q";

fn vary() -> Stored {
    let text = "Cache-Control: max-age=60|Vary: Accept, X-None|ETag: \"a\"|Date: {-5}|Age: 3|X:";
    stored_for("Accept: text/html", 200, text).expect("storable")
}

#[test]
fn the_checksum_is_xxh64() {
    for (text, sum) in [
        ("", 0xEF46_DB37_51D8_E999_u64),
        ("a", 0xD24E_C4F1_A98C_6E5B),
        ("abc", 0x44BC_2CF5_AD77_0999),
        ("Nobody inspects the spammish repetition", 0xFBCE_A83C_8A37_8BF1),
    ] {
        assert_eq!(block_sum(text.as_bytes()), sum, "{text:?}");
    }
}

/// A file as it is written, without its content.
fn written(plan: &Plan, heads: &[&[u8]]) -> Vec<u8> {
    let mut file = vec![0; usize::try_from(plan.content_offset()).expect("small")];
    put(&mut file, 0, &plan.to_bytes());
    for (sequence, head) in (0..).zip(heads) {
        put(&mut file, plan.slot_offset(sequence), &plan.slot(sequence, head).expect("room"));
    }
    file
}

fn put(file: &mut [u8], at: u64, bytes: &[u8]) {
    let at = usize::try_from(at).expect("small");
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

fn read(file: &[u8]) -> Option<(u64, Vec<u8>)> {
    let plan = Plan::parse(file)?;
    plan.head(file).map(|(sequence, head)| (sequence, head.to_vec()))
}

#[test]
fn the_form_is_this() {
    let stored = stored_for("", 200, "Cache-Control: max-age=9|Date: {+0}").unwrap();
    let head = write_head(b"http://a:80/", &stored);
    let plan = Plan::new(&head, 5).unwrap();
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(hex(&plan.to_bytes()), "534454524b4f424a010000000008000005000000000000004fff333dc88dc3b3");
    assert_eq!((plan.content_offset(), plan.sums_offset(), plan.file_bytes()), (8192, 8197, 8213));
    assert_eq!(
        hex(&head),
        "c80000\
         00d2496b00000000\
         00d2496b00000000\
         00\
         0c000000687474703a2f2f613a38302f\
         020000004f4b\
         00000000\
         02000000\
         0d00000043616368652d436f6e74726f6c\
         090000006d61782d6167653d39\
         04000000446174651d000000\
         4672692c203135204a616e20323032372030383a30303a303020474d54"
    );
}

#[test]
fn every_response_is_read_back_as_it_was() {
    let part = "Content-Range: bytes 2-5/10|ETag: \"a\"";
    let open_part = "Content-Range: bytes 2-5/*|ETag: \"a\"";
    let mut invalid = vary();
    invalid.is_invalid = true;
    let personal = stored_for("Cookie: a=b", 200, "Last-Modified: {-1000}|Vary: Cookie").unwrap();
    assert!(personal.is_personal && !vary().is_personal);
    let responses = [
        vary(),
        invalid,
        stored_for("Range: bytes=2-5", 206, part).unwrap(),
        stored_for("Range: bytes=2-5", 206, open_part).unwrap(),
        stored_for("", 404, "Cache-Control: max-age=1, private=\"Y\"|Y: z|X-Odd: \u{e9}").unwrap(),
        Stored::new(
            &fields(""),
            &response(200, "Age: 7"),
            sidetrack_core::http::cache::Extent::Whole,
            (T, T + 3),
            &Rules::default(),
        ),
    ];
    for stored in responses.iter().chain([&personal]) {
        let head = write_head(KEY, stored);
        let (key, back) = read_head(&head, &Rules::default()).unwrap();
        assert_eq!((key.as_slice(), &back), (KEY, stored));
        assert_eq!(back.age_s(T + 100), stored.age_s(T + 100));
        for end in 0..head.len() {
            assert_eq!(read_head(&head[..end], &Rules::default()), None, "cut at {end}");
        }
        assert_eq!(read_head(&[&head[..], b"x"].concat(), &Rules::default()), None);
    }
    let variants: std::collections::BTreeSet<_> = responses[1..5].iter().map(variant_of).collect();
    assert_eq!(variants.len(), 4, "whole by Accept, two parts, whole");
    assert_eq!(variant_of(&responses[0]), variant_of(&responses[1]));
}

#[test]
fn no_damage_to_plan_or_head_goes_unseen() {
    let head = write_head(KEY, &vary());
    let plan = Plan::new(&head, 100_000).unwrap();
    let file = written(&plan, &[&head]);
    assert_eq!(Plan::parse(&file), Some(plan));
    assert_eq!(read(&file), Some((0, head.clone())));
    for end in 0..file.len() {
        let found = read(&file[..end]);
        assert!(found.is_none() || found == Some((0, head.clone())), "cut at {end}");
    }
    let told = usize::try_from(plan.slot_offset(0)).unwrap() + head.len() + 20;
    for bit in 0..told * 8 {
        let mut damaged = file.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(read(&damaged), None, "bit {bit}");
    }
}

#[test]
fn a_torn_update_leaves_one_of_the_two_heads() {
    let (old, mut newer) = (vary(), vary());
    newer.fields.push("X-New", "yes");
    let (old, new) = (write_head(KEY, &old), write_head(KEY, &newer));
    let plan = Plan::new(&old, 5).unwrap();
    for before in [vec![&old[..]], vec![&new, &old], vec![&old, &new, &old]] {
        let mut file = written(&plan, &before);
        let sequence = before.len() as u64;
        let last = Some((sequence - 1, old.clone()));
        assert_eq!(read(&file), last);
        let slot = plan.slot(sequence, &new).unwrap();
        let clean = file.clone();
        for end in 0..slot.len() {
            file.copy_from_slice(&clean);
            put(&mut file, plan.slot_offset(sequence), &slot[..end]);
            assert_eq!(read(&file), last, "torn at {end}");
        }
        put(&mut file, plan.slot_offset(sequence), &slot);
        assert_eq!(read(&file), Some((sequence, new.clone())));
    }
}

#[test]
fn checksums_belong_to_the_plan() {
    let plan = Plan::new(b"head", BLOCK as u64 * 2 + 1).unwrap();
    assert_eq!(
        (plan.blocks(), plan.block_bytes(1), plan.block_bytes(2), plan.block_bytes(3)),
        (3, BLOCK, 1, 0)
    );
    let sums = vec![block_sum(b"a"), block_sum(b"b"), block_sum(b"c")];
    let bytes = Plan::sums_to_bytes(&sums);
    assert_eq!(bytes.len() as u64, plan.sums_bytes());
    assert_eq!(plan.parse_sums(&bytes), Some(sums));
    assert_eq!(Plan::new(b"head", 1).unwrap().parse_sums(&bytes), None, "another number of blocks");
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(plan.parse_sums(&damaged), None, "bit {bit}");
    }
    for end in 0..bytes.len() {
        assert_eq!(plan.parse_sums(&bytes[..end]), None);
    }
    let empty = Plan::new(b"head", 0).unwrap();
    assert_eq!(empty.parse_sums(&Plan::sums_to_bytes(&[])), Some(Vec::new()));
    assert_eq!(Plan::new(&vec![0; 300_000], 0), None, "a head too long to be kept");
    assert_eq!(plan.slot(0, &[0; 4096]), None, "no room for it");
}
