//! The log: text or JSON on standard error, with a rate that outsiders cannot raise.
//!
//! Many lines report what a stranger did: a failed handshake, a client with too many flows. So each line is
//! limited, by its place in the program: [`BURST`] lines at once ([`INFO_BURST`] for level `info`, because a
//! node lists its listeners), then [`PER_SECOND`] per second. Omitted lines are counted, and the next line of
//! that place reports the count. Lines of levels `debug` and `trace` have no limit: a user must have turned them
//! on.

use serde_json::json;
use sidetrack_core::limit::TokenBucket;
use sidetrack_core::time::Instant as CoreInstant;
use sidetrack_sys::process;
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};
use std::time::{Instant, SystemTime};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::{Format, Full, Json, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Most warnings and errors from one place in the program at once.
pub const BURST: u32 = 8;

/// Most lines of level `info` from one place at once.
pub const INFO_BURST: u32 = 64;

/// Lines per second from one place after that.
pub const PER_SECOND: u32 = 1;

/// The environment variable that selects lines: a list of `target=level`.
pub const FILTER: &str = "SIDETRACK_LOG";

/// The selection if the variable is not set.
const DEFAULT_FILTER: &str = "warn,sidetrack=info";

/// What takes lines instead of standard error.
static TAKES: OnceLock<fn(&str)> = OnceLock::new();

/// Gives all lines to `takes` from now on, instead of writing them to standard error. Only the first call counts.
pub fn divert(takes: fn(&str)) {
    let _ = TAKES.set(takes);
}

/// Where a line is written.
struct Out;

impl Write for Out {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        match TAKES.get() {
            Some(takes) => takes(&String::from_utf8_lossy(line)),
            None => return std::io::stderr().write(line),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

static IS_JSON: AtomicBool = AtomicBool::new(false);

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shape {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Sets the format of log lines from now on.
pub fn set_shape(shape: Shape) {
    IS_JSON.store(shape == Shape::Json, Relaxed);
}

/// The environment variable for the format, if no configuration sets it: `json` or `text`.
pub const FORMAT: &str = "SIDETRACK_LOG_FORMAT";

/// Like [`set_shape`], also for processes that this one starts later.
pub fn set_shape_of_all(shape: Shape) {
    set_shape(shape);
    let word = match shape {
        Shape::Text => "text",
        Shape::Json => "json",
    };
    process::pass_on(FORMAT, word);
}

/// Starts the log of this process.
pub fn start(colours: bool) {
    let said = |variable| process::environment(variable).and_then(|value| value.into_string().ok());
    if said(FORMAT).is_some_and(|format| format == "json") {
        set_shape(Shape::Json);
    }
    let (filter, wrong) = filter(&said(FILTER).unwrap_or_default());
    tracing_subscriber::fmt()
        .with_writer(|| Out)
        .with_ansi(colours)
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .event_format(Lines::default())
        .init();
    for part in wrong {
        tracing::warn!(
            "{FILTER}: '{}' is ignored: write LEVEL or TARGET=LEVEL, where a level is error, warn, info, debug, trace or off",
            part.escape_debug()
        );
    }
}

/// Returns the filter that this value asks for, and the parts of it that are wrong. They are left out: by itself the library
/// takes a misspelt level for the name of a target, and then writes nothing.
fn filter(said: &str) -> (String, Vec<String>) {
    let is_right = |part: &str| {
        let level = part.rsplit_once('=').map_or(part, |(target, level)| {
            let is_target = |byte: u8| byte.is_ascii_alphanumeric() || b"_:".contains(&byte);
            if !target.is_empty() && target.bytes().all(is_target) { level } else { "" }
        });
        !level.is_empty() && level.parse::<LevelFilter>().is_ok()
    };
    let parts = said.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned);
    let (right, wrong): (Vec<_>, Vec<_>) = parts.partition(|part| is_right(part));
    (if right.is_empty() { DEFAULT_FILTER.to_owned() } else { right.join(",") }, wrong)
}

/// Formats lines, and omits lines that come too fast.
#[derive(Debug)]
pub struct Lines {
    text: Format<Full>,
    json: Format<Json>,
    began: Instant,
    places: Mutex<BTreeMap<Place, TokenBucket>>,
}

/// A place in the program: file and line.
type Place = (&'static str, u32);

impl Default for Lines {
    fn default() -> Self {
        let format = tracing_subscriber::fmt::format();
        let json = format.clone().json().flatten_event(true).with_current_span(false).with_span_list(false);
        Self { text: format, json, began: Instant::now(), places: Mutex::default() }
    }
}

impl Lines {
    /// Returns how many lines of this place were omitted before this one. `None`: this one must be omitted too.
    fn admit(&self, metadata: &'static Metadata<'static>) -> Option<u64> {
        if *metadata.level() > Level::INFO {
            return Some(0);
        }
        let burst = if *metadata.level() == Level::INFO { INFO_BURST } else { BURST };
        let place = (metadata.file().unwrap_or(metadata.target()), metadata.line().unwrap_or_default());
        let nanos = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let now = CoreInstant::from_nanos(nanos);
        let mut places = lock(&self.places);
        places.entry(place).or_insert_with(|| TokenBucket::new(burst, PER_SECOND, now)).take(now)
    }
}

/// Writes a line with the number of omitted lines, before the next one.
fn tell_missing(to: &mut Writer<'_>, metadata: &Metadata<'_>, missing: u64) -> fmt::Result {
    let now = humantime::format_rfc3339_micros(SystemTime::now());
    let (level, target) = (metadata.level(), metadata.target());
    let message = "lines like the next one came too fast and were left out";
    if IS_JSON.load(Relaxed) {
        let line = json!({
            "timestamp": now.to_string(), "level": level.as_str(), "message": message, "missing": missing, "target": target,
        });
        return writeln!(to, "{line}");
    }
    writeln!(to, "{now} {level:>5} {target}: {message} missing={missing}")
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut to: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        match self.admit(metadata) {
            // An empty line is not written.
            None => return Ok(()),
            Some(0) => {}
            Some(missing) => tell_missing(&mut to, metadata, missing)?,
        }
        if IS_JSON.load(Relaxed) {
            self.json.format_event(context, to, event)
        } else {
            self.text.format_event(context, to, event)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tracing_subscriber::fmt::MakeWriter;

    /// Collects the output.
    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Page {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("not poisoned").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl MakeWriter<'_> for Page {
        type Writer = Self;

        fn make_writer(&self) -> Self {
            self.clone()
        }
    }

    fn written(work: impl FnOnce()) -> Vec<String> {
        let page = Page::default();
        let log = tracing_subscriber::fmt()
            .with_writer(page.clone())
            .with_ansi(false)
            .with_max_level(Level::DEBUG)
            .event_format(Lines::default())
            .finish();
        tracing::subscriber::with_default(log, work);
        let bytes = page.0.lock().expect("not poisoned").clone();
        String::from_utf8(bytes).expect("text").lines().map(str::to_owned).collect()
    }

    #[test]
    fn parts_of_the_filter_that_are_wrong_are_left_out_and_told() {
        for (said, filter_of, wrong) in [
            ("", DEFAULT_FILTER, ""),
            ("debug", "debug", ""),
            ("WARN, sidetrack::worker=trace", "WARN,sidetrack::worker=trace", ""),
            ("off", "off", ""),
            ("verbose", DEFAULT_FILTER, "verbose"),
            ("sidetrack", DEFAULT_FILTER, "sidetrack"),
            ("error,sidetrack=loud,=info", "error", "sidetrack=loud =info"),
            ("sidetrack=", DEFAULT_FILTER, "sidetrack="),
            ("side track=info,[", DEFAULT_FILTER, "side track=info ["),
        ] {
            let (filter, told) = filter(said);
            assert_eq!((filter.as_str(), told.join(" ").as_str()), (filter_of, wrong), "{said}");
        }
    }

    #[test]
    fn the_programs_own_crates_are_selected_together() {
        let log = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::new(DEFAULT_FILTER))
            .with_writer(Page::default())
            .finish();
        tracing::subscriber::with_default(log, || {
            assert!(tracing::enabled!(target: "sidetrack::worker", Level::INFO));
            assert!(tracing::enabled!(target: "sidetrack_common::rights", Level::INFO));
            assert!(tracing::enabled!(target: "sidetrack_control::domain", Level::INFO));
            assert!(!tracing::enabled!(target: "sidetrack_control::domain", Level::DEBUG));
            assert!(!tracing::enabled!(target: "h2", Level::INFO));
        });
    }

    fn stranger(number: u32) {
        tracing::warn!(number, "a stranger came");
    }

    #[test]
    fn one_place_writes_no_more_than_its_limit_and_others_go_on() {
        let begun = Instant::now();
        let lines = written(|| {
            (0..5000).for_each(stranger);
            tracing::info!("another place");
            (0..200).for_each(|number| tracing::debug!(number, "asked for"));
        });
        let strangers = lines.iter().filter(|line| line.contains("a stranger")).count();
        let most = BURST as usize + PER_SECOND as usize * (begun.elapsed().as_secs() as usize + 1);
        assert!((BURST as usize..=most).contains(&strangers), "{strangers} lines");
        assert!(lines.iter().any(|line| line.contains("another place")));
        assert_eq!(lines.iter().filter(|line| line.contains("asked for")).count(), 200);
    }

    #[test]
    fn what_was_left_out_is_counted_in_both_shapes() {
        for shape in [Shape::Json, Shape::Text] {
            set_shape(shape);
            let mut lines = written(|| {
                (0..200).for_each(stranger);
                let again = Instant::now() + std::time::Duration::from_millis(1100);
                while Instant::now() < again {
                    std::thread::park_timeout(again.saturating_duration_since(Instant::now()));
                }
                stranger(200);
            });
            let (last, missing) = (lines.pop().expect("a line"), lines.pop().expect("a line"));
            if shape == Shape::Json {
                let all = lines.iter().chain([&last, &missing]);
                let read = |line: &String| serde_json::from_str::<serde_json::Value>(line).expect("JSON");
                let all: Vec<_> = all.map(read).collect();
                assert!(all.iter().all(|line| line["level"] == "WARN" && line["timestamp"].is_string()));
                assert_eq!(all[0]["message"], "a stranger came");
                assert_eq!(all[0]["number"], 0);
                assert!(all[lines.len() + 1]["missing"].as_u64().is_some_and(|missing| missing > 100));
            } else {
                assert!(last.contains("a stranger came") && missing.contains("missing="), "{missing} {last}");
            }
        }
    }
}
