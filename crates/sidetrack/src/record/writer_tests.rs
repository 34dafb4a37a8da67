use super::*;
use std::fs;
use std::sync::mpsc;

const PATIENCE: Duration = Duration::from_secs(60);

/// An output under a test's control: each `write` waits for the result that the test sends.
struct Puppet {
    orders: mpsc::Receiver<io::Result<usize>>,
    asked: mpsc::Sender<Vec<u8>>,
}

impl Output for Puppet {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.asked.send(bytes.to_vec());
        self.orders.recv().unwrap_or_else(|_| Err(ErrorKind::BrokenPipe.into()))
    }

    fn refresh(&mut self, _wanted: bool) -> io::Result<()> {
        Ok(())
    }

    fn name(&self) -> String {
        "a puppet".to_owned()
    }
}

fn puppet() -> (RecordWriter, mpsc::Sender<io::Result<usize>>, mpsc::Receiver<Vec<u8>>) {
    let (order, orders) = mpsc::channel();
    let (asked, asks) = mpsc::channel();
    (RecordWriter::start_with(Box::new(Puppet { orders, asked })).unwrap(), order, asks)
}

#[test]
fn lines_reach_the_file_in_order_and_after_what_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flows.jsonl");
    fs::write(&path, "0\n").unwrap();
    let writer = RecordWriter::start(Target::File(path.clone())).unwrap();
    let mut expected = "0\n".to_owned();
    for n in 1..500 {
        let line = format!("{n}\n");
        writer.push(line.as_bytes());
        expected.push_str(&line);
    }
    assert_eq!(writer.close(PATIENCE), 0);
    assert_eq!(fs::read_to_string(&path).unwrap(), expected);
}

#[test]
fn a_file_moved_away_is_made_anew_on_demand() {
    let dir = tempfile::tempdir().unwrap();
    let (path, old) = (dir.path().join("flows.jsonl"), dir.path().join("flows.jsonl.1"));
    let writer = RecordWriter::start(Target::File(path.clone())).unwrap();
    fs::rename(&path, &old).unwrap();
    writer.reopen();
    writer.push(b"new\n");
    assert_eq!(writer.close(PATIENCE), 0);
    assert_eq!(fs::read_to_string(&path).unwrap(), "new\n");
    assert_eq!(fs::read_to_string(&old).unwrap(), "");
}

#[test]
fn a_file_moved_away_is_noticed_without_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flows.jsonl");
    let mut log = LogFile::open(path.clone()).unwrap();
    assert!(log.in_place());
    fs::rename(&path, dir.path().join("old")).unwrap();
    assert!(!log.in_place());
    log.looked -= LOOK_EVERY;
    log.refresh(false).unwrap();
    assert!(log.in_place(), "made anew");
}

#[test]
fn a_target_that_cannot_be_opened_is_named() {
    let error = RecordWriter::start(Target::File("/nonexistent/flows.jsonl".into())).unwrap_err();
    assert_eq!(
        error.to_string(),
        "records cannot be written to /nonexistent/flows.jsonl: No such file or directory (os error 2)"
    );
}

#[test]
fn a_full_disk_costs_records_and_they_are_counted() {
    let writer = RecordWriter::start(Target::File("/dev/full".into())).unwrap();
    writer.push(b"1\n2\n3\n");
    assert_eq!(writer.close(PATIENCE), 3);
}

#[test]
fn who_does_not_read_holds_up_nobody_and_the_overflow_is_counted() {
    let (writer, order, asks) = puppet();
    writer.push(b"first\n");
    asks.recv().unwrap();
    // The writer's thread is now blocked in a write.
    let line = [b"x".repeat(1023), b"\n".to_vec()].concat();
    for _ in 0..BUFFER_MAX / 1024 + 10 {
        writer.push(&line);
    }
    assert_eq!(writer.take_lost(), 10);
    assert_eq!(writer.shared.state().lines.len(), BUFFER_MAX);
    drop(order);
    assert_eq!(writer.close(PATIENCE), 1 + BUFFER_MAX as u64 / 1024, "the broken pipe costs the rest");
}

#[test]
fn a_stuck_reader_does_not_keep_us_from_stopping() {
    let (writer, order, asks) = puppet();
    writer.push(b"1\n");
    asks.recv().unwrap();
    writer.push(b"2\n3\n");
    assert_eq!(writer.close(Duration::ZERO), 2, "those that wait; the one in the pipe may yet be read");
    drop(order);
}

#[test]
fn a_line_torn_by_a_full_disk_spoils_no_other() {
    let (writer, order, asks) = puppet();
    writer.push(b"one\ntwo\n");
    asks.recv().unwrap();
    order.send(Ok(5)).unwrap();
    assert_eq!(asks.recv().unwrap(), b"wo\n");
    order.send(Err(ErrorKind::StorageFull.into())).unwrap();
    writer.push(b"three\n");
    assert_eq!(asks.recv().unwrap(), b"\nthree\n", "the torn line is ended first");
    order.send(Ok(7)).unwrap();
    assert_eq!(writer.close(PATIENCE), 1, "line two");
}

#[test]
fn a_line_torn_by_a_full_disk_is_removed_from_a_file_and_the_trouble_is_told_until_it_is_over() {
    /// A file on a disk that takes three bytes more, and then none until `room` says so.
    struct Full {
        file: File,
        calls: u32,
        room: mpsc::Receiver<()>,
    }
    impl Output for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.calls += 1;
            match self.calls {
                1 => self.file.write(&bytes[..7]),
                2 => Err(ErrorKind::StorageFull.into()),
                _ => {
                    let _ = self.room.recv();
                    self.file.write(bytes)
                }
            }
        }
        fn cut(&mut self, bytes: u64) -> bool {
            cut(&self.file, bytes).is_ok()
        }
        fn refresh(&mut self, _wanted: bool) -> io::Result<()> {
            Ok(())
        }
        fn name(&self) -> String {
            "a file".to_owned()
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flows.jsonl");
    let (more, room) = mpsc::channel();
    let full = Full { file: open(&path).unwrap(), calls: 0, room };
    let writer = RecordWriter::start_with(Box::new(full)).unwrap();
    let trouble = writer.trouble();
    writer.push(b"one\ntwo\n");
    let until = Instant::now() + PATIENCE;
    while trouble.now().is_none() {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    assert_eq!(fs::read_to_string(&path).unwrap(), "one\n", "no half of a line is left");
    assert!(trouble.now().unwrap().starts_with("a file: "), "{trouble:?}");
    writer.push(b"three\n");
    more.send(()).unwrap();
    // From now on there is room; the trouble is over when nothing has failed for a while.
    drop(more);
    while trouble.now().is_some() {
        assert!(Instant::now() < until);
        writer.push(b"more\n");
        std::thread::sleep(RETRY);
    }
    assert_eq!(writer.close(PATIENCE), 1, "line two");
    assert!(fs::read_to_string(&path).unwrap().starts_with("one\nthree\nmore\n"));
}
