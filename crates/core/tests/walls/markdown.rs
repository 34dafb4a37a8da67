//! What the document tests read out of Markdown: links, headings and tables.

/// A link `[text](target)` outside code.
pub(crate) struct Link {
    /// Line number, from 1.
    pub line: usize,
    /// What stands between the parentheses.
    pub target: String,
}

/// A row of a table, with the cells of its header.
pub(crate) struct Row {
    /// Line number, from 1.
    pub line: usize,
    /// The cells, trimmed.
    pub cells: Vec<String>,
}

/// The lines outside fenced code blocks, numbered from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence).then_some((index + 1, line))
    })
}

/// The line with `code spans` blanked.
fn without_code(line: &str) -> String {
    line.split('`').enumerate().map(|(index, part)| if index % 2 == 0 { part } else { "" }).collect()
}

/// The lines outside code blocks, without their code spans, numbered from 1.
pub(crate) fn plain_lines(text: &str) -> Vec<(usize, String)> {
    prose(text).map(|(line, content)| (line, without_code(content))).collect()
}

/// Every link in prose.
pub(crate) fn links(text: &str) -> Vec<Link> {
    let mut found = Vec::new();
    for (line, content) in prose(text) {
        let content = without_code(content);
        let mut rest = content.as_str();
        while let Some((_, after)) = rest.split_once("](") {
            let Some((target, tail)) = after.split_once(')') else { break };
            found.push(Link { line, target: target.to_owned() });
            rest = tail;
        }
    }
    found
}

/// The anchors of a document's headings, as code hosts make them: lower case, blanks to `-`, punctuation dropped.
pub(crate) fn anchors(text: &str) -> Vec<String> {
    let headings = prose(text).filter_map(|(_, line)| line.strip_prefix('#'));
    let title = headings.map(|line| line.trim_start_matches('#').trim());
    title
        .map(|title| {
            let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
        })
        .collect()
}

/// The rows of every table whose header begins with these cells.
pub(crate) fn table(text: &str, header: &[&str]) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut inside = false;
    for (line, content) in prose(text) {
        let Some(cells) = cells(content) else {
            inside = false;
            continue;
        };
        if cells.len() >= header.len() && cells.iter().zip(header).all(|(cell, title)| cell == title) {
            inside = true;
        } else if inside && !cells.iter().all(|cell| cell.chars().all(|c| matches!(c, '-' | ':'))) {
            rows.push(Row { line, cells });
        }
    }
    rows
}

fn cells(line: &str) -> Option<Vec<String>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    let marked = inner.replace("\\|", "\u{0}");
    Some(marked.split('|').map(|cell| cell.trim().replace('\u{0}', "|")).collect())
}

/// The `code spans` of a cell or a line.
pub(crate) fn code_spans(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

#[test]
fn markdown_is_read_as_it_is_written() {
    let text = "# A b: C\n[x](y.md#z) `[no](no)` [k](l)\n```\n[no](no)\n# no\n```\n\n| a | b |\n|---|:-:|\n| `1` | 2\\|3 |\n";
    let targets: Vec<_> = links(text).into_iter().map(|link| (link.line, link.target)).collect();
    assert_eq!(targets, [(2, "y.md#z".to_owned()), (2, "l".to_owned())]);
    assert_eq!(anchors(text), ["a-b-c"]);
    let rows = table(text, &["a", "b"]);
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].line, rows[0].cells.as_slice()), (10, &["`1`".to_owned(), "2|3".to_owned()][..]));
    assert!(table(text, &["b"]).is_empty());
    assert_eq!(code_spans("a `b` c `d`"), ["b", "d"]);
}
