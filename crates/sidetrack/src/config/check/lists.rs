//! Large conditions of rules on hosts and URLs: files of names, words, patterns.

use super::super::{At, List};
use super::Check;
use sidetrack_core::host_name::folded_part;
use sidetrack_core::policy::{HostFile, HostList, HostListBuilder, UrlPattern};
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

/// Largest file of host names, bytes. It holds several million names.
const HOST_FILE_MAX: u64 = 256 << 20;
/// Bytes read from a file at a time.
const PIECE: usize = 128 * 1024;

impl Check<'_> {
    /// Reads files of host names.
    pub(super) fn host_files(&mut self, paths: &List<String>) -> Vec<HostFile> {
        self.not_empty(paths);
        paths.items().iter().filter_map(|path| self.host_file(path)).collect()
    }

    fn host_file(&mut self, path: &At<String>) -> Option<HostFile> {
        let list = match read(&self.surroundings.resolve(path)) {
            Ok(list) => list,
            Err(error) => {
                let help = "a relative path starts from the folder of this file";
                self.error(path.span(), format!("cannot read '{}': {error}", path.as_str()), help);
                return None;
            }
        };
        if list.is_empty() {
            let message = format!("'{}' names no host", path.as_str());
            let help = "write one name a line, or \"*.name\" for all names below; lines of hosts files and of Adblock \
                        lists (\"||name^\") are read, too";
            self.error(path.span(), message, help);
        }
        Some(HostFile { path: path.as_str().into(), list: Arc::new(list) })
    }

    /// Checks words in host names and returns them in lower case.
    pub(super) fn host_words(&mut self, words: &List<String>) -> Vec<Box<str>> {
        self.not_empty(words);
        for word in words.items() {
            if word.is_empty()
                || word.contains(|c: char| c.is_whitespace() || c.is_control() || "/:*".contains(c))
            {
                let help = "write a part of a name, such as \"casino\"; patterns of names go into `host`, of URLs into `url`";
                self.error(word.span(), format!("no host name holds '{}'", word.as_str()), help);
            }
        }
        words.items().iter().filter_map(|word| self.host_word(word)).collect()
    }

    fn host_word(&mut self, word: &At<String>) -> Option<Box<str>> {
        match folded_part(word) {
            Ok(folded) => Some(folded.into()),
            Err(error) => {
                let help = "write the part of the name as it is written in an address bar, or its ASCII form (xn--…)";
                self.error(word.span(), format!("no host name holds '{}': {error}", word.as_str()), help);
                None
            }
        }
    }

    /// Checks patterns of URLs.
    pub(super) fn url_patterns(&mut self, patterns: &List<String>) -> Vec<UrlPattern> {
        self.not_empty(patterns);
        for pattern in patterns.items() {
            if !pattern.starts_with('*') && !pattern.contains("://") {
                let help =
                    "a pattern is for the whole URL: \"http://ads.example/*\", \"*/banner/*\", \"*.exe\"";
                self.error(pattern.span(), format!("no URL fits '{}'", pattern.as_str()), help);
            }
        }
        patterns.items().iter().map(|pattern| UrlPattern::new(pattern)).collect()
    }
}

/// Reads a list in pieces, because its text is larger than the list made of it.
fn read(path: &Path) -> io::Result<HostList> {
    let mut file = std::fs::File::open(path)?;
    let (mut builder, mut length) = (HostListBuilder::default(), 0);
    let mut piece = vec![0; PIECE];
    loop {
        let n = match file.read(&mut piece) {
            Ok(0) => return Ok(builder.finish()),
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        length += n as u64;
        if length > HOST_FILE_MAX {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it has more than 256 MiB"));
        }
        builder.push(&piece[..n]);
    }
}
