//! The tables that indexes point into (RFC 7541 Sec. 2.3).

use std::collections::VecDeque;

/// The static table (RFC 7541 Appendix A). Its first entry has the index 1.
const STATIC: [(&str, &str); 61] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];

/// What an entry counts beyond the bytes of its name and value (RFC 7541 Sec. 4.1).
pub(super) const ENTRY_BYTES: usize = 32;

#[derive(Debug)]
struct Entry {
    name: Box<[u8]>,
    value: Box<[u8]>,
}

impl Entry {
    fn size(&self) -> usize {
        self.name.len() + self.value.len() + ENTRY_BYTES
    }
}

/// The dynamic table, behind the static one. Entries beyond `max` bytes leave, the oldest first.
#[derive(Debug)]
pub(super) struct Table {
    /// The newest entry is first.
    entries: VecDeque<Entry>,
    size: usize,
    max: usize,
}

impl Table {
    pub(super) const fn new(max: usize) -> Self {
        Self { entries: VecDeque::new(), size: 0, max }
    }

    /// Returns the name and value at an index.
    pub(super) fn get(&self, index: usize) -> Option<(&[u8], &[u8])> {
        let index = index.checked_sub(1)?;
        match index.checked_sub(STATIC.len()) {
            None => STATIC.get(index).map(|(name, value)| (name.as_bytes(), value.as_bytes())),
            Some(index) => self.entries.get(index).map(|entry| (&*entry.name, &*entry.value)),
        }
    }

    /// Adds an entry. One that is larger than the whole table empties it (RFC 7541 Sec. 4.4).
    pub(super) fn insert(&mut self, name: &[u8], value: &[u8]) {
        let size = name.len() + value.len() + ENTRY_BYTES;
        if size > self.max {
            self.shrink(0);
            return;
        }
        self.shrink(self.max - size);
        self.entries.push_front(Entry { name: name.into(), value: value.into() });
        self.size += size;
    }

    /// Changes the size that the entries may have together.
    pub(super) fn resize(&mut self, max: usize) {
        self.max = max;
        self.shrink(max);
    }

    fn shrink(&mut self, to: usize) {
        while self.size > to {
            // An empty table has size 0.
            let Some(entry) = self.entries.pop_back() else { return };
            self.size -= entry.size();
        }
    }

    /// Returns what the entries count together.
    #[cfg(test)]
    pub(super) const fn size(&self) -> usize {
        self.size
    }
}
