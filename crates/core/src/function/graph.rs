//! Drawings of chains: the functions that flows of a rule pass, with the branches and where they merge.
//!
//! Four forms: `dot` for Graphviz, `mermaid` for Markdown pages, SVG, and text.

mod svg;

use super::{ArmSpec, FunctionKind, FunctionSpec};
use std::fmt::Write;
use std::sync::Arc;

/// What flows pass: a label of the start (the rule), the functions, and a label of the end (the carrier).
#[derive(Clone, Copy, Debug)]
pub struct Way<'a> {
    /// The rule, with its conditions.
    pub start: &'a str,
    /// The functions, in order from the client to the server.
    pub functions: &'a [Arc<FunctionSpec>],
    /// How flows are carried on.
    pub end: &'a str,
}

/// The nodes and edges of several ways. Every function of a way has its own node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Graph {
    nodes: Vec<Node>,
    edges: Vec<Edge>,
}

/// One node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The text in it.
    pub label: String,
    /// What it stands for.
    pub shape: Shape,
}

/// What a node stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// The start or the end of a way.
    End,
    /// A function.
    Function,
    /// A branch.
    Branch,
}

/// One edge, from the client to the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The number of the node nearer to the client.
    pub from: usize,
    /// The number of the node nearer to the server.
    pub to: usize,
    /// The condition of an arm.
    pub label: Option<String>,
}

/// An edge that waits for its end: the node, and the condition.
type Loose = (usize, Option<String>);

impl Graph {
    /// Makes the graph of these ways.
    pub fn new(ways: &[Way<'_>]) -> Self {
        let mut graph = Self::default();
        for way in ways {
            let start = graph.node(way.start.to_owned(), Shape::End);
            let loose = graph.functions(vec![(start, None)], way.functions);
            let end = graph.node(way.end.to_owned(), Shape::End);
            graph.join(loose, end);
        }
        graph
    }

    /// Returns the nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the edges.
    pub fn edges(&self) -> &[Edge] {
        &self.edges
    }

    fn node(&mut self, label: String, shape: Shape) -> usize {
        self.nodes.push(Node { label, shape });
        self.nodes.len() - 1
    }

    fn join(&mut self, loose: Vec<Loose>, to: usize) {
        self.edges.extend(loose.into_iter().map(|(from, label)| Edge { from, to, label }));
    }

    fn functions(&mut self, mut loose: Vec<Loose>, functions: &[Arc<FunctionSpec>]) -> Vec<Loose> {
        for function in functions {
            let is_branch = matches!(function.kind, FunctionKind::Branch(_));
            let shape = if is_branch { Shape::Branch } else { Shape::Function };
            let node = self.node(title(function), shape);
            self.join(std::mem::take(&mut loose), node);
            let FunctionKind::Branch(branch) = &function.kind else {
                loose.push((node, None));
                continue;
            };
            for arm in &branch.arms {
                loose.extend(self.functions(vec![(node, Some(condition(arm)))], &arm.functions));
            }
            if !branch.arms.iter().any(takes_all) {
                loose.push((node, Some("otherwise".to_owned())));
            }
        }
        loose
    }

    /// Writes the graph for Graphviz (the DOT language).
    pub fn to_dot(&self) -> String {
        let mut text = "digraph sidetrack {\n  rankdir=LR;\n".to_owned();
        for (index, node) in self.nodes.iter().enumerate() {
            let shape = match node.shape {
                Shape::End => "oval",
                Shape::Function => "box",
                Shape::Branch => "diamond",
            };
            let _ = writeln!(text, "  n{index} [shape={shape}, label=\"{}\"];", dot(&node.label));
        }
        for Edge { from, to, label } in &self.edges {
            let label = label.as_ref().map_or(String::new(), |label| format!(" [label=\"{}\"]", dot(label)));
            let _ = writeln!(text, "  n{from} -> n{to}{label};");
        }
        text + "}\n"
    }

    /// Writes the graph as a Mermaid flow chart.
    pub fn to_mermaid(&self) -> String {
        let mut text = "flowchart LR\n".to_owned();
        for (index, node) in self.nodes.iter().enumerate() {
            let (open, close) = match node.shape {
                Shape::End => ("([", "])"),
                Shape::Function => ("[", "]"),
                Shape::Branch => ("{", "}"),
            };
            let _ = writeln!(text, "  n{index}{open}\"{}\"{close}", mermaid(&node.label));
        }
        for Edge { from, to, label } in &self.edges {
            let label = label.as_ref().map_or(String::new(), |label| format!("|\"{}\"|", mermaid(label)));
            let _ = writeln!(text, "  n{from} -->{label} n{to}");
        }
        text
    }
}

/// Writes ways as indented text, one line for each function.
pub fn to_text(ways: &[Way<'_>]) -> String {
    let mut text = String::new();
    for way in ways {
        let _ = writeln!(text, "{}", way.start);
        lines(&mut text, 1, way.functions);
        let _ = writeln!(text, "  => {}", way.end);
    }
    text
}

fn lines(text: &mut String, depth: usize, functions: &[Arc<FunctionSpec>]) {
    for function in functions {
        let _ = writeln!(text, "{:1$}{2}", "", 2 * depth, title(function));
        let FunctionKind::Branch(branch) = &function.kind else { continue };
        for arm in &branch.arms {
            let straight = if arm.functions.is_empty() { ": straight on" } else { "" };
            let _ = writeln!(text, "{:1$}| {2}{straight}", "", 2 * depth, condition(arm));
            lines(text, depth + 2, &arm.functions);
        }
        if !branch.arms.iter().any(takes_all) {
            let _ = writeln!(text, "{:1$}| otherwise: straight on", "", 2 * depth);
        }
    }
}

fn title(function: &FunctionSpec) -> String {
    format!("{} ({})", function.name, function.kind.as_str())
}

fn takes_all(arm: &ArmSpec) -> bool {
    arm.matcher.conditions().is_empty() && arm.prefixes.is_empty()
}

/// Returns the name of an arm and its conditions in words.
fn condition(arm: &ArmSpec) -> String {
    let conditions = arm.matcher.conditions().iter().map(ToString::to_string);
    let prefixes: Vec<_> =
        arm.prefixes.iter().map(|prefix| format!("{:?}", String::from_utf8_lossy(prefix))).collect();
    let bytes = (!prefixes.is_empty()).then(|| format!("begins with {}", prefixes.join(" or ")));
    let all: Vec<_> = conditions.chain(bytes).collect();
    let all = if all.is_empty() { "all others".to_owned() } else { all.join(", ") };
    format!("{}: {all}", arm.name)
}

fn dot(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

fn mermaid(text: &str) -> String {
    text.replace('#', "#35;").replace('"', "#quot;")
}
