//! The tables of the five documents: each row is seen by something that a reader can type, and each measured figure stands
//! in a committed table.

use crate::markdown::{Row, code_spans, table};
use crate::source::{root, text};

const DOCUMENT: &str = "docs/seeds.md";
const HEADER: [&str; 5] = ["section", "what it says", "where it lives", "shown by", "figure"];

/// Units of measured figures. Delays and rates of emulated links are settings, written otherwise.
const MEASURED: [&str; 4] = ["per second", "Mb/s", "Gbit/s", "times"];

fn rows() -> Vec<Row> {
    table(&text(&root().join(DOCUMENT)), &HEADER)
}

/// The numbers of a text, each with its decimals: `1,234.5` is 1234.5 with one. Digits within a word are none.
fn numbers(text: &str) -> Vec<(f64, usize)> {
    let mut found = Vec::new();
    let is_part = |c: char| c.is_ascii_digit() || matches!(c, ',' | '.');
    let mut before = ' ';
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        if !first.is_ascii_digit() || before.is_alphanumeric() || before == '_' || before == '.' {
            before = first;
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let written = rest[..length].trim_end_matches([',', '.']).replace(',', "");
        let decimals = written.split_once('.').map_or(0, |(_, decimals)| decimals.len());
        // A version such as 1.2.3 cannot be parsed.
        found.extend(written.parse().ok().map(|number| (number, decimals)));
        before = '0';
        rest = &rest[length..];
    }
    found
}

/// The text without its `code spans`.
fn plain(text: &str) -> String {
    text.split('`').step_by(2).collect()
}

/// What is wrong with the figures of a cell: they stand in no table that it names.
fn figure_complaint(cell: &str) -> Option<String> {
    let named =
        code_spans(cell).into_iter().filter(|span| span.starts_with("bench/") && span.ends_with(".md"));
    let tables: Vec<String> = named.map(|span| text(&root().join(span))).collect();
    let said = plain(cell);
    if tables.is_empty() {
        let measured = MEASURED.iter().find(|unit| {
            said.match_indices(*unit)
                .any(|(at, _)| said[..at].trim_end().ends_with(|c: char| c.is_ascii_digit()))
        });
        return measured.map(|unit| format!("a figure in '{unit}' names no table of bench/"));
    }
    let known: Vec<f64> = tables.iter().flat_map(|table| numbers(table)).map(|(number, _)| number).collect();
    let is_known = |number: f64, decimals: usize| {
        let half = 0.5 * 10_f64.powi(-i32::try_from(decimals).unwrap_or(0));
        known.iter().any(|known| (known - number).abs() <= half + 1e-9)
    };
    let strange = numbers(&said).into_iter().find(|(number, decimals)| !is_known(*number, *decimals));
    strange.map(|(number, _)| format!("the tables that it names do not have {number}"))
}

/// What is wrong with a code span that a reader is to type, or to run as the head of the page says.
fn typing_complaint(span: &str) -> Option<String> {
    let mut words = span.split_whitespace();
    let first = words.next().unwrap_or_default();
    let program = match first {
        "make" | "cargo" => return None,
        "sidetrack" => "crates/sidetrack/src",
        "sidetrack-lab" => "crates/lab/src",
        _ => return path_complaint(first),
    };
    let words: Vec<&str> = words.collect();
    // These do nothing, or not what the row says, without a file or a running process.
    let alone = matches!(words.as_slice(), ["check" | "explain" | "graph" | "flows" | "shunt" | "profile"]);
    if first == "sidetrack" && (alone || words == ["policy", "plan"]) {
        return Some(format!("'{span}' needs more words: a reader types it as it stands"));
    }
    let files = words.iter().filter(|word| word.starts_with("examples/"));
    let missing = files.into_iter().find(|word| !root().join(word).exists());
    missing.map(|word| format!("there is no {word}")).or_else(|| option_complaint(program, &words))
}

/// Options and their values stand in the sources of the program.
fn option_complaint(program: &str, words: &[&str]) -> Option<String> {
    let sources = crate::source::sources(program);
    let knows = |word: &str| sources.iter().any(|source| source.text.contains(word));
    for pair in words.windows(2) {
        let [option, value] = pair else { continue };
        let Some(name) = option.strip_prefix("--") else { continue };
        if !knows(&format!("{}:", name.replace('-', "_"))) {
            return Some(format!("{program} has no option {option}"));
        }
        let is_variant = || knows(&format!("    {}{},", value[..1].to_uppercase(), &value[1..]));
        let is_place = value.chars().all(|c| c.is_ascii_uppercase());
        if !is_place && !knows(&format!("\"{value}\"")) && !is_variant() {
            return Some(format!("{program} does not know {option} {value}"));
        }
    }
    None
}

/// A path is one of a test or of an example.
fn path_complaint(span: &str) -> Option<String> {
    let (path, test) = span.split_once("::").unwrap_or((span, ""));
    let parts: Vec<&str> = path.split('/').collect();
    let is_shown = match parts.as_slice() {
        ["examples", _, "run.sh"] => true,
        ["crates", _, "src", ..] => !test.is_empty(),
        ["crates", _, "tests", file] => file.ends_with(".rs"),
        ["crates", name, "tests", folder, file] => {
            let main = root().join(format!("crates/{name}/tests/{folder}/main.rs"));
            let module = file.trim_end_matches(".rs");
            main.exists() && (module == "main" || text(&main).contains(&format!("mod {module};")))
        }
        _ => false,
    };
    (!is_shown).then(|| format!("'{span}' is nothing that the head of the page says how to run"))
}

#[test]
fn each_row_is_shown_by_something_that_a_reader_can_type() {
    let rows = rows();
    let wrong: Vec<String> = rows
        .iter()
        .flat_map(|row| {
            code_spans(&row.cells[3]).into_iter().map(|span| (row.line, span)).collect::<Vec<_>>()
        })
        .filter_map(|(line, span)| typing_complaint(span).map(|why| format!("{DOCUMENT}:{line}: {why}")))
        .collect();
    assert!(rows.len() > 150 && wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_measured_figure_stands_in_a_committed_table() {
    let rows = rows();
    let complaint =
        |row: &Row| figure_complaint(&row.cells[4]).map(|why| format!("{DOCUMENT}:{}: {why}", row.line));
    let wrong: Vec<String> = rows.iter().filter_map(complaint).collect();
    assert!(rows.len() > 150 && wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_row_is_built() {
    let open = |row: &&Row| row.cells.iter().any(|cell| cell.contains("not yet"));
    let lines: Vec<usize> = rows().iter().filter(open).map(|row| row.line).collect();
    assert!(lines.is_empty(), "{DOCUMENT}: rows that are not built: {lines:?}");
}

#[test]
fn figures_and_commands_that_are_wrong_are_found() {
    assert_eq!(numbers("at 1,234.5, v6 and 0.98; 1.2.3 no"), [(1234.5, 1), (0.98, 2)]);
    for bad in ["83 per second", "99,999,999 of them (`bench/ENGINE.md`)"] {
        assert!(figure_complaint(bad).is_some(), "{bad}");
    }
    assert_eq!(figure_complaint("at most 20 ms later, over 500 Mbit/s"), None);
    for bad in [
        "docs/engine.md",
        "crates/core/src/engine/timer.rs",
        "crates/core/tests/engine/nothing.rs",
        "sidetrack check",
        "sidetrack check -c examples/nothing.toml",
        "sidetrack-lab engine --part nothing",
        "sidetrack-lab engine --nothing core",
    ] {
        assert!(typing_complaint(bad).is_some(), "{bad}");
    }
    for good in
        ["sidetrack-lab engine --part overload", "sidetrack-lab overlay --only area", "examples/shunt/run.sh"]
    {
        assert_eq!(typing_complaint(good), None, "{good}");
    }
}
