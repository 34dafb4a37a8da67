//! The encrypting pair beside OpenSSL and beside ring, the library of its cipher: the same cipher, the same length of
//! records, one core.

use anyhow::{Context, Result, ensure};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use sidetrack_sys::scheduling::thread_cpu_time;

use crate::kit::Page;
use crate::peers::ours;
use crate::site::Site;

/// Bytes of one record of ours, and of one block of OpenSSL's and of ring's.
const RECORD_BYTES: usize = 16384;

/// Gigabytes (10^9) per second of processor time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Pair {
    /// Our encryption, with records and rekeying.
    pub encrypt: f64,
    /// Our decryption.
    pub decrypt: f64,
    /// The bare cipher in ring, which we use.
    pub ring: f64,
    /// The bare cipher in OpenSSL.
    pub openssl: f64,
    /// The version of OpenSSL.
    pub version: String,
}

/// Measures all three on the proxy's core, one after the other.
///
/// # Errors Our program or `openssl` does not exist.
pub(super) fn measure(site: &Site, bytes: u64) -> Result<Pair> {
    let config = site.directory.path().join("crypt.toml");
    let key = site.directory.path().join("crypt.key");
    std::fs::write(&key, "5a".repeat(32))?;
    let key = key.display();
    let text = format!(
        "version = 1\ndefault = \"deny\"\n[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:1080\"\n[[rule]]\nname = \"all\"\n\
         carrier = \"direct\"\nchain = [\"seal\", \"open\"]\n[function.seal]\nkind = \"encrypt\"\nkey_file = \"{key}\"\n\
         [function.open]\nkind = \"decrypt\"\nkey_file = \"{key}\"\n"
    );
    std::fs::write(&config, text)?;
    let program = ours::program().map_err(|error| anyhow::anyhow!("{error}"))?;
    let mut tried = site.proxy.command_at(&program.to_string_lossy(), &site.proxy_placement());
    tried.args(["chain", "try", "all", "--bytes", &bytes.to_string(), "-c"]).arg(&config);
    let tried = said(tried)?;
    let mut openssl = site.proxy.command_at("openssl", &site.proxy_placement());
    let record = RECORD_BYTES.to_string();
    openssl.args(["speed", "-mr", "-seconds", "2", "-bytes", &record, "-evp", "chacha20-poly1305"]);
    let openssl = said(openssl)?;
    let mut version = site.proxy.command_at("openssl", &site.proxy_placement());
    version.arg("version");
    Ok(Pair {
        encrypt: speed(&tried, "encrypt").context("no line of encrypt")?,
        decrypt: speed(&tried, "decrypt").context("no line of decrypt")?,
        ring: ring_alone(bytes)?,
        openssl: openssl_speed(&openssl).context("openssl speed says no speed")?,
        version: said(version)?.split_whitespace().take(2).collect::<Vec<_>>().join(" "),
    })
}

/// Seals this number of bytes in place, one record after the other in the same memory.
fn ring_alone(bytes: u64) -> Result<f64> {
    let broken = |_| anyhow::anyhow!("ring does not seal");
    let key = LessSafeKey::new(UnboundKey::new(&CHACHA20_POLY1305, &[0x5a; 32]).map_err(broken)?);
    let mut record = vec![0x5a; RECORD_BYTES];
    let began = thread_cpu_time();
    let records = bytes / RECORD_BYTES as u64;
    for number in 0..records {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&number.to_be_bytes());
        let nonce = Nonce::assume_unique_for_key(nonce);
        let _tag = key.seal_in_place_separate_tag(nonce, Aad::empty(), &mut record).map_err(broken)?;
    }
    let seconds = thread_cpu_time().saturating_sub(began).as_secs_f64();
    Ok((records * RECORD_BYTES as u64) as f64 / 1e9 / seconds)
}

fn said(mut command: std::process::Command) -> Result<String> {
    let output = command.output()?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Reads GB/s from the column of microseconds per megabyte.
fn speed(table: &str, kind: &str) -> Option<f64> {
    let line = table.lines().find(|line| line.split_whitespace().nth(1) == Some(kind))?;
    let us: f64 = line.split_whitespace().nth(3)?.parse().ok()?;
    (us > 0.0).then(|| 1e3 / us)
}

/// `+F:number:name:bytes per second`.
fn openssl_speed(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with("+F:"))?;
    let bytes: f64 = line.rsplit(':').next()?.parse().ok()?;
    Some(bytes / 1e9)
}

/// Formats it as a table.
pub(super) fn render(page: &mut Page, pair: &Pair) {
    let share = |ours: f64| ours / pair.openssl;
    page.columns(["ChaCha20-Poly1305, records of 16 KiB", "GB a CPU second:", "of OpenSSL's:", "of ring's:"]);
    for (name, speed) in [("encrypt", pair.encrypt), ("decrypt", pair.decrypt)] {
        page.row(format_args!("{name} | {speed:.2} | {:.2} | {:.2}", share(speed), speed / pair.ring));
    }
    page.row(format_args!(
        "ring, the cipher alone (what ours is made of) | {:.2} | {:.2} | 1",
        pair.ring,
        share(pair.ring)
    ));
    page.row(format_args!(
        "{} (`openssl speed`), the cipher alone | {:.2} | 1 |",
        pair.version, pair.openssl
    ));
    page.blank();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_programs_speak_of_gigabytes_in_the_end() {
        let table = "function kind bytes out us/MB waits ms connect ms\nseal encrypt 100 500.0 0 -\nopen decrypt 90 250.0 0 -\n";
        assert_eq!((speed(table, "encrypt"), speed(table, "decrypt")), (Some(2.0), Some(4.0)));
        assert_eq!(openssl_speed("+R:1:x\n+F:26:ChaCha20-Poly1305:1500000000.00\n"), Some(1.5));
        assert_eq!(openssl_speed(""), None);
    }
}
