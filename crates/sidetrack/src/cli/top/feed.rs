//! Follows the flows of a node, and connects again when it went away.
//!
//! ```text
//! connect --answer--> read events --end, error or silence--> say so, wait --> connect
//!    +------refused or no answer--> say so, wait --> connect
//! ```

use super::events::{Event, Reader};
use super::of_run::STARTS;
use super::screen::Input;
use crate::admin::Client;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Sender;
use tokio::time::{sleep, timeout};

/// Longest event, bytes. A node sends at most 500 rows, or the ends of 131072 flows, in one event.
const EVENT_MAX_BYTES: usize = 16 << 20;
/// Time between two attempts.
const AGAIN: Duration = Duration::from_secs(1);
/// A node that says nothing for this long does not answer. It tells something each second.
const SILENCE: Duration = Duration::from_secs(10);
/// Time between two attempts before the first answer.
const SOON: Duration = Duration::from_millis(100);

/// Follows until the other end of `told` is gone.
pub(super) async fn follow(client: Client, filter: String, told: Sender<Input>) {
    let begun = Instant::now();
    let mut lost: Option<Instant> = Some(begun);
    loop {
        let why = match once(&client, &filter, &told, &mut lost).await {
            Ok(()) => "it has closed the connection".to_owned(),
            Err(why) => why,
        };
        let since = *lost.get_or_insert_with(Instant::now);
        if since == begun && begun.elapsed() < STARTS && !told.is_closed() {
            sleep(SOON).await;
            continue;
        }
        let since = since.elapsed().as_secs();
        if told.send(Input::Lost(since, why)).await.is_err() {
            return;
        }
        sleep(AGAIN).await;
    }
}

/// Follows once. `lost` becomes `None` when the node answers.
async fn once(
    client: &Client,
    filter: &str,
    told: &Sender<Input>,
    lost: &mut Option<Instant>,
) -> Result<(), String> {
    let silent = |_| "it is silent".to_owned();
    let query = [("filter", filter)];
    let query = if filter.is_empty() { &query[..0] } else { &query[..] };
    let lines = timeout(SILENCE, client.long_lines("/v1/live", query, EVENT_MAX_BYTES)).await;
    let mut lines = lines.map_err(silent)?.map_err(|error| error.to_string())?;
    let mut reader = Reader::default();
    loop {
        let line =
            timeout(SILENCE, lines.next()).await.map_err(silent)?.map_err(|error| error.to_string())?;
        let Some(line) = line else { return Ok(()) };
        let event = reader.line(&line).map_err(|error| format!("it tells something else: {error}"))?;
        if let Some(event) = event {
            if matches!(event, Event::Hello(_)) {
                *lost = None;
            }
            if told.send(Input::Event(event)).await.is_err() {
                return Ok(());
            }
        }
    }
}
