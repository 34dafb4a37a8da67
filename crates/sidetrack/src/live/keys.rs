//! The secrets of TLS connections that we intercept, kept in memory while packets are captured, so that a capture can be decrypted.

use data_encoding::HEXLOWER;
use sidetrack_sys::sync::lock;
use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

/// Most connections whose secrets are kept. The oldest go first.
const KEPT_MAX: usize = 8192;

/// Most bytes of one connection's lines: TLS 1.3 has five lines of at most 220 bytes, and one more for each update of a key.
const LINES_MAX: usize = 4096;

/// A connection has the random of its ClientHello as its name.
type Random = [u8; 32];

static WANTED: AtomicBool = AtomicBool::new(false);

#[derive(Default)]
struct Kept {
    lines: HashMap<Random, String>,
    order: VecDeque<Random>,
}

fn kept() -> &'static Mutex<Kept> {
    static KEPT: OnceLock<Mutex<Kept>> = OnceLock::new();
    KEPT.get_or_init(Mutex::default)
}

/// Whether a capture runs.
pub fn are_wanted() -> bool {
    WANTED.load(Relaxed)
}

/// Sets whether a capture runs. What was kept before is forgotten.
pub fn want(is_wanted: bool) {
    WANTED.store(is_wanted, Relaxed);
    *lock(kept()) = Kept::default();
}

/// Returns the lines of a connection (NSS key log format) that begin at this byte.
pub fn lines(random: &Random, from: usize) -> Option<String> {
    let kept = lock(kept());
    kept.lines.get(random)?.get(from..).filter(|lines| !lines.is_empty()).map(str::to_owned)
}

/// Returns one line of a key log.
pub fn line(label: &str, client_random: &[u8], secret: &[u8]) -> String {
    let mut line = String::with_capacity(label.len() + 2 * (client_random.len() + secret.len()) + 3);
    // Writing to a String cannot fail.
    let _ = writeln!(line, "{label} {} {}", HEXLOWER.encode(client_random), HEXLOWER.encode(secret));
    line
}

/// Keeps a secret, if a capture runs.
pub fn keep(label: &str, client_random: &[u8], secret: &[u8]) {
    let Ok(random) = Random::try_from(client_random) else { return };
    if !are_wanted() {
        return;
    }
    let line = line(label, client_random, secret);
    let mut kept = lock(kept());
    let Kept { lines, order } = &mut *kept;
    let known = lines.entry(random).or_insert_with(|| {
        order.push_back(random);
        String::new()
    });
    if known.len() + line.len() <= LINES_MAX {
        known.push_str(&line);
    }
    if order.len() > KEPT_MAX
        && let Some(oldest) = order.pop_front()
    {
        lines.remove(&oldest);
    }
}
