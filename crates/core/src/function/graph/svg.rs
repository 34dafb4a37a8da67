//! A drawing as SVG, in layers: each node stands to the right of all nodes that lead to it. An edge that passes a layer has a place of
//! its own there, so that it crosses no node.

use super::{Edge, Graph, Node, Shape};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Most characters of a line in a node, and of one above an edge.
const LINE_MAX: usize = 28;
/// Sizes in pixels: a character, a line, the room around a text, and the width of a node.
const CHARACTER: usize = 7;
const LINE: usize = 17;
const ROOM: usize = 12;
const WIDTH: usize = LINE_MAX * CHARACTER + 2 * ROOM;
/// Between two layers, without and with texts at the edges.
const GAP: usize = 56;
const GAP_WITH_TEXT: usize = LINE_MAX * CHARACTER + 48;
/// Between two places in a layer.
const BETWEEN: usize = 26;

/// The look, for light and dark pages.
const HEAD: &str = "<style>svg{background:#fff}text{font:13px sans-serif;fill:#111}.node{fill:#f4f4f4;stroke:#444}.branch{fill:#e8eef8}\
    .end{fill:#fff}.edge{fill:none;stroke:#444}.head{fill:#444}.arm{fill:#333;text-anchor:end}.name{text-anchor:middle}\
    @media(prefers-color-scheme:dark){svg{background:#111}text,.arm{fill:#eee}.node{fill:#222;stroke:#bbb}.branch{fill:#1d2a40}\
    .end{fill:#111}.edge{stroke:#bbb}.head{fill:#bbb}}</style>\n<defs><marker id=\"head\" markerWidth=\"9\" markerHeight=\"8\" refX=\"8\" \
    refY=\"4\" orient=\"auto\"><path class=\"head\" d=\"M0 0L9 4L0 8z\"/></marker></defs>\n";

/// What takes a place in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Item {
    Node(usize),
    /// The edge with this number passes.
    Pass(usize),
}

/// Where everything stands.
struct Layout {
    /// By node and edge: layer and row of each place.
    places: BTreeMap<(Item, usize), usize>,
    /// The layer of each node.
    layers: Vec<usize>,
    /// The upper end of each row, and the lower end of the last one, in pixels.
    tops: Vec<usize>,
    gap: usize,
}

impl Layout {
    fn of(graph: &Graph) -> Self {
        let layers = layers(graph);
        let mut columns = BTreeMap::<(usize, usize), Vec<(usize, Item)>>::new();
        let ways = ways(graph);
        for (index, way) in ways.iter().enumerate() {
            columns.entry((*way, layers[index])).or_default().push((2 * index, Item::Node(index)));
        }
        for (number, edge) in graph.edges.iter().enumerate() {
            // Where nothing is passed at an arm, the edge of a branch leads below all arms.
            let is_branch = graph.nodes[edge.from].shape == Shape::Branch;
            let order = if is_branch { 2 * edge.to - 1 } else { 2 * edge.from + 1 };
            for layer in layers[edge.from] + 1..layers[edge.to] {
                columns.entry((ways[edge.from], layer)).or_default().push((order, Item::Pass(number)));
            }
        }
        let mut rows_of_way = BTreeMap::<usize, usize>::new();
        for ((way, _), items) in &columns {
            let rows = rows_of_way.entry(*way).or_default();
            *rows = (*rows).max(items.len());
        }
        let first_row = |way: usize| rows_of_way.range(..way).map(|(_, rows)| rows).sum::<usize>();
        let mut places = BTreeMap::new();
        let mut heights = vec![0; rows_of_way.values().sum()];
        for ((way, layer), mut items) in columns {
            items.sort_unstable();
            for (row, (_, item)) in items.into_iter().enumerate() {
                let row = first_row(way) + row;
                places.insert((item, layer), row);
                heights[row] = heights[row].max(match item {
                    Item::Node(index) => height(&graph.nodes[index]),
                    Item::Pass(_) => LINE,
                });
            }
        }
        let mut tops = vec![BETWEEN];
        for height in heights {
            tops.push(tops.last().copied().unwrap_or_default() + height + BETWEEN);
        }
        let has_text = graph.edges.iter().any(|edge| edge.label.is_some());
        Self { places, layers, tops, gap: if has_text { GAP_WITH_TEXT } else { GAP } }
    }

    fn left(&self, layer: usize) -> usize {
        BETWEEN + layer * (WIDTH + self.gap)
    }

    /// The height of the middle of a place.
    fn middle(&self, item: Item, layer: usize) -> usize {
        let row = self.places.get(&(item, layer)).copied().unwrap_or_default();
        (self.tops[row] + self.tops[row + 1] - BETWEEN) / 2
    }

    /// The points of an edge: the right side of its first node, both sides of each place that it passes, and the left side of its last
    /// node.
    fn points(&self, number: usize, edge: &Edge) -> Vec<(usize, usize)> {
        let (first, last) = (self.layers[edge.from], self.layers[edge.to]);
        let mut points = vec![(self.left(first) + WIDTH, self.middle(Item::Node(edge.from), first))];
        for layer in first + 1..last {
            let y = self.middle(Item::Pass(number), layer);
            points.extend([(self.left(layer), y), (self.left(layer) + WIDTH, y)]);
        }
        points.push((self.left(last), self.middle(Item::Node(edge.to), last)));
        points
    }
}

/// The layer of each node: edges lead to nodes with higher numbers.
fn layers(graph: &Graph) -> Vec<usize> {
    let mut layers = vec![0; graph.nodes.len()];
    let mut edges: Vec<_> = graph.edges.iter().collect();
    edges.sort_by_key(|edge| edge.to);
    for edge in edges {
        layers[edge.to] = layers[edge.to].max(layers[edge.from] + 1);
    }
    layers
}

/// The way that each node belongs to: the number of its start.
fn ways(graph: &Graph) -> Vec<usize> {
    let mut ways: Vec<_> = (0..graph.nodes.len()).collect();
    let mut edges: Vec<_> = graph.edges.iter().collect();
    edges.sort_by_key(|edge| edge.to);
    for edge in edges {
        ways[edge.to] = ways[edge.from];
    }
    ways
}

fn height(node: &Node) -> usize {
    lines(&node.label).len() * LINE + ROOM
}

/// Divides a text into lines, at spaces where there are some.
fn lines(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut length = 0;
    for word in text.split(' ') {
        let characters: Vec<char> = word.chars().collect();
        let fits = length == 0 || length + 1 + characters.len() <= LINE_MAX;
        if !fits {
            lines.push(String::new());
            length = 0;
        }
        if length > 0 {
            lines.last_mut().into_iter().for_each(|line| line.push(' '));
            length += 1;
        }
        for piece in characters.chunks(LINE_MAX) {
            if length > 0 && length + piece.len() > LINE_MAX {
                lines.push(String::new());
                length = 0;
            }
            lines.last_mut().into_iter().for_each(|line| line.extend(piece));
            length += piece.len();
        }
    }
    lines
}

/// Writes a text as XML wants it; characters that XML does not have become a mark.
fn xml(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            character if character.is_control() || matches!(character, '\u{fffe}' | '\u{ffff}') => {
                out.push('\u{fffd}');
            }
            character => out.push(character),
        }
    }
    out
}

impl Graph {
    /// Draws the graph as SVG (SVG 1.1), without a script and without anything from elsewhere.
    pub fn to_svg(&self) -> String {
        let layout = Layout::of(self);
        let last = layout.layers.iter().max().copied().unwrap_or_default();
        let (width, height) =
            (layout.left(last) + WIDTH + BETWEEN, layout.tops.last().copied().unwrap_or_default());
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n{HEAD}"
        );
        // How many texts stand above the end of a line already.
        let mut above = BTreeMap::<(usize, usize), usize>::new();
        for (number, edge) in self.edges.iter().enumerate() {
            let points = layout.points(number, edge);
            let _ =
                writeln!(text, "<path class=\"edge\" marker-end=\"url(#head)\" d=\"{}\"/>", curve(&points));
            let Some(label) = &edge.label else { continue };
            let (x, y) = points[1];
            for line in lines(label).iter().rev() {
                let count = above.entry((x, y)).or_default();
                *count += 1;
                let up = (y + LINE - 10).saturating_sub(*count * LINE);
                let _ =
                    writeln!(text, "<text class=\"arm\" x=\"{}\" y=\"{up}\">{}</text>", x - 14, xml(line));
            }
        }
        for (index, node) in self.nodes.iter().enumerate() {
            let layer = layout.layers[index];
            draw(&mut text, node, (layout.left(layer), layout.middle(Item::Node(index), layer)));
        }
        text + "</svg>\n"
    }
}

/// A line through these points: curves between layers, straight where it passes one.
fn curve(points: &[(usize, usize)]) -> String {
    let mut text = String::new();
    for (index, pair) in points.windows(2).enumerate() {
        let [(x, y), (to_x, to_y)] = [pair[0], pair[1]];
        if index == 0 {
            let _ = write!(text, "M{x} {y}");
        }
        let half = (x + to_x) / 2;
        let _ = match y == to_y {
            true => write!(text, "L{to_x} {to_y}"),
            false => write!(text, "C{half} {y} {half} {to_y} {to_x} {to_y}"),
        };
    }
    text
}

/// Draws a node whose left side and middle are given.
fn draw(text: &mut String, node: &Node, (left, middle): (usize, usize)) {
    let (height, lines) = (height(node), lines(&node.label));
    let (class, round) = match node.shape {
        Shape::End => ("node end", height / 2),
        Shape::Function => ("node", 3),
        Shape::Branch => ("node branch", 3),
    };
    let top = middle.saturating_sub(height / 2);
    let _ = writeln!(
        text,
        "<rect class=\"{class}\" x=\"{left}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{height}\" rx=\"{round}\"/>"
    );
    for (index, line) in lines.iter().enumerate() {
        let (x, y) = (left + WIDTH / 2, top + ROOM / 2 + LINE * (index + 1) - 4);
        let _ = writeln!(text, "<text class=\"name\" x=\"{x}\" y=\"{y}\">{}</text>", xml(line));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_divided_and_no_line_is_too_long() {
        for (text, expected) in [
            ("", vec![""]),
            ("tail (count)", vec!["tail (count)"]),
            ("rule records: to 10.20.0.0/16, port 443", vec!["rule records: to", "10.20.0.0/16, port 443"]),
        ] {
            assert_eq!(lines(text), expected);
        }
        let long = lines(&format!("a {} b", "é".repeat(70)));
        assert!(long.iter().all(|line| line.chars().count() <= LINE_MAX), "{long:?}");
        assert_eq!(long.concat().chars().filter(|character| *character == 'é').count(), 70);
    }

    #[test]
    fn texts_are_xml() {
        assert_eq!(xml("a<b>&\"\u{1b}c"), "a&lt;b&gt;&amp;&quot;\u{fffd}c");
    }
}
