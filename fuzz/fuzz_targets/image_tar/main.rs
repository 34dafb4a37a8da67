//! Archives of images, which come from other machines: no input panics, and what is told of one lies in it, whole, apart from all
//! else in it, under a name that leads nowhere else.
#![no_main]

#[path = "../../../crates/control/src/image/tar.rs"]
mod tar;

use libfuzzer_sys::fuzz_target;
use std::io::{self, Cursor};

/// What the module has around it in the program.
#[derive(Debug)]
#[allow(dead_code, reason = "nobody is told here why an archive is refused")]
enum ArchiveError {
    Malformed(String),
    Truncated,
    Io(io::Error),
}

impl From<io::Error> for ArchiveError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn malformed(why: impl Into<String>) -> ArchiveError {
    ArchiveError::Malformed(why.into())
}

fuzz_target!(|data: &[u8]| {
    let table = match tar::table(&mut Cursor::new(data)) {
        Ok(files) => files,
        Err(ArchiveError::Io(error)) => panic!("memory can be read: {error}"),
        Err(_) => return,
    };
    let mut places: Vec<_> = table
        .values()
        .filter_map(|entry| match entry {
            tar::Entry::File(place) => Some(place.clone()),
            tar::Entry::Link(_) | tar::Entry::Folder => None,
        })
        .collect();
    places.sort_unstable_by_key(|place| place.start);
    let mut free = 0;
    for place in places {
        assert!(place.start >= free + 512 && place.start % 512 == 0 && place.start <= place.end);
        free = place.end;
    }
    // Two empty blocks are behind the last.
    assert!(free + 1024 <= data.len() as u64);
    let is_plain = |name: &str| name.split('/').all(|part| !matches!(part, "" | "." | ".."));
    for (name, entry) in &table {
        assert!(is_plain(name) || *entry == tar::Entry::Folder && name == ".");
        if let tar::Entry::Link(target) = entry {
            assert!(is_plain(target));
        }
    }
});
