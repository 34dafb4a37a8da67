use super::*;

const BOUNDS: Bounds = Bounds { bytes_max: 1 << 30, keep: Duration::from_secs(86_400), lines_max: 10 };

fn now_ms() -> i64 {
    super::super::millis(SystemTime::now())
}

fn names(folder: &Folder) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder.path())
        .expect("folder")
        .map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn add(folder: &Folder, content: Content, text: &str) {
    folder.journal(content).expect("journal").0.write_all(text.as_bytes()).expect("write");
}

#[test]
fn names_read_as_they_were_written() {
    for (text, number, content, span) in [
        ("00000007.ndjson", 7, Content::Flows, None),
        ("00000007-1-22.parquet", 7, Content::Flows, Some((1, 22))),
        ("123456789.counters.ndjson", 123_456_789, Content::Counters, None),
        ("00000008-0-5.counters.parquet", 8, Content::Counters, Some((0, 5))),
    ] {
        let name = Name { number, content, span };
        assert_eq!(Name::parse(text), Some(name), "{text}");
        assert_eq!(name.text(), text);
    }
    for text in [
        "flows.ndjson",
        "7.ndjson",
        "0000000a.ndjson",
        "00000007.parquet",
        "00000007-1.parquet",
        "00000007-1-2-3.parquet",
        "00000007--1-2.parquet",
        "00000007-1-2.ndjson2",
        "../00000007.ndjson",
        "",
    ] {
        assert_eq!(Name::parse(text), None, "{text}");
    }
    assert!(is_file_of_history("00000007-1-22.parquet.tmp") && is_file_of_history("lock"));
    assert!(!is_file_of_history("passwd") && !is_file_of_history("x.ndjson"));
}

#[test]
fn two_processes_never_write_one_history() {
    let place = tempfile::tempdir().expect("folder");
    let first = Folder::open(place.path(), BOUNDS).expect("first");
    let error = Folder::open(place.path(), BOUNDS).err().expect("refused").to_string();
    assert!(error.contains("another sidetrack"), "{error}");
    drop(first);
    Folder::open(place.path(), BOUNDS).expect("free again");
}

#[test]
fn a_later_format_is_refused_and_left_alone() {
    let place = tempfile::tempdir().expect("folder");
    drop(Folder::open(place.path(), BOUNDS).expect("new"));
    fs::write(place.path().join("format"), "2\n").expect("write");
    fs::write(place.path().join("00000001.ndjson.tmp"), "x").expect("write");
    let error = Folder::open(place.path(), BOUNDS).err().expect("refused").to_string();
    assert!(error.contains("format 2") && error.contains("name another path"), "{error}");
    assert!(place.path().join("00000001.ndjson.tmp").exists());
    fs::write(place.path().join("format"), "soon").expect("write");
    let error = Folder::open(place.path(), BOUNDS).err().expect("refused").to_string();
    assert!(error.contains("no format of a history"), "{error}");
}

/// Each step of making columns may be the last one of a process.
#[test]
fn what_a_process_that_died_has_left_is_mended() {
    let place = tempfile::tempdir().expect("folder");
    let write = |name: &str, text: &str| fs::write(place.path().join(name), text).expect("write");
    drop(Folder::open(place.path(), BOUNDS).expect("new"));
    // It died while it wrote columns; after it renamed them; in the middle of a line.
    write("00000001.ndjson", "{}\n");
    write("00000001-1-2.parquet.tmp", "half");
    write("00000002.ndjson", "{}\n");
    write("00000002-1-2.parquet", "whole");
    write("flows.ndjson", "{\"a\":1}\n{\"torn");
    write("passwd", "of somebody else");
    write("x.tmp", "of somebody else");
    let folder = Folder::open(place.path(), BOUNDS).expect("opens");
    let (_, bytes) = folder.journal(Content::Flows).expect("journal");
    assert_eq!(bytes, 15, "the torn line is ended");
    let left =
        ["00000001.ndjson", "00000002-1-2.parquet", "flows.ndjson", "format", "lock", "passwd", "x.tmp"];
    assert_eq!(names(&folder), left);
    assert_eq!(folder.to_compact().map(|name| name.number), Some(1));
    assert_eq!(fs::read(folder.path().join("flows.ndjson")).expect("read"), b"{\"a\":1}\n{\"torn\n");
    drop(folder.turn(Content::Flows).expect("turn"));
    assert!(place.path().join("00000003.ndjson").exists(), "numbers go on");
}

#[test]
fn columns_take_the_place_of_lines_only_when_they_are_whole() {
    let place = tempfile::tempdir().expect("folder");
    let folder = Folder::open(place.path(), BOUNDS).expect("new");
    add(&folder, Content::Flows, "one\n");
    drop(folder.turn(Content::Flows).expect("turn"));
    let lines = folder.to_compact().expect("lines");
    let failed = folder.replace(lines, Some((1, 2)), |file| {
        file.write_all(b"half")?;
        Err(io::Error::from(io::ErrorKind::StorageFull))
    });
    assert_eq!(failed.expect_err("fails").kind(), io::ErrorKind::StorageFull);
    assert_eq!(names(&folder), ["00000001.ndjson", "flows.ndjson", "format", "lock"]);
    // A search that has listed the lines finds them as columns.
    let (listed, _) = folder.list(Content::Flows);
    folder.replace(lines, Some((1, 2)), |file| file.write_all(b"columns")).expect("replaced");
    let mut text = String::new();
    folder.read(listed[0]).expect("found").read_to_string(&mut text).expect("read");
    assert_eq!(text, "columns");
    assert_eq!(names(&folder), ["00000001-1-2.parquet", "flows.ndjson", "format", "lock"]);
    assert_eq!(folder.to_compact(), None);
    // Lines without any flow leave no file.
    add(&folder, Content::Flows, "torn\n");
    drop(folder.turn(Content::Flows).expect("turn"));
    let lines = folder.to_compact().expect("lines");
    folder.replace(lines, None, |_| Ok(())).expect("removed");
    assert_eq!(names(&folder), ["00000001-1-2.parquet", "flows.ndjson", "format", "lock"]);
}

#[test]
fn the_oldest_files_make_room() {
    let place = tempfile::tempdir().expect("folder");
    let folder = Folder::open(place.path(), Bounds { bytes_max: 1000, ..BOUNDS }).expect("new");
    let line = "x".repeat(299) + "\n";
    for _ in 0..3 {
        add(&folder, Content::Flows, &line);
        drop(folder.turn(Content::Flows).expect("turn"));
    }
    folder.make_room();
    assert_eq!(folder.list(Content::Flows).0.len(), 3, "900 bytes fit");
    // Counters take a quarter; then all files together count.
    add(&folder, Content::Counters, &line);
    drop(folder.turn(Content::Counters).expect("turn"));
    folder.make_room();
    assert_eq!(folder.list(Content::Counters).0.len(), 0);
    assert_eq!(folder.list(Content::Flows).0.len(), 3);
    add(&folder, Content::Flows, &line);
    folder.make_room();
    let left: Vec<_> = folder.list(Content::Flows).0.iter().map(|name| name.number).collect();
    assert_eq!(left, [2, 3], "the first is gone");
    assert_eq!(folder.bytes(), 900);
}

#[test]
fn a_clock_that_jumps_does_not_empty_the_folder() {
    let place = tempfile::tempdir().expect("folder");
    let folder = Folder::open(place.path(), BOUNDS).expect("new");
    let old = now_ms() - 2 * 86_400_000;
    for number in 0..10 {
        add(&folder, Content::Flows, "x\n");
        drop(folder.turn(Content::Flows).expect("turn"));
        let lines = folder.to_compact().expect("lines");
        let to = if number == 9 { now_ms() } else { old };
        folder.replace(lines, Some((0, to)), |file| file.write_all(b"x")).expect("replaced");
    }
    folder.make_room();
    folder.make_room();
    let left: Vec<_> = folder.list(Content::Flows).0.iter().map(|name| name.number).collect();
    assert_eq!(left, [5, 6, 7, 8, 9, 10], "some at a time, the oldest first");
}

#[test]
fn columns_of_lines_that_had_to_go_are_not_kept() {
    let place = tempfile::tempdir().expect("folder");
    let folder = Folder::open(place.path(), Bounds { bytes_max: 1, ..BOUNDS }).expect("new");
    add(&folder, Content::Flows, "one\n");
    drop(folder.turn(Content::Flows).expect("turn"));
    let lines = folder.to_compact().expect("lines");
    folder
        .replace(lines, Some((1, 2)), |file| {
            folder.make_room();
            file.write_all(b"columns")
        })
        .expect("nothing to do");
    assert_eq!(names(&folder), ["flows.ndjson", "format", "lock"]);
}

#[test]
fn a_turn_that_found_no_room_for_a_new_file_is_made_up_for() {
    let place = tempfile::tempdir().expect("folder");
    let folder = Folder::open(place.path(), BOUNDS).expect("folder");
    add(&folder, Content::Flows, "{}\n");
    // As if the disk had been full: the file has its name, and there is no new one.
    fs::rename(place.path().join("flows.ndjson"), place.path().join("00000001.ndjson")).expect("rename");
    folder.turn(Content::Flows).expect("a new file").write_all(b"{}\n").expect("written");
    assert_eq!(fs::read(place.path().join("flows.ndjson")).expect("there"), b"{}\n");
}
