//! What a node tells a viewer of its flows (`GET /v1/live`): server-sent events (HTML Living Standard, Sec. 9.2) with JSON.

use crate::record::Timestamp;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// A flow as the node shows it. Names and meanings are those of records (docs/records.md).
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "docs/records.md describes each")]
pub struct FlowRow {
    pub flow: u64,
    pub ts: Option<Timestamp>,
    pub rule: Option<String>,
    pub chain: Vec<String>,
    pub carrier: Option<String>,
    pub intercept: Option<String>,
    pub client: Option<String>,
    pub orig_dst: Option<String>,
    pub host: Option<String>,
    pub process: Option<String>,
    pub bytes_up: u64,
    pub bytes_down: u64,
    pub duration_seconds: f64,
    pub shunted: bool,
    pub reason: Option<String>,
    pub detail: Option<String>,
    pub path: Option<String>,
    pub up_bytes_per_second: u64,
    pub down_bytes_per_second: u64,
    pub client_rtt_us: u64,
    pub server_rtt_us: u64,
}

/// The first event.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Hello {
    /// The names of what a line of `moved` has, in order.
    pub moved_columns: Vec<String>,
}

/// What has changed in flows that run.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Changes {
    /// Whole rows.
    pub rows: Vec<FlowRow>,
    /// Numbers of rows that are known.
    pub moved: Vec<Vec<u64>>,
    /// Flows that do not match the filter any more.
    pub left: Vec<u64>,
}

/// The end of an update.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Tick {
    /// The time of the node.
    pub now: Option<Timestamp>,
    /// Number of running flows.
    pub flows_active: u64,
    /// Number of those that match the filter.
    pub flows_shown: u64,
    /// Number of flows that ended since the node started.
    pub flows_ended: u64,
    /// Payload bytes per second of all flows from clients to servers.
    pub up_bytes_per_second: u64,
    /// Payload bytes per second of all flows from servers to clients.
    pub down_bytes_per_second: u64,
    /// Flows that have ended.
    pub gone: Vec<u64>,
    /// Some of them, as they ended.
    pub ended: Vec<FlowRow>,
}

/// One event.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The first one: what was known before is not true any more.
    Hello(Hello),
    /// The node tells all running flows again.
    Reset,
    /// Rows have changed.
    Flows(Changes),
    /// The end of an update.
    Tick(Tick),
    /// An event of a newer node.
    Other,
}

/// Reads events line by line.
#[derive(Debug, Default)]
pub struct Reader {
    name: String,
    data: String,
}

impl Reader {
    /// Reads a line without its end. Returns an event if it is complete.
    ///
    /// # Errors
    /// Fails if the data are not what their name says.
    pub fn line(&mut self, line: &str) -> Result<Option<Event>, serde_json::Error> {
        let line = line.strip_suffix('\r').unwrap_or(line);
        if line.is_empty() {
            let (name, data) = (std::mem::take(&mut self.name), std::mem::take(&mut self.data));
            // Without data there is no event.
            return if data.is_empty() { Ok(None) } else { event(&name, &data).map(Some) };
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.name),
            "data" => {
                if !self.data.is_empty() {
                    self.data.push('\n');
                }
                self.data.push_str(value);
            }
            // `retry`, `id`, and lines that begin with a colon.
            _ => {}
        }
        Ok(None)
    }
}

fn event(name: &str, data: &str) -> Result<Event, serde_json::Error> {
    fn read<T: DeserializeOwned>(data: &str) -> Result<T, serde_json::Error> {
        serde_json::from_str(data)
    }
    Ok(match name {
        "hello" => Event::Hello(read(data)?),
        "reset" => Event::Reset,
        "flows" => Event::Flows(read(data)?),
        "tick" => Event::Tick(read(data)?),
        _ => Event::Other,
    })
}
