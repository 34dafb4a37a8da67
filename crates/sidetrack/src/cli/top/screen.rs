//! The screen of `sidetrack top` without a terminal: keys and data in, things to do and a picture out.
//!
//! ```text
//!            /                     Enter: the filter is right, or Esc
//!  Table ---------> Filter ------------------------------------------> Table
//!    | Enter                Esc, q
//!    +------------> Drawer ----------> Table
//!    | x (of Drawer too)    y: ends the flow; another key: does not
//!    +------------> Question --------------------------------------> where it was asked
//!    | ?                    any key
//!    +------------> Help ------------> Table
//! ```
//!
//! The feed, beside it: `Waiting --hello--> Connected --broken--> Lost --hello--> Connected`. While it is lost, the rows stay.

use super::columns::{Column, host};
use super::events::{Event, FlowRow};
use super::field::Field;
use super::panels::{FastPath, Health};
use super::rows::Rows;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::sync::Arc;

/// One of the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tab {
    /// Flows that run and that have just ended.
    #[default]
    Flows,
    /// The flows of the shunt.
    FastPath,
    /// What the node lacks.
    Health,
}

impl Tab {
    /// All, in the order of their keys.
    pub const ALL: [(Self, &'static str); 3] =
        [(Self::Flows, "Flows"), (Self::FastPath, "Fast path"), (Self::Health, "Health")];
}

/// What comes to the screen.
#[derive(Debug)]
pub enum Input {
    /// A key.
    Key(KeyEvent),
    /// The node tells of flows.
    Event(Event),
    /// The node does not answer, for this number of seconds and for this reason.
    Lost(u64, String),
    /// The trace of a flow, or why there is none.
    Trace(u64, Result<String, String>),
    /// What came of an order, in words.
    Told(String),
    /// The fast path, or why it is not known.
    FastPath(Result<FastPath, String>),
    /// The state of the node, or why it is not known.
    Health(Result<Box<Health>, String>),
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Leave.
    Quit,
    /// Give the terminal back until we are continued.
    Suspend,
    /// Follow the flows that match.
    Watch(String),
    /// Ask for the trace of a flow.
    Trace(u64),
    /// End a flow.
    Kill(u64),
    /// Ask for what this table shows.
    Look(Tab),
}

/// The flow whose trace is shown.
#[derive(Clone, Debug)]
pub struct Drawer {
    /// Its number.
    pub id: u64,
    /// The trace. `None`: it was asked for.
    pub text: Option<Result<String, String>>,
    /// The first line that is shown.
    pub scroll: usize,
}

/// What keys mean.
#[derive(Clone, Debug, Default)]
pub enum Mode {
    /// They move in the table.
    #[default]
    Table,
    /// They write the filter.
    Filter(Field),
    /// They move in a flow's trace.
    Drawer(Drawer),
    /// They answer whether a flow is to end. With the drawer in which that was asked.
    Question(u64, Option<Drawer>),
    /// They close the help.
    Help,
}

/// The way to the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Link {
    /// It has not told anything.
    #[default]
    Waiting,
    /// It tells.
    Connected,
    /// It does not answer, for this number of seconds and for this reason.
    Lost(u64, String),
}

/// The screen.
#[derive(Debug)]
pub struct Screen {
    pub(super) title: String,
    pub(super) has_colours: bool,
    pub(super) link: Link,
    pub(super) rows: Rows,
    pub(super) shown: Vec<Arc<FlowRow>>,
    pub(super) tab: Tab,
    pub(super) mode: Mode,
    pub(super) filter: String,
    pub(super) sort: Column,
    pub(super) is_descending: bool,
    pub(super) is_frozen: bool,
    pub(super) with_ended: bool,
    pub(super) selected: Option<u64>,
    /// Where the selected flow stood: its neighbour is selected when it is gone.
    place: usize,
    pub(super) message: Option<String>,
    pub(super) fast_path: Option<Result<FastPath, String>>,
    pub(super) health: Option<Result<Box<Health>, String>>,
    /// The first line that a table shows.
    pub(super) scroll: usize,
    /// The lines that the table or the drawer had when it was drawn last.
    pub(super) height: usize,
}

impl Screen {
    /// A screen that has heard nothing. `title` names the node.
    pub fn new(title: &str, filter: &str, has_colours: bool) -> Self {
        Self {
            title: title.to_owned(),
            has_colours,
            link: Link::default(),
            rows: Rows::default(),
            shown: Vec::new(),
            tab: Tab::default(),
            mode: Mode::default(),
            filter: filter.to_owned(),
            sort: Column::DownRate,
            is_descending: true,
            is_frozen: false,
            with_ended: true,
            selected: None,
            place: 0,
            message: None,
            fast_path: None,
            health: None,
            scroll: 0,
            height: 10,
        }
    }

    /// Takes an input. Returns what is to be done.
    pub fn handle(&mut self, input: Input) -> Vec<Act> {
        match input {
            Input::Key(key) => return self.key(key),
            Input::Event(event) => return self.event(event),
            Input::Lost(seconds, why) => self.link = Link::Lost(seconds, why),
            Input::Told(text) => self.message = Some(text),
            Input::FastPath(told) => self.fast_path = Some(told),
            Input::Health(told) => self.health = Some(told),
            Input::Trace(id, told) => {
                if let Mode::Drawer(drawer) | Mode::Question(_, Some(drawer)) = &mut self.mode
                    && drawer.id == id
                    // A node that has forgotten the flow does not take away what is shown of it.
                    && !(told.is_err() && matches!(drawer.text, Some(Ok(_))))
                {
                    drawer.text = Some(told);
                }
            }
        }
        Vec::new()
    }

    fn event(&mut self, event: Event) -> Vec<Act> {
        if matches!(event, Event::Hello(_)) {
            if matches!(self.link, Link::Lost(..)) {
                self.message = Some("the node answers again".to_owned());
            }
            self.link = Link::Connected;
        }
        if !self.rows.take(event) {
            return Vec::new();
        }
        self.arrange();
        match (&self.mode, self.tab) {
            // Its counters and times go on.
            (Mode::Drawer(drawer), _) => vec![Act::Trace(drawer.id)],
            (_, Tab::Flows) => Vec::new(),
            (_, tab) => vec![Act::Look(tab)],
        }
    }

    /// Puts the rows in their order, unless they are frozen, and keeps a flow selected.
    fn arrange(&mut self) {
        if !self.is_frozen {
            let (column, now) = (self.sort, self.rows.now());
            self.shown = self.rows.all(self.with_ended).cloned().collect();
            if self.is_descending {
                self.shown.sort_by(|one, other| column.order(other, one, now));
            } else {
                self.shown.sort_by(|one, other| column.order(one, other, now));
            }
        }
        match self.shown.iter().position(|row| Some(row.flow) == self.selected) {
            Some(place) => self.place = place,
            None => self.select(self.place),
        }
    }

    fn select(&mut self, place: usize) {
        self.place = place.min(self.shown.len().saturating_sub(1));
        self.selected = self.shown.get(self.place).map(|row| row.flow);
    }

    /// The place of the selected flow.
    pub(super) const fn place(&self) -> usize {
        self.place
    }

    fn key(&mut self, key: KeyEvent) -> Vec<Act> {
        let has_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if has_control => return vec![Act::Quit],
            KeyCode::Char('z') if has_control => return vec![Act::Suspend],
            _ => {}
        }
        self.message = None;
        match std::mem::take(&mut self.mode) {
            Mode::Table => self.key_of_table(key.code),
            Mode::Filter(field) => self.key_of_filter(field, key),
            Mode::Drawer(drawer) => self.key_of_drawer(drawer, key.code),
            Mode::Question(id, drawer) => {
                self.mode = drawer.map_or(Mode::Table, Mode::Drawer);
                let is_yes = matches!(key.code, KeyCode::Char('y' | 'Y'));
                if is_yes { vec![Act::Kill(id)] } else { Vec::new() }
            }
            Mode::Help => Vec::new(),
        }
    }

    fn key_of_table(&mut self, key: KeyCode) -> Vec<Act> {
        match key {
            KeyCode::Char('q') => return vec![Act::Quit],
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.mode = Mode::Help,
            KeyCode::Char('/') => {
                self.tab = Tab::Flows;
                self.mode = Mode::Filter(Field::new(&self.filter));
            }
            KeyCode::Char('1') => return self.open(Tab::Flows),
            KeyCode::Char('2') => return self.open(Tab::FastPath),
            KeyCode::Char('3') => return self.open(Tab::Health),
            KeyCode::Tab => {
                let place = Tab::ALL.iter().position(|(tab, _)| *tab == self.tab).unwrap_or_default();
                return self.open(Tab::ALL[(place + 1) % Tab::ALL.len()].0);
            }
            key if self.tab == Tab::Flows => return self.key_of_flows(key),
            key => self.scroll = moved(key, self.scroll, self.height).unwrap_or(self.scroll),
        }
        Vec::new()
    }

    fn open(&mut self, tab: Tab) -> Vec<Act> {
        (self.tab, self.scroll) = (tab, 0);
        if tab == Tab::Flows { Vec::new() } else { vec![Act::Look(tab)] }
    }

    fn key_of_flows(&mut self, key: KeyCode) -> Vec<Act> {
        match key {
            KeyCode::Char('f') => {
                self.is_frozen = !self.is_frozen;
                self.arrange();
            }
            KeyCode::Char('e') => {
                self.with_ended = !self.with_ended;
                self.arrange();
            }
            KeyCode::Char('o') => self.sort_by(self.sort, !self.is_descending),
            KeyCode::Left | KeyCode::Char('<') => self.sort_by_neighbour(Column::ALL.len() - 1),
            KeyCode::Right | KeyCode::Char('>') => self.sort_by_neighbour(1),
            KeyCode::Enter => {
                if let Some(id) = self.selected {
                    self.mode = Mode::Drawer(Drawer { id, text: None, scroll: 0 });
                    return vec![Act::Trace(id)];
                }
            }
            KeyCode::Char('x') => self.ask_whether_to_end(self.selected, None),
            KeyCode::Esc if !self.filter.is_empty() => return self.watch(String::new()),
            key => {
                if let Some(place) = moved(key, self.place, self.height) {
                    self.select(place);
                }
            }
        }
        Vec::new()
    }

    fn sort_by_neighbour(&mut self, step: usize) {
        let place = Column::ALL.iter().position(|column| *column == self.sort).unwrap_or_default();
        let next = Column::ALL[(place + step) % Column::ALL.len()];
        self.sort_by(next, next.is_descending());
    }

    fn sort_by(&mut self, column: Column, is_descending: bool) {
        (self.sort, self.is_descending) = (column, is_descending);
        self.arrange();
    }

    fn watch(&mut self, filter: String) -> Vec<Act> {
        self.filter.clone_from(&filter);
        // Rows that were frozen may not match.
        self.is_frozen = false;
        vec![Act::Watch(filter)]
    }

    fn key_of_filter(&mut self, mut field: Field, key: KeyEvent) -> Vec<Act> {
        match key.code {
            KeyCode::Esc => return Vec::new(),
            KeyCode::Enter if field.check() => {
                let text = field.text().trim().to_owned();
                return if text == self.filter { Vec::new() } else { self.watch(text) };
            }
            KeyCode::Enter => {}
            _ => field.key(key, |name| self.values(name)),
        }
        self.mode = Mode::Filter(field);
        Vec::new()
    }

    /// Values of a field that the rows have.
    fn values(&self, field: &str) -> Vec<String> {
        let of = |row: &FlowRow| match field {
            "rule" => row.rule.clone(),
            "proc" => row.process.clone(),
            "host" => row.host.clone(),
            _ => None,
        };
        let mut values: Vec<_> = self.shown.iter().filter_map(|row| of(row)).collect();
        values.sort_unstable();
        values.dedup();
        values
    }

    fn key_of_drawer(&mut self, mut drawer: Drawer, key: KeyCode) -> Vec<Act> {
        match key {
            KeyCode::Esc | KeyCode::Enter | KeyCode::Char('q') => return Vec::new(),
            KeyCode::Char('x') => {
                self.ask_whether_to_end(Some(drawer.id), Some(drawer));
                return Vec::new();
            }
            key => drawer.scroll = moved(key, drawer.scroll, self.height).unwrap_or(drawer.scroll),
        }
        self.mode = Mode::Drawer(drawer);
        Vec::new()
    }

    fn ask_whether_to_end(&mut self, id: Option<u64>, drawer: Option<Drawer>) {
        let running = id.filter(|id| self.rows.get(*id).is_some_and(|row| row.reason.is_none()));
        match running {
            Some(id) => self.mode = Mode::Question(id, drawer),
            None => {
                self.message = Some("this flow has ended already".to_owned());
                self.mode = drawer.map_or(Mode::Table, Mode::Drawer);
            }
        }
    }

    /// A flow in words.
    pub(super) fn words(&self, id: u64) -> String {
        let Some(row) = self.rows.get(id) else { return format!("flow {id}") };
        let process = row.process.as_deref().map(crate::cli::flows::human::printable);
        format!("flow {id}, {} to {}", process.unwrap_or_else(|| "a client".to_owned()), host(row))
    }
}

/// The place that a key leads to from `place`, with `height` lines on the screen. `None`: it does not move.
fn moved(key: KeyCode, place: usize, height: usize) -> Option<usize> {
    Some(match key {
        KeyCode::Down | KeyCode::Char('j') => place + 1,
        KeyCode::Up | KeyCode::Char('k') => place.saturating_sub(1),
        KeyCode::PageDown | KeyCode::Char(' ') => place + height.max(1),
        KeyCode::PageUp => place.saturating_sub(height.max(1)),
        KeyCode::Home | KeyCode::Char('g') => 0,
        // The end is where the table ends.
        KeyCode::End | KeyCode::Char('G') => usize::MAX / 2,
        _ => return None,
    })
}
