//! The documents tell the truth about the tree: links lead somewhere, and every dependency has its reason.

use crate::markdown::{anchors, code_spans, links};
use crate::source::{files, root, text};
use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn relative_links_lead_somewhere() {
    let mut broken = Vec::new();
    for path in files("", ".md") {
        let own = text(&path);
        let folder = path.parent().unwrap_or(Path::new("."));
        for link in links(&own) {
            if link.target.contains("://") || link.target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = link.target.split_once('#').unwrap_or((&link.target, ""));
            let target = if file.is_empty() { path.clone() } else { folder.join(file) };
            let found = target.exists()
                && (anchor.is_empty() || anchors(&text(&target)).iter().any(|known| known == anchor));
            if !found {
                broken.push(format!("{}:{}: {}", path.display(), link.line, link.target));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

/// The names under every `[…dependencies]` section of a manifest.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let mut inside = false;
    let mut names = BTreeSet::new();
    for line in manifest.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            inside = section.trim_end_matches(']').ends_with("dependencies");
        } else if inside && let Some((name, _)) = line.split_once(['=', '.']) {
            names.insert(name.trim().to_owned());
        }
    }
    names
}

/// The crates that a line "- `a`, `b` (who uses it): why" gives a reason for.
fn reasoned(line: &str) -> Vec<String> {
    let parts = line.strip_prefix("- ").and_then(|rest| rest.split_once(" ("));
    let Some((crates, rest)) = parts else { return Vec::new() };
    let has_reason = rest.split_once("): ").is_some_and(|(users, why)| !users.is_empty() && why.len() > 10);
    if has_reason { code_spans(crates).into_iter().map(str::to_owned).collect() } else { Vec::new() }
}

#[test]
fn every_dependency_has_its_reason() {
    let mut direct: BTreeSet<String> =
        files("crates", "Cargo.toml").iter().flat_map(|path| dependencies(&text(path))).collect();
    direct.extend(dependencies(&text(&root().join("fuzz/Cargo.toml"))));
    direct.retain(|name| !name.starts_with("sidetrack"));
    assert!(direct.contains("serde"), "the manifests were not read: {direct:?}");

    let document = text(&root().join("docs/dependencies.md"));
    let reasons: BTreeSet<String> = document.lines().flat_map(reasoned).collect();
    let silent: Vec<_> = direct.difference(&reasons).collect();
    assert!(silent.is_empty(), "no reason in docs/dependencies.md for: {silent:?}");
    let gone: Vec<_> = reasons.difference(&direct).collect();
    assert!(gone.is_empty(), "docs/dependencies.md gives reasons for what nobody uses: {gone:?}");
}
