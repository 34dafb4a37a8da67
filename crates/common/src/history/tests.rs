use super::*;

fn caller() -> Caller {
    Caller { uid: Some(7), pid: Some(8), program: Some("sidetrack".into()), peer: None }
}

/// A history with three versions, a refused text and a rollback, as a file.
fn written() -> (tempfile::TempDir, PathBuf, Vec<u8>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("history");
    let history = History::open(&path).expect("a new one");
    for (number, text) in (1..).zip(["one\n", "two \"\u{e4}\"\n", "three\n"]) {
        assert_eq!(history.version(&caller(), Cause::Apply, None, text).expect("recorded"), number);
    }
    assert_eq!(history.version(&caller(), Cause::File, None, "three\n").expect("the same"), 3);
    history.refused(&caller(), "nonsense", "it is wrong").expect("recorded");
    assert_eq!(history.version(&caller(), Cause::Rollback, Some(1), "one\n").expect("recorded"), 4);
    drop(history);
    let text = std::fs::read(&path).expect("the file");
    (folder, path, text)
}

fn line_of(text: &[u8]) -> Option<u64> {
    read(text, |_, _| {}).err().map(|broken| broken.line)
}

#[test]
fn versions_are_found_again_by_the_next_process() {
    let (_folder, path, _) = written();
    let history = History::open(&path).expect("the same");
    assert!(matches!(History::open(&path), Err(HistoryError::InUse(_))));
    assert_eq!(
        (history.text(2).expect("there"), history.text(4).expect("there")),
        ("two \"\u{e4}\"\n".into(), "one\n".into())
    );
    for unknown in [0, 5, u64::MAX] {
        assert!(matches!(history.text(unknown), Err(HistoryError::Unknown(_, 4))), "{unknown}");
    }
    assert_eq!((history.head().number, history.head().version), (5, 4));
    history.failed(&caller(), 4, "the disk is full").expect("recorded");
    // It is not in force, so the same text is a version again.
    assert_eq!(history.version(&caller(), Cause::Apply, None, "one\n").expect("recorded"), 5);
}

#[test]
fn each_changed_byte_breaks_its_line_or_the_next() {
    let (_folder, _, text) = written();
    assert_eq!(line_of(&text), None);
    let mut line = 1;
    for at in 0..text.len() {
        let mut changed = text.clone();
        changed[at] ^= 1;
        let found = line_of(&changed).unwrap_or_else(|| panic!("byte {at} of line {line} was changed"));
        assert!(found == line || found == line + 1, "byte {at}: {found}, not {line}");
        if text[at] == b'\n' {
            line += 1;
        }
    }
}

#[test]
fn a_cut_file_and_missing_or_exchanged_lines_are_named() {
    let (_folder, _, text) = written();
    let lines: Vec<_> = text.split_inclusive(|byte| *byte == b'\n').collect();
    for at in 1..text.len() {
        let whole = text[..at].iter().filter(|byte| **byte == b'\n').count() as u64;
        let expected = (text[at - 1] != b'\n').then_some(whole + 1);
        assert_eq!(line_of(&text[..at]), expected, "cut at {at}");
    }
    for missing in 0..lines.len() - 1 {
        let rest: Vec<_> = lines
            .iter()
            .enumerate()
            .filter(|(at, _)| *at != missing)
            .flat_map(|(_, line)| line.iter().copied())
            .collect();
        assert_eq!(line_of(&rest), Some(missing as u64 + 1));
    }
    let exchanged = [lines[0], lines[2], lines[1]].concat();
    assert_eq!(line_of(&exchanged), Some(2));
    let twice = [lines[0], lines[0]].concat();
    assert_eq!(line_of(&twice), Some(2));
}

#[test]
fn a_clock_that_goes_back_is_noted_and_never_makes_an_entry_older() {
    let entry = |at_ms| Entry {
        number: 0,
        at_ms,
        clock_back_ms: 0,
        by: Caller::default(),
        act: Act::Refused { error: String::new(), text_sha256: String::new() },
    };
    let (first, head) = Head::default().append(&mut entry(5_000)).expect("a line");
    let mut late = entry(2_000);
    let (second, _) = head.append(&mut late).expect("a line");
    assert_eq!((late.at_ms, late.clock_back_ms), (5_000, 3_000));
    assert_eq!(line_of((first.clone() + &second).as_bytes()), None);
    // A forged line has the right hash, and a time before that of the entry before it.
    let json = serde_json::to_string(&Entry { number: 2, ..entry(4_999) }).expect("JSON");
    let hash = hex(&digest(&[&head.hash, json.as_bytes()]));
    let broken = read(format!("{first}{hash} {json}\n").as_bytes(), |_, _| {}).expect_err("older");
    assert_eq!(broken, Broken { line: 2, why: Why::Clock(1) });
}

#[test]
fn versions_that_do_not_follow_are_named_though_the_hash_is_right() {
    let version =
        |version, same_as| Act::Version { version, cause: Cause::Rollback, same_as, text: "x".into() };
    let acts = [
        version(2, None),
        version(1, Some(1)),
        version(0, None),
        Act::Failed { version: 1, error: String::new() },
    ];
    for act in acts {
        let mut entry = Entry { number: 0, at_ms: 1, clock_back_ms: 0, by: Caller::default(), act };
        assert!(matches!(Head::default().append(&mut entry), Err(Why::Version(_))), "{entry:?}");
    }
}

#[test]
fn a_line_that_was_being_written_is_cut_off_and_that_is_said() {
    let (_folder, path, text) = written();
    std::fs::write(&path, &text[..text.len() - 10]).expect("cut");
    let history = History::open(&path).expect("mended");
    let mut last = None;
    history.verify(|entry, _| last = Some(entry.act)).expect("whole");
    assert!(matches!(last, Some(Act::Mended { cut_bytes }) if cut_bytes > 100), "{last:?}");
    assert_eq!(history.head().version, 3);
}

#[test]
fn a_running_process_notices_that_its_last_lines_are_gone() {
    let (_folder, path, text) = written();
    let history = History::open(&path).expect("whole");
    let cut = text[..text.len() - 1].iter().rposition(|byte| *byte == b'\n').expect("a line") + 1;
    std::fs::write(&path, &text[..cut]).expect("cut");
    assert_eq!(line_of(&text[..cut]), None, "the chain alone does not show it");
    assert!(matches!(history.verify(|_, _| {}), Err(HistoryError::Replaced(_, 4, 5))));
}

#[test]
fn a_broken_history_is_not_continued() {
    let (_folder, path, mut text) = written();
    let at = text.iter().position(|byte| *byte == b'\n').expect("a line") + 100;
    text[at] ^= 1;
    std::fs::write(&path, &text).expect("changed");
    let error = History::open(&path).expect_err("broken").to_string();
    assert!(error.contains("line 2:"), "{error}");
}
