//! Sorted names in one text. Each name is stored as the part that it does not share with the name before it.
//!
//! Names are stored from their end on (`elpmaxe.www`), so that all names below one are neighbours and share most of
//! their bytes. Every sixteenth name is stored whole. A look-up finds the block by binary search, and reads at most
//! that block. A small filter comes first. It answers nearly all look-ups of absent names by reading one cache line.

/// Names in one block. The first one is stored whole.
const BLOCK: usize = 16;
/// If the own part of a name has this length or more, a separate byte holds its length.
const LONG: usize = 15;
/// Bits of the filter for each name.
const FILTER_BITS: usize = 12;
/// Bits that are set in a line of the filter for each name.
const PROBES: u32 = 5;

/// Bytes of a segment. All texts consist of segments of this size, so that the table can reuse the memory which the
/// sorted pieces free while they are merged.
const SEGMENT: usize = 1 << SEGMENT_BITS;
const SEGMENT_BITS: u32 = 15;
/// Bytes of an entry before its own part.
const HEAD: usize = 3;

/// Writes names in sorted order.
#[derive(Default)]
pub(super) struct Writer {
    /// The text. Entries do not cross the end of a segment, and each segment begins with a whole name.
    pub(super) segments: Vec<Vec<u8>>,
    /// Where blocks begin: the segment, and the offset in it.
    blocks: Vec<u32>,
    /// Names in the last block.
    in_block: usize,
    last: Vec<u8>,
}

impl Writer {
    /// Adds a name that is greater than all others. It has at most 255 bytes.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a name has at most 255 bytes, and a configuration reads lists of at most 256 MiB"
    )]
    pub(super) fn push(&mut self, name: &[u8], meanings: u8) {
        let mut shared = if self.in_block == BLOCK { 0 } else { common(&self.last, name) };
        let room = self.segments.last().map_or(0, |segment| SEGMENT - segment.len());
        if room < HEAD + name.len() - shared {
            self.segments.push(Vec::with_capacity(SEGMENT));
            shared = 0;
        }
        let at = self.segments.len().saturating_sub(1);
        let Some(segment) = self.segments.last_mut() else { return };
        if shared == 0 {
            self.blocks.push((at << SEGMENT_BITS | segment.len()) as u32);
            self.in_block = 0;
        }
        self.in_block += 1;
        let rest = &name[shared..];
        let short = rest.len().min(LONG);
        segment.extend([shared as u8, (meanings << 4) | short as u8]);
        if short == LONG {
            segment.push((rest.len() - LONG) as u8);
        }
        segment.extend_from_slice(rest);
        self.last.truncate(shared);
        self.last.extend_from_slice(rest);
    }
}

/// An entry of the text.
pub(super) struct Entry<'t> {
    /// The number of bytes that the name shares with the name before it.
    pub(super) shared: usize,
    /// The meanings of the name.
    pub(super) meanings: u8,
    /// The own part: the bytes behind the shared ones.
    pub(super) rest: &'t [u8],
}

/// Takes the first entry of a text.
pub(super) fn take<'t>(text: &mut &'t [u8]) -> Option<Entry<'t>> {
    let [shared, head, behind @ ..] = *text else { return None };
    let (mut length, mut behind) = (usize::from(head & 15), behind);
    if length == LONG {
        let (more, rest) = behind.split_first()?;
        (length, behind) = (LONG + usize::from(*more), rest);
    }
    let (rest, behind) = behind.split_at_checked(length)?;
    *text = behind;
    Some(Entry { shared: usize::from(*shared), meanings: head >> 4, rest })
}

/// Returns the number of bytes that both have in common at the beginning.
fn common(one: &[u8], other: &[u8]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

/// The names of a list.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Table {
    /// As [`Writer::segments`].
    segments: Vec<Vec<u8>>,
    /// As [`Writer::blocks`].
    blocks: Vec<u32>,
    filter: Filter,
    names: usize,
}

impl Table {
    /// Makes a table of names that arrive in sorted order, each once.
    pub(super) fn new(mut next: impl FnMut(&mut Vec<u8>) -> Option<u8>) -> Self {
        let (mut writer, mut names, mut name) = (Writer::default(), 0, Vec::new());
        while let Some(meanings) = next(&mut name) {
            writer.push(&name, meanings);
            names += 1;
        }
        drop(next);
        let Writer { segments, mut blocks, .. } = writer;
        blocks.shrink_to_fit();
        let mut filter = Filter::new(names);
        for segment in &segments {
            let mut text = segment.as_slice();
            while let Some(entry) = take(&mut text) {
                name.truncate(entry.shared);
                name.extend_from_slice(entry.rest);
                filter.insert(Hash::of(&name));
            }
        }
        Self { segments, blocks, filter, names }
    }

    /// Returns the number of names.
    pub(super) const fn len(&self) -> usize {
        self.names
    }

    /// Returns the bytes of memory that it takes.
    pub(super) fn memory_bytes(&self) -> usize {
        let text: usize = self.segments.iter().map(|segment| segment.capacity() + size_of::<Vec<u8>>()).sum();
        text + self.blocks.capacity() * size_of::<u32>() + self.filter.memory_bytes()
    }

    /// Returns the meanings of the name with this hash; 0 if the table does not contain it.
    pub(super) fn meanings(&self, hash: Hash, name: &[u8]) -> u8 {
        if self.filter.may_have(hash) { self.find(name) } else { 0 }
    }

    fn find(&self, name: &[u8]) -> u8 {
        let behind = self.blocks.partition_point(|block| self.first_of(*block) <= name);
        let Some(mut text) =
            behind.checked_sub(1).and_then(|at| self.blocks.get(at)).map(|block| self.from(*block))
        else {
            return 0;
        };
        // `same` is the number of bytes that the name shares with the entry before, which is smaller than the name. A
        // next block in the same segment begins with a whole name, which is greater, so the search ends there.
        let mut same = 0;
        for entry in std::iter::from_fn(|| take(&mut text)).take(BLOCK) {
            if entry.shared > same {
                // The entry differs from the name at the same byte as the entry before.
                continue;
            }
            let (rest, wanted) = (entry.rest, &name[same..]);
            if entry.shared < same {
                return 0;
            }
            let more = common(rest, wanted);
            if more == rest.len() && more == wanted.len() {
                return entry.meanings;
            }
            if rest[more..] > wanted[more..] {
                return 0;
            }
            same += more;
        }
        0
    }

    /// Returns the text from the beginning of a block to the end of its segment.
    fn from(&self, block: u32) -> &[u8] {
        let (segment, at) = (block as usize >> SEGMENT_BITS, block as usize & (SEGMENT - 1));
        &self.segments[segment][at..]
    }

    /// Returns the first name of a block.
    fn first_of(&self, block: u32) -> &[u8] {
        take(&mut self.from(block)).map_or(&[], |entry| entry.rest)
    }

    /// Whether the filter lets a look-up of this name through.
    #[cfg(test)]
    pub(super) fn may_have(&self, hash: Hash) -> bool {
        self.filter.may_have(hash)
    }
}

/// A Bloom filter. All probes for one name are in one cache line.
#[derive(Clone, Default, PartialEq, Eq)]
struct Filter(Vec<Line>);

#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[repr(align(64))]
struct Line([u64; 8]);

impl Filter {
    fn new(names: usize) -> Self {
        Self(vec![Line::default(); (names * FILTER_BITS).div_ceil(512)])
    }

    fn memory_bytes(&self) -> usize {
        self.0.capacity() * size_of::<Line>()
    }

    fn insert(&mut self, hash: Hash) {
        let (at, probes) = self.place(hash);
        if let Some(line) = self.0.get_mut(at) {
            for bit in bits(probes) {
                line.0[bit / 64] |= 1 << (bit % 64);
            }
        }
    }

    fn may_have(&self, hash: Hash) -> bool {
        let (at, probes) = self.place(hash);
        self.0.get(at).is_some_and(|line| bits(probes).all(|bit| line.0[bit / 64] & (1 << (bit % 64)) != 0))
    }

    /// Returns the line, and the bits that select its probes.
    fn place(&self, hash: Hash) -> (usize, u64) {
        let mixed = hash.mixed();
        let line = ((mixed >> 32) * self.0.len() as u64) >> 32;
        (line as usize, mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

/// Returns the probed bits of a line, from nine bits of the argument each.
fn bits(probes: u64) -> impl Iterator<Item = usize> {
    (1..=PROBES).map(move |probe| (probes >> (64 - 9 * probe) & 511) as usize)
}

/// A hash of a name's bytes from the end on (FNV-1a, 64 bits). Computing it yields the hashes of all names above the
/// name, too.
#[derive(Clone, Copy)]
pub(super) struct Hash(u64);

impl Default for Hash {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hash {
    /// Returns the hash of a name, which is stored from its end on.
    pub(super) fn of(name: &[u8]) -> Self {
        let mut hash = Self::default();
        name.iter().for_each(|byte| hash.push(*byte));
        hash
    }

    /// Adds one byte.
    pub(super) fn push(&mut self, byte: u8) {
        self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }

    const fn mixed(self) -> u64 {
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ (mixed >> 32)
    }
}
