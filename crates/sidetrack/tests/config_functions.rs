//! `[function.NAME]` and `chain`: what is refused, and in which words.

use sidetrack::config::Config;

fn error(text: &str) -> String {
    let text = format!(
        "version = 1\ndefault = 'deny'\n[[listen]]\nkind = 'socks'\naddress = '127.0.0.1:1080'\n{text}"
    );
    Config::from_text("test.toml", &text).expect_err("it is wrong").render(false)
}

fn says(text: &str, words: &[&str]) {
    let error = error(text);
    for word in words {
        assert!(error.contains(word), "{word} is not in\n{error}");
    }
}

#[test]
fn functions_say_what_is_missing_or_too_much() {
    says("[function.a]\n", &["does not say what it does", "kind = \"count\""]);
    says("[function.a]\nkind = 'cuont'\n", &["`cuont` is none of the words", "did you mean `count`?"]);
    says("[function.a]\nkind = 'count'\nburst_bytes = 5\n", &["`burst_bytes` means nothing with this kind"]);
    says("[function.a]\nkind = 'limit'\n", &["has to say how much", "bytes_per_second"]);
    says("[function.a]\nkind = 'limit'\nbytes_per_second = 0\n", &["0 is out of range"]);
    says("[function.a]\nkind = 'filter'\n", &["has to say what it refuses"]);
    says("[function.a]\nkind = 'filter'\ndeny_words = ['']\n", &["an empty word would be found everywhere"]);
    says("[function.a]\nkind = 'filter'\ndeny_hosts = []\n", &["this list is empty"]);
    says("[function.a]\nkind = 'replace'\n", &["nothing is to be replaced"]);
    says("[function.a]\nkind = 'replace'\nreplace = [{ find = 'x' }]\n", &["needs both `find` and `with`"]);
    says("[function.a]\nkind = 'encrypt'\n", &["encryption needs a key", "openssl rand -hex 32"]);
    says("[function.'a b']\nkind = 'count'\n", &["'a b' is not a valid name"]);
    says("[function.a]\nkind = 'count'\nfoo = 1\n", &["unknown key `foo` in [function.a]"]);
}

#[test]
fn a_container_is_root_only_by_that_word() {
    let container =
        |user: &str| format!("[function.a]\nkind = 'container'\nimage = 'f:1'\nuser = '{user}'\n");
    says(&container("0:0"), &["the user id 0 is root", "user = \"root\""]);
    says(&container("nobody"), &["a container's user is \"UID:GID\" in numbers", "user = \"65534:65534\""]);
    says("[function.a]\nkind = 'count'\nuser = '1:1'\n", &["`user` means nothing with this kind"]);
}

#[test]
fn keys_are_read_from_files_and_never_shown() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "5ec2e7 is no key\n").expect("a file");
    let text = format!("[function.a]\nkind = 'decrypt'\nkey_file = '{}'\n", file.path().display());
    says(&text, &["is not a key", "64 hexadecimal digits"]);
    assert!(!error(&text).contains("5ec2e7"));
}

#[test]
fn chains_name_functions_that_exist() {
    let rule = "[[rule]]\nname = 'r'\ncarrier = 'direct'\n";
    let function = "[function.audit]\nkind = 'count'\n";
    says(
        &format!("{rule}chain = ['audti']\n{function}"),
        &["there is no function 'audti'", "did you mean \"audit\"?"],
    );
    says(&format!("{rule}chain = []\n{function}"), &["a chain of 0 functions"]);
    says(&format!("{rule}chain = 'x'\n"), &["there is no function 'x'", "[function.x]"]);
    says(&format!("{rule}on_chain_change = 'cut'\n"), &["`on_chain_change` is about a chain"]);
    says(
        &format!("[[rule]]\nname = 'r'\naction = 'deny'\nchain = ['audit']\n{function}"),
        &["`chain` means nothing in a rule that denies"],
    );
}

/// Found when the file is read, and not by the first flow.
#[test]
fn containers_are_refused_where_a_packet_engine_would_have_to_lead_through_them() {
    let engine = "[[listen]]\nname = 'wire'\nkind = 'engine'\ninterfaces = ['lo']\naddress = '192.0.2.1:80'\nto = '192.0.2.2:80'\n\
                  engine = { sources = ['192.0.2.1'] }\n";
    let functions = "[function.audit]\nkind = 'container'\nimage = 'localhost/audit:1'\n[function.count]\nkind = 'count'\n";
    let rule = |name: &str, rest: &str| format!("[[rule]]\nname = '{name}'\ncarrier = 'direct'\n{rest}\n");
    let led = "chain = ['count', 'audit']\non_function_down = 'deny'\n";
    let file = |rules: &str| format!("{engine}{rules}{functions}");
    let words = [
        "'audit' is a container",
        "engine listener 'wire'",
        "chain = ['count', 'audit']",
        "no sockets",
        "add `listener`",
    ];
    says(&file(&rule("all", led)), &words);
    says(&file(&rule("all", &format!("match = {{ listener = ['wire'] }}\n{led}"))), &words);
    let right = |rules: &str| {
        let text = format!(
            "version = 1\ndefault = 'deny'\n[[listen]]\nname = 'socks'\nkind = 'socks'\naddress = '127.0.0.1:1080'\n{}",
            file(rules)
        );
        Config::from_text("test.toml", &text)
            .map_err(|error| error.render(false))
            .expect("a right configuration")
    };
    right(&rule("all", "chain = ['count']\n"));
    right(&rule("all", &format!("match = {{ listener = 'socks' }}\n{led}")));
    right(&rule("all", &format!("match = {{ intercept = 'socks' }}\n{led}")));
    // An earlier rule takes all of the engine's flows.
    right(&format!("{}{}", rule("wire", "match = { intercept = 'engine' }\n"), rule("all", led)));
}

#[test]
fn a_rule_with_a_chain_is_never_left_to_the_kernel_and_says_so() {
    let text = "version = 1\ndefault = 'deny'\n[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '192.0.2.1:80'\n\
                to = '192.0.2.2:80'\n[[rule]]\nname = 'r'\ncarrier = 'direct'\n";
    let plain = Config::from_text("test.toml", text).expect("a right configuration");
    assert_eq!(plain.kernel_paths(&plain.listeners[0]).len(), 1);
    let text = format!("{text}chain = ['audit']\n[function.audit]\nkind = 'count'\n");
    let chained = Config::from_text("test.toml", &text).expect("a right configuration");
    assert!(chained.kernel_paths(&chained.listeners[0]).is_empty());
    let flow = sidetrack_core::flow::Flow {
        protocol: sidetrack_core::flow::Protocol::Tcp,
        intercept: sidetrack_core::flow::Intercept::Reverse,
        listener: "in".into(),
        client: "192.0.2.9:1".parse().expect("an address"),
        orig_dst: "192.0.2.2:80".parse().expect("a destination"),
        host: None,
        process: None,
        user: None,
    };
    let summary = chained.policy.explain(&flow, None).verdict.summary();
    assert_eq!(summary, "carried direct through audit (rule 'r')");
}

/// A branch with these arms, and functions for them.
fn branch(arms: &str) -> String {
    format!("[function.audit]\nkind = 'count'\n[function.way]\nkind = 'branch'\narms = [{arms}]\n")
}

#[test]
fn branches_say_which_arm_is_wrong() {
    says("[function.a]\nkind = 'branch'\n", &["a branch needs arms", "chain = ["]);
    says(&branch("{ chain = ['audit'] }"), &["this arm lacks a name"]);
    says(&branch("{ name = 'x' }"), &["the arm 'x' lacks its `chain`", "chain = []"]);
    says(&branch("{ name = 'x', chain = ['audti'] }"), &["there is no function 'audti'", "\"audit\""]);
    says(&branch("{ name = 'x', prefix = [''], chain = [] }"), &["a prefix of 0 bytes"]);
    says(&branch("{ name = 'x', match = { process = 'curl' }, chain = [] }"), &["no condition `process`"]);
    says(
        &format!(
            "{}[function.box]\nkind = 'container'\nimage = 'f:1'\n",
            branch("{ name = 'x', chain = ['box'] }")
        ),
        &["'box' is a container, which cannot be in an arm"],
    );
    says("[function.a]\nkind = 'count'\narms = []\n", &["`arms` means nothing with this kind"]);
}

#[test]
fn branches_that_lead_to_themselves_are_refused() {
    let branch = |name: &str, to: &str| {
        format!("[function.{name}]\nkind = 'branch'\narms = [{{ name = 'x', chain = ['{to}'] }}]\n")
    };
    says(&branch("a", "a"), &["the branch 'a' leads to itself: a -> a"]);
    let cycle = format!("{}{}{}", branch("a", "b"), branch("b", "c"), branch("c", "b"));
    says(&cycle, &["the branch 'b' leads to itself: b -> c -> b"]);
    assert_eq!(error(&cycle).matches("leads to itself").count(), 1, "each cycle once");
    // A branch in a branch is none.
    let text = format!(
        "version = 1\ndefault = 'deny'\n[[listen]]\nkind = 'socks'\naddress = '127.0.0.1:1080'\n{}{}\
         [function.d]\nkind = 'count'\n[[rule]]\nname = 'r'\ncarrier = 'direct'\nchain = ['a', 'd']\n",
        branch("a", "b"),
        branch("b", "d")
    );
    Config::from_text("test.toml", &text).expect("it is right");
}

#[test]
fn arms_that_no_flow_takes_are_refused() {
    let never = ["no flow takes the arm 'b': the arm 'a' before it takes all of its flows", "put it first"];
    for (first, second) in [
        ("", "prefix = 'GET '"),
        ("", ""),
        ("match = { host = '*.example' }", "match = { host = 'a.example' }, prefix = 'GET '"),
        ("match = { to = '10.0.0.0/8' }", "match = { to = '10.1.0.0/16', port = 80 }"),
        ("prefix = 'GE'", "prefix = ['GET ', 'GEX ']"),
    ] {
        let arm = |name: &str, keys: &str| {
            let comma = if keys.is_empty() { "" } else { ", " };
            format!("{{ name = '{name}'{comma}{keys}, chain = [] }}")
        };
        says(&branch(&format!("{}, {}", arm("a", first), arm("b", second))), &never);
    }
}
