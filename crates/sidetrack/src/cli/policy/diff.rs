//! The difference of two texts, line by line.

use std::fmt::Write as _;

/// Unchanged lines that are shown before and after a change.
const AROUND: usize = 2;
/// Most pairs of lines that are compared. Larger texts are shown as replaced between their common beginning and end.
const PAIRS_MAX: usize = 16 << 20;

/// What happened to a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Stays,
    Goes,
    Comes,
}

/// Returns the difference: each removed line after `-`, each new one after `+`, and a few unchanged ones around them. Empty if
/// the texts are the same.
pub(super) fn diff(old: &str, new: &str) -> String {
    let (old, new): (Vec<_>, Vec<_>) = (old.lines().collect(), new.lines().collect());
    let same = old.iter().zip(&new).take_while(|(a, b)| a == b).count();
    let (old_rest, new_rest) = (&old[same..], &new[same..]);
    let tail = old_rest.iter().rev().zip(new_rest.iter().rev()).take_while(|(a, b)| a == b).count();
    let middle = between(&old_rest[..old_rest.len() - tail], &new_rest[..new_rest.len() - tail]);
    let mut lines: Vec<_> = old[..same].iter().map(|line| (Fate::Stays, *line)).collect();
    lines.extend(middle);
    lines.extend(old[old.len() - tail..].iter().map(|line| (Fate::Stays, *line)));
    shown(&lines)
}

/// Compares what is between the common beginning and the common end: the longest common subsequence stays.
fn between<'t>(old: &[&'t str], new: &[&'t str]) -> Vec<(Fate, &'t str)> {
    let gone = |lines: &[&'t str]| lines.iter().map(|line| (Fate::Goes, *line)).collect::<Vec<_>>();
    let come = |lines: &[&'t str]| lines.iter().map(|line| (Fate::Comes, *line)).collect::<Vec<_>>();
    if old.len().saturating_mul(new.len()) > PAIRS_MAX {
        return [gone(old), come(new)].concat();
    }
    // longest[i * width + j]: the length for old[i..] and new[j..].
    let width = new.len() + 1;
    let mut longest = vec![0_u32; (old.len() + 1) * width];
    for i in (0..old.len()).rev() {
        for j in (0..new.len()).rev() {
            longest[i * width + j] = if old[i] == new[j] {
                longest[(i + 1) * width + j + 1] + 1
            } else {
                longest[(i + 1) * width + j].max(longest[i * width + j + 1])
            };
        }
    }
    let (mut i, mut j, mut lines) = (0, 0, Vec::new());
    while i < old.len() && j < new.len() {
        if old[i] == new[j] {
            lines.push((Fate::Stays, old[i]));
            (i, j) = (i + 1, j + 1);
        } else if longest[(i + 1) * width + j] >= longest[i * width + j + 1] {
            lines.push((Fate::Goes, old[i]));
            i += 1;
        } else {
            lines.push((Fate::Comes, new[j]));
            j += 1;
        }
    }
    lines.extend(gone(&old[i..]));
    lines.extend(come(&new[j..]));
    lines
}

/// Prints the changed lines with those around them.
fn shown(lines: &[(Fate, &str)]) -> String {
    let is_near = |at: usize| {
        let around = at.saturating_sub(AROUND)..lines.len().min(at + AROUND + 1);
        lines[around].iter().any(|(fate, _)| *fate != Fate::Stays)
    };
    let (mut out, mut skipped) = (String::new(), false);
    for (at, (fate, line)) in lines.iter().enumerate() {
        if !is_near(at) {
            skipped = true;
            continue;
        }
        if std::mem::take(&mut skipped) {
            out.push_str("...\n");
        }
        let sign = match fate {
            Fate::Stays => ' ',
            Fate::Goes => '-',
            Fate::Comes => '+',
        };
        // Writing to a text cannot fail.
        let _ = writeln!(out, "{sign} {line}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn changed_lines_are_shown_with_those_around_them() {
        let old = "a\nb\nc\nd\ne\nf\ng\n";
        assert_eq!(diff(old, old), "");
        assert_eq!(diff(old, &old.replace("d\n", "D\nx\n")), "...\n  b\n  c\n- d\n+ D\n+ x\n  e\n  f\n");
        assert_eq!(diff("", "a\n"), "+ a\n");
        assert_eq!(diff("a\nb\n", "b\n"), "- a\n  b\n");
    }

    proptest! {
        #[test]
        fn both_texts_can_be_made_of_it(old in "([abc]\n){0,9}", new in "([abc]\n){0,9}") {
            let (before, after): (Vec<_>, Vec<_>) = (old.lines().collect(), new.lines().collect());
            let lines = between(&before, &after);
            let kept = |gone: Fate| lines.iter().filter(|(fate, _)| *fate != gone).map(|(_, line)| *line).collect::<Vec<_>>();
            prop_assert_eq!(kept(Fate::Comes), before);
            prop_assert_eq!(kept(Fate::Goes), after);
        }
    }
}
