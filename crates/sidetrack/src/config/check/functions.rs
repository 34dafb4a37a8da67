//! `[function.NAME]`, and `chain` of rules.

use super::super::nearest;
use super::super::raw::function::{Direction, Kind, Share as RawShare};
use super::super::{At, List, raw};
use super::Check;
use sidetrack_core::function::{
    ChainSpec, Directions, FilterSpec, FunctionKind, FunctionSpec, Key, LimitSpec, OnChange, OnDown,
    Replacement, Replacements, Share, Words,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Most functions of one chain.
pub(super) const CHAIN_MAX: usize = 16;
/// Largest bandwidth and burst, bytes.
const BYTES_MAX: u64 = 1_000_000_000_000;
/// A key, its place if it is given, and the kinds of function that have it.
type KnownBy<'k> = (&'k str, Option<Range<usize>>, &'k [Kind]);

/// Longest replacement text, bytes.
const REPLACEMENT_MAX: usize = 1024;

impl Check<'_> {
    /// Reads all functions. Rules are checked afterwards and refer to them.
    pub(super) fn read_functions(&mut self, functions: &BTreeMap<String, At<raw::Function>>) {
        for (name, function) in functions {
            let at = At::new(name.clone(), function.span());
            self.name(&at);
            if matches!(function.kind.as_deref(), Some(Kind::Branch)) {
                // Its arms name other functions, so it comes after them.
                self.stray_keys(function, Kind::Branch);
                continue;
            }
            let kind = self.function_kind(function);
            let spec = kind.map(|kind| Arc::new(FunctionSpec { name: name.as_str().into(), kind }));
            self.functions.insert(name.clone(), spec);
        }
        self.read_branches(functions);
    }

    fn function_kind(&mut self, function: &At<raw::Function>) -> Option<FunctionKind> {
        let Some(kind) = &function.kind else {
            let help = "write `kind = \"count\"`, \"limit\", \"filter\", \"replace\", \"encrypt\", \"decrypt\", \"wasm\", \"branch\" or \"container\"";
            self.error(function.span(), "this function does not say what it does", help);
            return None;
        };
        self.stray_keys(function, **kind);
        match **kind {
            Kind::Count => Some(FunctionKind::Count),
            Kind::Limit => self.limit(function).map(FunctionKind::Limit),
            Kind::Filter => self.filter(function).map(FunctionKind::Filter),
            Kind::Replace => self.replacements(function).map(FunctionKind::Replace),
            Kind::Encrypt => self.key(function).map(FunctionKind::Encrypt),
            Kind::Decrypt => self.key(function).map(FunctionKind::Decrypt),
            Kind::Wasm => self.wasm(function).map(|wasm| FunctionKind::Wasm(Box::new(wasm))),
            // Read after all others.
            Kind::Branch => None,
            Kind::Container => {
                self.container(function).map(|container| FunctionKind::Container(Box::new(container)))
            }
        }
    }

    /// Reports keys that this kind of function does not have.
    fn stray_keys(&mut self, function: &raw::Function, kind: Kind) {
        const CONTAINER: &[Kind] = &[Kind::Container];
        fn at<T>(at: &Option<At<T>>) -> Option<Range<usize>> {
            at.as_ref().map(At::span)
        }
        fn list<T>(list: &Option<List<T>>) -> Option<Range<usize>> {
            list.as_ref().map(List::span)
        }
        let keys: [KnownBy<'_>; 33] = [
            ("module", at(&function.module), &[Kind::Wasm]),
            ("configuration", at(&function.configuration), &[Kind::Wasm]),
            ("fuel", at(&function.fuel), &[Kind::Wasm]),
            ("arms", list(&function.arms), &[Kind::Branch]),
            ("direction", at(&function.direction), &[Kind::Limit, Kind::Filter, Kind::Replace]),
            ("bytes_per_second", at(&function.bytes_per_second), &[Kind::Limit]),
            ("burst_bytes", at(&function.burst_bytes), &[Kind::Limit]),
            ("share", at(&function.share), &[Kind::Limit]),
            ("allow_hosts", list(&function.allow_hosts), &[Kind::Filter]),
            ("deny_hosts", list(&function.deny_hosts), &[Kind::Filter]),
            ("deny_words", list(&function.deny_words), &[Kind::Filter]),
            ("ignore_case", at(&function.ignore_case), &[Kind::Filter]),
            ("replace", list(&function.replace), &[Kind::Replace]),
            ("key_file", at(&function.key_file), &[Kind::Encrypt, Kind::Decrypt]),
            ("image", at(&function.image), CONTAINER),
            ("environment", at(&function.environment), CONTAINER),
            ("speaks", at(&function.speaks), CONTAINER),
            ("port", at(&function.port), CONTAINER),
            ("way_back", at(&function.way_back), CONTAINER),
            ("instances", at(&function.instances), CONTAINER),
            ("replicas_min", at(&function.replicas_min), CONTAINER),
            ("replicas_max", at(&function.replicas_max), CONTAINER),
            ("flows_per_replica", at(&function.flows_per_replica), CONTAINER),
            ("shrink_after_ms", at(&function.shrink_after_ms), CONTAINER),
            ("memory_bytes", at(&function.memory_bytes), &[Kind::Container, Kind::Wasm]),
            ("cpu_percent", at(&function.cpu_percent), CONTAINER),
            ("pids", at(&function.pids), CONTAINER),
            ("user", at(&function.user), CONTAINER),
            ("probe", at(&function.probe), CONTAINER),
            ("probe_interval_ms", at(&function.probe_interval_ms), CONTAINER),
            ("probe_timeout_ms", at(&function.probe_timeout_ms), CONTAINER),
            ("start_timeout_ms", at(&function.start_timeout_ms), CONTAINER),
            ("command", list(&function.command), CONTAINER),
        ];
        for (key, span, kinds) in keys {
            if let Some(span) = span.filter(|_| !kinds.contains(&kind)) {
                self.error(span, format!("`{key}` means nothing with this kind of function"), "take it out");
            }
        }
    }

    fn limit(&mut self, function: &At<raw::Function>) -> Option<LimitSpec> {
        let Some(rate) = &function.bytes_per_second else {
            let help = "write `bytes_per_second = 1000000`";
            self.error(function.span(), "a limit has to say how much", help);
            return None;
        };
        let bytes_per_second = self.number(Some(rate), 1..=BYTES_MAX, " bytes a second")?;
        let burst = self.number(function.burst_bytes.as_ref(), 1..=BYTES_MAX, " bytes");
        Some(LimitSpec {
            bytes_per_second,
            burst_bytes: burst.unwrap_or(LimitSpec::usual_burst_bytes(bytes_per_second)),
            directions: directions(function),
            share: match function.share.as_deref() {
                None | Some(RawShare::Flow) => Share::Flow,
                Some(RawShare::Client) => Share::Client,
                Some(RawShare::Function) => Share::Function,
            },
        })
    }

    fn filter(&mut self, function: &At<raw::Function>) -> Option<FilterSpec> {
        let hosts = |check: &mut Self, list: &Option<List<String>>| {
            list.as_ref().map(|list| check.host_patterns(list)).unwrap_or_default()
        };
        let words = function.deny_words.as_ref();
        let spec = FilterSpec {
            allow_hosts: hosts(self, &function.allow_hosts),
            deny_hosts: hosts(self, &function.deny_hosts),
            deny_words: words.map_or_else(Vec::new, bytes),
            ignore_case: function.ignore_case.as_deref().copied().unwrap_or(false),
            directions: directions(function),
        };
        if let Some(list) = words {
            self.not_empty(list);
            if let Err(error) = Words::new(&spec.deny_words, spec.ignore_case) {
                self.error(list.span(), error.to_string(), "give words of 1 to 1024 bytes");
            }
        } else if function.allow_hosts.is_none() && function.deny_hosts.is_none() {
            let help = "give `allow_hosts`, `deny_hosts` or `deny_words`";
            self.error(function.span(), "a filter has to say what it refuses", help);
        }
        Some(spec)
    }

    fn replacements(&mut self, function: &At<raw::Function>) -> Option<Vec<Replacement>> {
        let Some(list) = function.replace.as_ref().filter(|list| !list.items().is_empty()) else {
            let help = "write `replace = [{ find = \"old\", with = \"new\" }]`";
            self.error(function.span(), "nothing is to be replaced", help);
            return None;
        };
        let mut all = Vec::new();
        for item in list.items() {
            let (Some(find), Some(with)) = (&item.find, &item.with) else {
                self.error(
                    item.span(),
                    "this needs both `find` and `with`",
                    "with = \"\" takes the word out",
                );
                continue;
            };
            if with.len() > REPLACEMENT_MAX {
                let message = format!("`with` has {} bytes", with.len());
                self.error(item.span(), message, format!("at most {REPLACEMENT_MAX} bytes"));
            }
            let (find, replace) = (find.as_bytes().to_vec(), with.as_bytes().to_vec());
            let replacement = Replacement { find, replace, directions: directions(function) };
            if let Err(error) = Replacements::new(std::slice::from_ref(&replacement)) {
                self.error(item.span(), error.to_string(), "give a word of 1 to 1024 bytes");
            }
            all.push(replacement);
        }
        if let Err(error) = Replacements::new(&all) {
            self.error(list.span(), error.to_string(), "take some out");
        }
        Some(all)
    }

    fn key(&mut self, function: &At<raw::Function>) -> Option<Key> {
        let Some(file) = &function.key_file else {
            let help = "write `key_file = \"seal.key\"`; `openssl rand -hex 32 > seal.key` makes one, both ends need it";
            self.error(function.span(), "encryption needs a key", help);
            return None;
        };
        let lines = self.secret_lines(file, file.span())?;
        match Key::from_hex(lines.first().map_or("", String::as_str)) {
            Ok(key) => Some(key),
            Err(error) => {
                let message = format!("the first line of '{}' is not a key", file.as_str());
                self.error(file.span(), message, error.to_string());
                None
            }
        }
    }

    /// Checks the chain of a rule.
    pub(super) fn chain(&mut self, rule: &raw::Rule) -> Option<Arc<ChainSpec>> {
        let Some(names) = &rule.chain else {
            self.chainless(rule);
            return None;
        };
        if names.items().is_empty() || names.items().len() > CHAIN_MAX {
            let help = format!("name 1 to {CHAIN_MAX} functions, or take the key out");
            self.error(names.span(), format!("a chain of {} functions", names.items().len()), help);
            return None;
        }
        let functions: Vec<_> = names.items().iter().map(|name| self.function_named(name)).collect();
        let functions = functions.into_iter().collect::<Option<Vec<_>>>()?;
        Some(Arc::new(ChainSpec {
            on_change: match rule.on_chain_change.as_deref() {
                None | Some(raw::OnChainChange::Keep) => OnChange::Keep,
                Some(raw::OnChainChange::Cut) => OnChange::Cut,
            },
            on_down: self.on_down(rule, names, &functions)?,
            functions,
        }))
    }

    /// The file must say what happens while a container is down: there is no default.
    fn on_down(
        &mut self,
        rule: &raw::Rule,
        names: &List<String>,
        functions: &[Arc<FunctionSpec>],
    ) -> Option<OnDown> {
        let container = functions.iter().find(|function| matches!(function.kind, FunctionKind::Container(_)));
        match (rule.on_function_down.as_deref(), container) {
            (Some(raw::OnFunctionDown::Deny), _) | (None, None) => Some(OnDown::Deny),
            (Some(raw::OnFunctionDown::Skip), _) => Some(OnDown::Skip),
            (None, Some(container)) => {
                let message = format!(
                    "nothing says what happens to flows while the container of function '{}' is down",
                    container.name
                );
                let help =
                    "write `on_function_down = \"deny\"` (they are refused) or \"skip\" (they go past it)";
                self.error(names.span(), message, help);
                None
            }
        }
    }

    fn chainless(&mut self, rule: &raw::Rule) {
        let keys = [
            ("on_chain_change", rule.on_chain_change.as_ref().map(At::span)),
            ("on_function_down", rule.on_function_down.as_ref().map(At::span)),
        ];
        for (key, span) in keys {
            if let Some(span) = span {
                let help = "add `chain`, or take it out";
                self.error(span, format!("`{key}` is about a chain, and there is none"), help);
            }
        }
    }

    pub(super) fn function_named(&mut self, name: &At<String>) -> Option<Arc<FunctionSpec>> {
        if let Some(function) = self.functions.get(name.as_str()) {
            return function.clone();
        }
        let help = match nearest(name, self.functions.keys().map(String::as_str)) {
            Some(near) => format!("did you mean \"{near}\"?"),
            None => format!("write a table [function.{}] with its `kind`", name.as_str()),
        };
        self.error(name.span(), format!("there is no function '{}'", name.as_str()), help);
        None
    }
}

fn directions(function: &raw::Function) -> Directions {
    match function.direction.as_deref() {
        None | Some(Direction::Both) => Directions::Both,
        Some(Direction::Up) => Directions::Up,
        Some(Direction::Down) => Directions::Down,
    }
}

fn bytes(list: &List<String>) -> Vec<Vec<u8>> {
    list.items().iter().map(|word| word.as_bytes().to_vec()).collect()
}
