//! The client of the admin interface, for commands.

use super::ErrorBody;
use crate::exchange::{self, Connection, Failure};
use axum::body::{Body, Bytes};
use hyper::body::Incoming;
use hyper::{Method, Response};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Longest answer that is read completely, bytes. 100,000 flows have about 50 MB.
const ANSWER_MAX: usize = 256 << 20;

/// Longest line of an event stream, bytes.
const LINE_MAX: usize = 64 << 10;

/// The flows that were ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Killed {
    /// Their numbers.
    pub killed: Vec<u64>,
}

/// The flows that came back from the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Back {
    /// Their numbers.
    pub back: Vec<u64>,
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens there.
    #[error(
        "no sidetrack runs at {0}\nhelp: start one (`sidetrack up -c FILE`, `sidetrack run -- CMD`), or name the socket of \
         the one you mean with --admin PATH"
    )]
    NotRunning(PathBuf),
    /// This user may not use the socket.
    #[error(
        "no permission to use {0}\nhelp: run this as the user or group that sidetrack runs as (its socket has mode 0660)"
    )]
    NotAllowed(PathBuf),
    /// The connection broke, or the answer is not Sidetrack's.
    #[error("{0} does not answer as sidetrack does: {1}")]
    Broken(PathBuf, String),
    /// The request was refused.
    #[error("{error}\nhelp: {help}")]
    Refused {
        /// What is wrong.
        error: String,
        /// What to do about it.
        help: String,
    },
}

/// A client of the admin interface, for one socket.
#[derive(Clone, Debug)]
pub struct Client {
    path: PathBuf,
}

impl Client {
    /// A client of the socket at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sends a request and parses the JSON answer.
    ///
    /// # Errors
    /// Fails if no process answers, if the request is refused, or if the answer has another form.
    pub async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
    ) -> Result<T, ClientError> {
        self.send(method, path, query, Bytes::new()).await
    }

    /// Sends a body and parses the JSON answer.
    ///
    /// # Errors
    /// Fails as [`Client::ask`] does.
    pub async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<T, ClientError> {
        let answer = self.request(method, path, query, body.into()).await?;
        let body = self.whole(answer).await?;
        serde_json::from_slice(&body).map_err(|error| self.broken(error))
    }

    /// Sends a request and returns the answer as lines.
    ///
    /// # Errors
    /// Fails if no process answers, or if the request is refused.
    pub async fn lines(&self, path: &str, query: &[(&str, &str)]) -> Result<Lines, ClientError> {
        self.long_lines(path, query, LINE_MAX).await
    }

    /// Sends a request and returns the answer as lines of at most about `line_max_bytes`.
    ///
    /// # Errors
    /// Fails as [`Client::lines`] does.
    pub async fn long_lines(
        &self,
        path: &str,
        query: &[(&str, &str)],
        line_max_bytes: usize,
    ) -> Result<Lines, ClientError> {
        let answer = self.request(Method::GET, path, query, Bytes::new()).await?;
        let path = self.path.clone();
        Ok(Lines { body: answer.into_body(), held: Vec::new(), searched: 0, path, line_max_bytes })
    }

    /// Sends a request and returns the answer in pieces, as they come.
    ///
    /// # Errors
    /// Fails if no process answers, or if the request is refused.
    pub async fn pieces(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
    ) -> Result<Pieces, ClientError> {
        let answer = self.request(method, path, query, Bytes::new()).await?;
        Ok(Pieces { body: answer.into_body(), path: self.path.clone() })
    }

    async fn request(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
        body: Bytes,
    ) -> Result<Response<Incoming>, ClientError> {
        let mut connection = Connection::open(&self.path).await.map_err(|failure| self.failed(failure))?;
        let target = uri(path, query);
        let answer = connection.send(method, &target, "", Body::from(body)).await;
        let answer = answer.map_err(|failure| self.failed(failure))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status();
        let body = self.whole(answer).await?;
        let ErrorBody { error, help } =
            serde_json::from_slice(&body).map_err(|_| self.broken(format!("status {status}")))?;
        Err(ClientError::Refused { error, help })
    }

    async fn whole(&self, answer: Response<Incoming>) -> Result<Vec<u8>, ClientError> {
        exchange::whole(answer.into_body(), ANSWER_MAX).await.map_err(|failure| self.failed(failure))
    }

    fn failed(&self, failure: Failure) -> ClientError {
        match failure {
            Failure::Unreachable(error) => match error.kind() {
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
                    ClientError::NotRunning(self.path.clone())
                }
                ErrorKind::PermissionDenied => ClientError::NotAllowed(self.path.clone()),
                _ => self.broken(error),
            },
            Failure::Broken(why) => self.broken(why),
        }
    }

    fn broken(&self, error: impl ToString) -> ClientError {
        ClientError::Broken(self.path.clone(), error.to_string())
    }
}

/// Returns the request target with percent-encoded values (RFC 3986 Sec. 2.1).
fn uri(path: &str, query: &[(&str, &str)]) -> String {
    let mut uri = path.to_owned();
    for (index, (name, value)) in query.iter().enumerate() {
        uri.push(if index == 0 { '?' } else { '&' });
        uri.push_str(name);
        uri.push('=');
        for byte in value.bytes() {
            if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                uri.push(char::from(byte));
            } else {
                // Writing to a String cannot fail.
                let _ = write!(uri, "%{byte:02X}");
            }
        }
    }
    uri
}

/// Pieces of an answer, as they come.
#[derive(Debug)]
pub struct Pieces {
    body: Incoming,
    path: PathBuf,
}

impl Pieces {
    /// Returns the next piece. `None` at the end of the answer.
    ///
    /// # Errors
    /// Fails if the connection breaks.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        let next = exchange::next(&mut self.body).await;
        next.map_err(|failure| ClientError::Broken(self.path.clone(), failure.to_string()))
    }
}

/// Lines of an answer, as they come.
#[derive(Debug)]
pub struct Lines {
    body: Incoming,
    held: Vec<u8>,
    /// The first held bytes, in this number, have no end of a line.
    searched: usize,
    path: PathBuf,
    line_max_bytes: usize,
}

impl Lines {
    /// Returns the next line without its end. `None` at the end of the answer.
    ///
    /// # Errors
    /// Fails if the connection breaks, or if a line is too long.
    pub async fn next(&mut self) -> Result<Option<String>, ClientError> {
        loop {
            let end = self.held[self.searched..].iter().position(|byte| *byte == b'\n');
            if let Some(end) = end.map(|end| self.searched + end) {
                self.searched = 0;
                let line: Vec<u8> = self.held.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line[..end]).into_owned()));
            }
            self.searched = self.held.len();
            if self.held.len() > self.line_max_bytes {
                return Err(ClientError::Broken(self.path.clone(), "a line without end".to_owned()));
            }
            match exchange::next(&mut self.body).await {
                Ok(None) => return Ok(None),
                Ok(Some(data)) => self.held.extend_from_slice(&data),
                Err(failure) => return Err(ClientError::Broken(self.path.clone(), failure.to_string())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::uri;

    #[test]
    fn values_are_percent_encoded() {
        assert_eq!(uri("/v1/flows", &[]), "/v1/flows");
        let query = [("filter", "a == \"é&b\""), ("recent", "5")];
        assert_eq!(uri("/v1/flows", &query), "/v1/flows?filter=a%20%3D%3D%20%22%C3%A9%26b%22&recent=5");
    }
}
