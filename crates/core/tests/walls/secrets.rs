//! Secrets are compared by `core::secret` only: `==` tells by its duration where two texts differ.

use crate::source::sources;

/// Names of what a peer must not be able to guess byte by byte.
const SECRETS: [&str; 9] =
    ["password", "passwd", "secret", "token", "api_key", "bearer", "credential", "credentials", "htpasswd"];

/// The one room that compares them.
const ROOM: &str = "crates/core/src/secret.rs";

/// Names that mean something else: a number of a request (SOCKS6), a word of an expression.
const OTHERS: [&str; 2] = ["token_accepted", "token.kind"];

/// The expression that ends where `code` does: names, fields, calls without arguments, references.
fn before(code: &str) -> &str {
    let fits = |c: char| c.is_alphanumeric() || "_.()&*:".contains(c);
    let code = code.trim_end();
    let start =
        code.rfind(|c| !fits(c)).map_or(0, |at| at + code[at..].chars().next().map_or(1, char::len_utf8));
    &code[start..]
}

/// The expression that `code` begins with.
fn after(code: &str) -> &str {
    let fits = |c: char| c.is_alphanumeric() || "_.()&*:".contains(c);
    let code = code.trim_start();
    &code[..code.find(|c| !fits(c)).unwrap_or(code.len())]
}

/// Whether an expression is a secret: one of its names is that of one, and it is not a constant of a module.
fn is_secret(expression: &str) -> bool {
    let mut parts = expression.split(['.', '(', ')', '&', '*']).filter(|part| !part.is_empty());
    // Its length, and whether there is one, are not secret.
    let is_about =
        [".len()", ".is_some()", ".is_none()", ".is_empty()"].iter().any(|end| expression.ends_with(end));
    !is_about
        && !OTHERS.iter().any(|other| expression.contains(other))
        && parts.any(|part| !part.contains("::") && SECRETS.contains(&part))
}

/// The comparisons of secrets in a text of code, as offsets.
fn comparisons(code: &str) -> Vec<usize> {
    let operators = code.match_indices("==").chain(code.match_indices("!="));
    let by_operator = operators.filter(|(at, operator)| {
        is_secret(before(&code[..*at])) || is_secret(after(&code[at + operator.len()..]))
    });
    let methods = [".eq(", ".ne(", ".cmp(", ".eq_ignore_ascii_case(", ".starts_with("];
    let calls = methods.iter().flat_map(|method| code.match_indices(method));
    let by_method = calls.filter(|(at, method)| {
        is_secret(before(&code[..*at])) || is_secret(after(&code[at + method.len()..]))
    });
    by_operator.chain(by_method).map(|(at, _)| at).collect()
}

#[test]
fn secrets_are_compared_in_one_room_only() {
    let mut found = Vec::new();
    for folder in ["crates/common/src", "crates/control/src", "crates/core/src", "crates/sidetrack/src"] {
        for source in sources(folder).iter().filter(|source| source.path != ROOM) {
            found.extend(comparisons(&source.code).into_iter().map(|at| source.place(at)));
        }
    }
    assert!(
        found.is_empty(),
        "compare with sidetrack_core::secret::same, which takes the same time always:\n{}",
        found.join("\n")
    );
}

#[test]
fn a_comparison_of_secrets_is_seen() {
    for bad in [
        "if given == self.password {",
        "account.password.as_bytes() != given",
        "users.iter().any(|one| one.user == user && &one.password == password)",
        "settings.token.as_deref().eq(given)",
        "one.eq(&settings.secret)",
        "header == &*config.api_key",
    ] {
        assert!(!comparisons(bad).is_empty(), "{bad}");
    }
    for good in [
        "if version == password::VERSION {",
        "password.len() == 3",
        "report.token_accepted == Some(true)",
        "method != password::METHOD_NONE",
        "same(password, given)",
        "user == other",
    ] {
        assert!(comparisons(good).is_empty(), "{good}");
    }
}
