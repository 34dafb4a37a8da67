//! What a hospital and a research centre have agreed to, for tests.

/// The client is at 127.0.0.1, the data at 127.0.0.2. `@port`, `@consent` and `@rest` are filled in.
const TRIAL: &str = r#"
version = 1
attributes = ["counted"]
purposes = ["research", "care"]
[party.hospital]
[party.centre]
[node.ward]
party = "hospital"
address = "127.0.0.2"
[node.lab]
party = "centre"
address = "127.0.0.1"
[data.pulse]
node = "ward"
port = @port
consent = "@consent"
[function.count]
applies = "counted"
[[agreement]]
name = "trial"
parties = "centre"
data = "pulse"
purpose = "research"
access = "read"
@rest
"#;

/// The agreement about data at this port, with this consent; `rest` are further lines of the only agreement in it.
pub(crate) fn trial(port: u16, consent: &str, rest: &str) -> String {
    let filled = [("@port", &*port.to_string()), ("@consent", consent), ("@rest", rest)];
    filled.into_iter().fold(TRIAL.to_owned(), |text, (place, value)| text.replace(place, value))
}
