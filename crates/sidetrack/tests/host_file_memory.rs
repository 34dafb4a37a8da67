//! What a list of a million hosts takes of this process's memory, and what it takes while it is read anew. A process of its
//! own: other tests would be measured along.

use sidetrack::config::Config;
use std::io::Write;

/// As the program has it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A number of `/proc/self/status`, bytes.
fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("proc");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).expect(name);
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

/// As many names as the usual lists have: letters without a pattern, below names of their own.
fn write_list(file: &mut impl Write, (count, seed): (u64, u64)) {
    for number in 0..count {
        let mut random = (number ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let name: String = (0..8 + number % 9)
            .map(|_| {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                char::from(b'a' + (random >> 59) as u8 % 26)
            })
            .collect();
        let (site, end) = (number / 7, ["com", "net", "org", "de", "co.uk"][(number / 7 % 5) as usize]);
        writeln!(file, "||{name}.site{site:x}.{end}^").expect("a line");
    }
}

#[test]
fn old_and_new_list_of_a_million_hosts_fit_into_what_is_promised() {
    let folder = tempfile::tempdir().expect("a folder");
    let list = folder.path().join("list");
    let config = format!(
        "version = 1\ndefault = 'direct'\n[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n\
         [[rule]]\nname = 'listed'\nmatch = {{ host_file = {list:?} }}\naction = 'deny'\n"
    );
    let load = |count, seed| {
        let mut file = std::io::BufWriter::new(std::fs::File::create(&list).expect("a file"));
        write_list(&mut file, (count, seed));
        file.flush().expect("written");
        // From here on the highest counts, not what was before.
        std::fs::write("/proc/self/clear_refs", "5").expect("clear_refs");
        Config::from_text("test.toml", &config).expect("a configuration")
    };
    // The program itself is there before any list is.
    drop(load(1000, 1));
    let before = status("VmRSS");
    let old = load(1_000_000, 0);
    let (read, held) = (status("VmHWM") - before, status("VmRSS") - before);
    let new = load(1_000_000, 1 << 40);
    let both = status("VmHWM") - before;
    println!(
        "a million hosts: {held} bytes resident, {read} while read, {both} while read anew beside the old list"
    );
    assert!(old.policy != new.policy, "two lists are there at the end");
    assert!(held < 50_000_000 && read < 50_000_000 && both < 50_000_000, "{held} {read} {both}");
}
