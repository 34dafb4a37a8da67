//! Copies of the system's lists of authorities with one more authority in them. Only the command sees them.

use crate::tls;
use rustls::pki_types::CertificateDer;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Paths of the Java trust store in common distributions.
const JAVA_STORES: [&str; 3] =
    ["/etc/ssl/certs/java/cacerts", "/etc/pki/java/cacerts", "/etc/pki/ca-trust/extracted/java/cacerts"];

/// Variables that name a list of authorities, for programs that do not read the system's.
const VARIABLES: [&str; 9] = [
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "AWS_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "DENO_CERT",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
];

/// Certificates that the command trusts beside the system's authorities.
#[derive(Clone, Debug)]
pub struct Trusted {
    /// The certificate of our authority, and others, in PEM.
    pub pem: String,
    /// The same as DER.
    pub certificates: Vec<CertificateDer<'static>>,
    /// A file with the first of them, for programs of systems without any list. `None`: there is no such file.
    pub root_file: Option<PathBuf>,
}

impl Trusted {
    /// Returns the lists to replace, each with its new content.
    pub(super) fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let mut covered = BTreeSet::new();
        let mut files = Vec::new();
        // Several paths to one file need only one mount.
        let mut cover = |path: &Path, content: &dyn Fn(&str) -> Vec<u8>| {
            if let Ok(real) = path.canonicalize()
                && covered.insert(real.clone())
            {
                let text = std::fs::read_to_string(&real).unwrap_or_default();
                files.push((real, content(&text)));
            }
        };
        for bundle in tls::BUNDLES {
            cover(Path::new(bundle), &|text| format!("{text}\n{}", self.pem).into_bytes());
        }
        let store = self.java_store();
        let home = std::env::var_os("JAVA_HOME").map(|home| Path::new(&home).join("lib/security/cacerts"));
        for path in JAVA_STORES.into_iter().map(PathBuf::from).chain(home) {
            cover(&path, &|_| store.clone());
        }
        files
    }

    /// Environment variables for programs that do not read the system's list.
    pub(super) fn variables(&self) -> Vec<(OsString, Option<OsString>)> {
        let bundle = tls::BUNDLES.iter().map(PathBuf::from).find(|path| path.is_file());
        let Some(file) = bundle.or_else(|| self.root_file.clone()) else { return Vec::new() };
        VARIABLES.into_iter().map(|name| (name.into(), Some(file.clone().into_os_string()))).collect()
    }

    /// Returns the system's authorities and this one in Java's format.
    fn java_store(&self) -> Vec<u8> {
        let bundle = tls::BUNDLES.iter().find_map(|path| std::fs::read_to_string(path).ok());
        let mut all = bundle.map(|pem| tls::certificates_in(&pem)).unwrap_or_default();
        all.extend(self.certificates.iter().cloned());
        jks(&all)
    }
}

/// The well-known password of Java's own trust store. It protects nothing.
const PASSWORD: &str = "changeit";

/// Encodes a Java key store with trusted certificates only (the JKS format, version 2).
fn jks(certificates: &[CertificateDer<'_>]) -> Vec<u8> {
    const TRUSTED_CERTIFICATE: u32 = 2;
    let mut out = Vec::new();
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_be_bytes();
    let text = |out: &mut Vec<u8>, text: &str| {
        out.extend(u16::try_from(text.len()).unwrap_or(u16::MAX).to_be_bytes());
        out.extend(text.as_bytes());
    };
    out.extend(0xfeed_feed_u32.to_be_bytes());
    out.extend(2_u32.to_be_bytes());
    out.extend(number(certificates.len()));
    for (index, certificate) in certificates.iter().enumerate() {
        out.extend(TRUSTED_CERTIFICATE.to_be_bytes());
        text(&mut out, &format!("authority-{index}"));
        out.extend(0_u64.to_be_bytes());
        text(&mut out, "X.509");
        out.extend(number(certificate.len()));
        out.extend(certificate.as_ref());
    }
    let mut hash = ring::digest::Context::new(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY);
    hash.update(&PASSWORD.encode_utf16().flat_map(u16::to_be_bytes).collect::<Vec<u8>>());
    hash.update(b"Mighty Aphrodite");
    hash.update(&out);
    out.extend(hash.finish().as_ref());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_java_store_has_its_certificates_and_a_sum() {
        let one = CertificateDer::from(vec![1, 2, 3]);
        let store = jks(&[one]);
        let head = [0xfe, 0xed, 0xfe, 0xed, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2, 0, 11];
        assert_eq!(&store[..18], head);
        assert_eq!(&store[18..29], b"authority-0");
        assert_eq!(&store[37..44], b"\0\x05X.509");
        assert_eq!(&store[44..51], [0, 0, 0, 3, 1, 2, 3]);
        assert_eq!(store.len(), 51 + 20);
    }
}
