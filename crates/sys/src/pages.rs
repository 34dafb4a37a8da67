//! Larger pages for tables that are read all over: with 4 KiB a page, each read of a large table waits for the page's address
//! first, in a virtual machine for two of them.
#![allow(unsafe_code, reason = "works on memory that it shares with the kernel")]

/// A multiple of every size that small pages have.
const SMALL: usize = 64 << 10;

/// Asks the kernel to lay this memory, given by its address and length in bytes, on huge pages as far as it has not been used yet
/// (madvise(2), `MADV_HUGEPAGE`). Only an advice: where there are none, or nothing is mapped, all stays as it is.
pub fn prefer_huge(address: usize, bytes: usize) {
    // A page that lies in it only in part is not asked for: the rest may belong to code that wants small ones.
    let Some(start) = address.checked_next_multiple_of(SMALL) else { return };
    let bytes = (address.saturating_add(bytes) / SMALL * SMALL).saturating_sub(start);
    // SAFETY: the advice changes neither contents nor rights of any memory, whosever it is.
    unsafe { libc::madvise(std::ptr::without_provenance_mut(start), bytes, libc::MADV_HUGEPAGE) };
}

#[cfg(test)]
mod tests {
    use super::prefer_huge;

    /// What the kernel has noted about the mapping that an address lies in.
    fn is_advised(address: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("proc");
        let mut inside = false;
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((Ok(start), Ok(end))) =
                range.map(|(a, b)| (usize::from_str_radix(a, 16), usize::from_str_radix(b, 16)))
            {
                inside = (start..end).contains(&address);
            } else if inside && line.starts_with("VmFlags:") {
                return line.split(' ').any(|flag| flag == "hg");
            }
        }
        false
    }

    #[test]
    fn a_table_is_advised_and_what_lies_beside_it_is_not() {
        let table = vec![0_u8; 16 << 20];
        let middle = table.as_ptr().addr() + (8 << 20);
        assert!(!is_advised(middle));
        prefer_huge(middle, 100);
        assert!(!is_advised(middle), "no whole page");
        prefer_huge(table.as_ptr().addr() + (4 << 20), 8 << 20);
        // A kernel without huge pages refuses the advice.
        let has_them = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        assert_eq!(is_advised(middle), has_them);
        assert!(!is_advised(table.as_ptr().addr() + (1 << 20)));
        prefer_huge(usize::MAX - 10, 100);
        prefer_huge(0, 0);
    }
}
