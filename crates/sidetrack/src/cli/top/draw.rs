//! Draws the screen. Meaning never depends on colour alone.

use super::columns::{Column, fit, padded};
use super::events::FlowRow;
use super::field::Field;
use super::screen::{Drawer, Link, Mode, Screen, Tab};
use crate::cli::flows::{cut, human};
use ratatui::Frame;
use ratatui::layout::{Position, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, Paragraph};
use unicode_width::UnicodeWidthStr;

/// The rows of a table that stay visible over the drawer.
const ROWS_OVER_DRAWER: u16 = 5;

/// The keys, as the help shows them.
const KEYS: &str = "
 j k, arrows, g G   move                     Enter   the trace of the flow
 space, page keys   a screen further         Esc     close the trace; no filter
 < >, left right    sort by another column   x       end the flow; asks first
 o                  the other order          f       freeze the rows, or go on
 /                  filter; Tab completes    e       with or without ended flows
 q, Ctrl-C          leave                    1 2 3   Flows, Fast path, Health
 Ctrl-Z             stop; `fg` goes on       ?       these keys

 DOWN/S and UP/S are bytes of the last second from and to the server. RTT is
 the round trip of TCP to the server or the first hop. STATE is `live`, or why
 the flow ended. More columns appear in a wider window.
 Filter: proc == curl and port in 80,443 and bytes > 1MiB (docs/filters.md)
";

/// Something with the rest of the line after it.
fn bar(left: &str, right: &str, width: usize) -> String {
    let room = width.saturating_sub(right.width() + 1);
    format!("{} {right}", padded(left, room, false))
}

impl Screen {
    fn style(&self, colour: Color) -> Style {
        if self.has_colours { Style::new().fg(colour) } else { Style::new() }
    }

    /// Draws all.
    pub fn draw(&mut self, frame: &mut Frame<'_>) {
        let area = frame.area();
        if area.width < 20 || area.height < 6 {
            frame.render_widget(Paragraph::new("window too small"), area);
            return;
        }
        let line = |y: u16| Rect { y, height: 1, ..area };
        self.draw_top(frame, line(0), line(1));
        let foot = if matches!(self.mode, Mode::Filter(_)) { 3 } else { 1 };
        let body = Rect { y: 2, height: area.height - 2 - foot, ..area };
        match self.tab {
            Tab::Flows => self.draw_flows(frame, body),
            Tab::FastPath => {
                let told = self.fast_path.as_ref().map(|told| match told {
                    Ok(fast_path) => fast_path.lines(usize::from(body.width)),
                    Err(why) => why.lines().map(human::printable).collect(),
                });
                self.draw_lines(frame, body, told, true);
            }
            Tab::Health => {
                let told = self.health.as_ref().map(|told| match told {
                    Ok(health) => health.lines(),
                    Err(why) => why.lines().map(human::printable).collect(),
                });
                self.draw_lines(frame, body, told, false);
            }
        }
        if let Mode::Drawer(drawer) | Mode::Question(_, Some(drawer)) = &self.mode {
            let mut drawer = drawer.clone();
            let top = body.y + (ROWS_OVER_DRAWER + 1).min(body.height / 3);
            self.draw_drawer(frame, Rect { y: top, height: body.bottom() - top, ..body }, &mut drawer);
            if let Mode::Drawer(kept) | Mode::Question(_, Some(kept)) = &mut self.mode {
                kept.scroll = drawer.scroll;
            }
        }
        if matches!(self.mode, Mode::Help) {
            frame.render_widget(Clear, body);
            frame.render_widget(Paragraph::new(format!("{KEYS}\n any key closes this")), body);
        }
        self.draw_foot(frame, Rect { y: area.height - foot, height: foot, ..area });
    }

    fn draw_top(&self, frame: &mut Frame<'_>, first: Rect, second: Rect) {
        let width = usize::from(first.width);
        let tick = self.rows.tick();
        let rates = format!(
            "down {}/s  up {}/s",
            human::bytes(tick.down_bytes_per_second),
            human::bytes(tick.up_bytes_per_second)
        );
        let of_filter =
            if self.filter.is_empty() { String::new() } else { format!("{} of ", tick.flows_shown) };
        let counts = format!("{of_filter}{} in flight, {} ended", tick.flows_active, tick.flows_ended);
        let (left, style) = match &self.link {
            Link::Waiting => (format!("{}: waiting for the node", self.title), Style::new()),
            Link::Connected => (format!("{}: {counts}", self.title), Style::new()),
            Link::Lost(seconds, why) => {
                let why = human::printable(why.lines().next().unwrap_or(""));
                (format!("NO ANSWER for {seconds} s, trying again: {why}"), self.style(Color::Red))
            }
        };
        let right = if matches!(self.link, Link::Connected) { rates.as_str() } else { "" };
        let style = style.add_modifier(Modifier::BOLD);
        frame.render_widget(Line::styled(bar(&left, right, width), style), first);
        let mut spans = Vec::new();
        for (index, (tab, title)) in Tab::ALL.iter().enumerate() {
            let style =
                if *tab == self.tab { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
            spans.push(Span::styled(format!(" {} {title} ", index + 1), style));
        }
        for word in [
            self.is_frozen.then(|| "  FROZEN".to_owned()),
            (!self.filter.is_empty()).then(|| format!("  filter: {}", human::printable(&self.filter))),
            (!self.with_ended).then(|| "  without ended".to_owned()),
            (self.rows.left_out() > 0).then(|| format!("  {} more flows not shown", self.rows.left_out())),
        ] {
            spans.extend(word.map(|word| Span::styled(word, self.style(Color::Yellow))));
        }
        frame.render_widget(Line::from(spans), second);
    }

    fn draw_flows(&mut self, frame: &mut Frame<'_>, area: Rect) {
        let shapes = Column::ALL.map(Column::shape);
        let chosen = fit(&shapes, usize::from(area.width));
        let titles = chosen.iter().map(|(index, width)| {
            let column = Column::ALL[*index];
            let mark = match (column == self.sort, self.is_descending) {
                (true, true) => "▼",
                (true, false) => "▲",
                (false, _) => "",
            };
            padded(&format!("{}{mark}", shapes[*index].title), *width, shapes[*index].is_number)
        });
        let titles = titles.collect::<Vec<_>>().join(" ");
        let bold = Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED);
        frame.render_widget(
            Line::styled(padded(&titles, usize::from(area.width), false), bold),
            Rect { height: 1, ..area },
        );
        let rows = Rect { y: area.y + 1, height: area.height.saturating_sub(1), ..area };
        let in_drawer = matches!(self.mode, Mode::Drawer(_) | Mode::Question(_, Some(_)));
        let height = if in_drawer { ROWS_OVER_DRAWER.min(rows.height / 3) } else { rows.height };
        let height = usize::from(height).max(1);
        if !in_drawer {
            self.height = height;
        }
        let place = self.place();
        self.scroll = self.scroll.min(place).max((place + 1).saturating_sub(height));
        let is_end = self.shown.len() < self.scroll + height;
        if is_end {
            self.scroll = self.shown.len().saturating_sub(height).min(self.scroll);
        }
        if self.shown.is_empty() {
            let what = match (&self.link, self.filter.is_empty()) {
                (Link::Waiting, _) => "",
                (_, true) => "No flow is in flight.",
                (_, false) => "No flow in flight matches the filter. Esc removes it.",
            };
            frame.render_widget(Paragraph::new(what), rows);
        }
        let visible = self.shown.iter().skip(self.scroll).take(height).enumerate();
        for (at, row) in visible {
            let y = rows.y + u16::try_from(at).unwrap_or(u16::MAX);
            self.draw_row(frame, Rect { y, height: 1, ..rows }, row, &chosen);
        }
    }

    fn draw_row(&self, frame: &mut Frame<'_>, area: Rect, row: &FlowRow, chosen: &[(usize, usize)]) {
        let now = self.rows.now();
        let cells = chosen.iter().map(|(index, width)| {
            let column = Column::ALL[*index];
            padded(&column.cell(row, now), *width, column.shape().is_number)
        });
        let text = padded(&cells.collect::<Vec<_>>().join(" "), usize::from(area.width), false);
        let mut style = match row.reason.as_deref() {
            None if row.down_bytes_per_second + row.up_bytes_per_second > 0 => self.style(Color::Green),
            None => Style::new(),
            Some("ok") => Style::new().add_modifier(Modifier::DIM),
            Some(_) => self.style(Color::Red),
        };
        if Some(row.flow) == self.selected {
            style = style.add_modifier(Modifier::REVERSED);
        }
        frame.render_widget(Line::styled(text, style), area);
    }

    /// Draws text that may be longer than the screen. `None`: it was asked for.
    fn draw_lines(
        &mut self,
        frame: &mut Frame<'_>,
        area: Rect,
        lines: Option<Vec<String>>,
        has_titles: bool,
    ) {
        let mut lines = lines.unwrap_or_else(|| vec!["waiting for the node".to_owned()]).into_iter();
        let mut rest = area;
        if has_titles {
            let bold = Style::new().add_modifier(Modifier::BOLD);
            frame.render_widget(
                Line::styled(lines.next().unwrap_or_default(), bold),
                Rect { height: 1, ..area },
            );
            rest = Rect { y: area.y + 1, height: area.height.saturating_sub(1), ..area };
        }
        let lines: Vec<String> = lines.collect();
        self.height = usize::from(rest.height);
        self.scroll = self.scroll.min(lines.len().saturating_sub(self.height));
        let shown = lines.iter().skip(self.scroll).take(self.height).map(|line| {
            let style = if line.starts_with('!') { self.style(Color::Red) } else { Style::new() };
            Line::styled(cut(line, usize::from(rest.width)), style)
        });
        frame.render_widget(Paragraph::new(shown.collect::<Vec<_>>()), rest);
    }

    fn draw_drawer(&mut self, frame: &mut Frame<'_>, area: Rect, drawer: &mut Drawer) {
        frame.render_widget(Clear, area);
        let width = usize::from(area.width);
        let title = bar(&format!(" {}", self.words(drawer.id)), "Esc closes, x ends it ", width);
        let style = Style::new().add_modifier(Modifier::REVERSED);
        frame.render_widget(Line::styled(title, style), Rect { height: 1, ..area });
        let text = match &drawer.text {
            None => "asking the node",
            Some(Ok(text) | Err(text)) => text,
        };
        let lines: Vec<&str> = text.lines().collect();
        let height = usize::from(area.height.saturating_sub(1));
        self.height = height;
        drawer.scroll = drawer.scroll.min(lines.len().saturating_sub(height));
        let shown = lines.iter().skip(drawer.scroll).take(height);
        let shown: Vec<_> = shown.map(|line| Line::from(cut(&human::printable(line), width))).collect();
        frame.render_widget(Paragraph::new(shown), Rect { y: area.y + 1, height: area.height - 1, ..area });
    }

    fn draw_foot(&self, frame: &mut Frame<'_>, area: Rect) {
        let width = usize::from(area.width);
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        match &self.mode {
            Mode::Filter(field) => draw_filter(frame, area, field),
            Mode::Question(id, _) => {
                let text = format!(" End {}? y ends it, any other key does not", self.words(*id));
                frame.render_widget(Line::styled(padded(&text, width, false), reversed), area);
            }
            _ => {
                let keys = " ? keys  / filter  < > sort  f freeze  Enter trace  x end  q leave";
                let text = self
                    .message
                    .as_deref()
                    .map_or(keys.to_owned(), |text| format!(" {}", human::printable(text)));
                frame.render_widget(Line::styled(padded(&text, width, false), reversed), area);
            }
        }
    }
}

/// Draws the field, a mark under what is wrong, and what is wrong or may come next.
fn draw_filter(frame: &mut Frame<'_>, area: Rect, field: &Field) {
    const LABEL: &str = "filter: ";
    let width = usize::from(area.width);
    // A long filter is shown from where the cursor is visible.
    let room = width.saturating_sub(LABEL.width() + 1).max(1);
    let hidden = (field.before().width() + 1).saturating_sub(room);
    let text: String = skipped(field.text(), hidden);
    frame.render_widget(Line::from(cut(&format!("{LABEL}{text}"), width)), Rect { height: 1, ..area });
    let cursor = LABEL.width() + field.before().width().saturating_sub(hidden);
    frame.set_cursor_position(Position::new(area.x + u16::try_from(cursor).unwrap_or(area.width), area.y));
    let (mark, below) = match field.error() {
        _ if !field.offered().is_empty() => (String::new(), field.offered().join("  ")),
        Some(error) => {
            let part =
                |range: std::ops::Range<usize>| field.text().get(range).map_or(0, UnicodeWidthStr::width);
            let at = part(0..error.at.start).saturating_sub(hidden) + LABEL.width();
            let mark = format!("{}{}", " ".repeat(at), "^".repeat(part(error.at.clone()).max(1)));
            (mark, error.message.clone())
        }
        None => (String::new(), "Enter applies it, Tab completes, Esc leaves it as it was".to_owned()),
    };
    frame.render_widget(Line::from(cut(&mark, width)), Rect { y: area.y + 1, height: 1, ..area });
    let below = cut(&human::printable(&below.replace('\n', " ")), width);
    frame.render_widget(Line::from(below), Rect { y: area.y + 2, height: 1, ..area });
}

/// The text without its first `columns`.
fn skipped(text: &str, columns: usize) -> String {
    let mut left = columns;
    let rest = text.chars().skip_while(|c| {
        let width = unicode_width::UnicodeWidthChar::width(*c).unwrap_or(0);
        let is_hidden = left > 0;
        left = left.saturating_sub(width);
        is_hidden
    });
    rest.collect()
}
