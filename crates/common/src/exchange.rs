//! HTTP/1.1 over a unix socket, as a client: the admin interface of a node, and the API of a container engine.

use axum::body::{Body, Bytes};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::future::poll_fn;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;
use tokio::net::UnixStream;

pub use hyper::{Method, StatusCode};

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The socket takes no connection.
    #[error("{0}")]
    Unreachable(io::Error),
    /// The connection broke, the answer came too late, or it is too long.
    #[error("{0}")]
    Broken(String),
}

impl Failure {
    fn broken(why: impl ToString) -> Self {
        Self::Broken(why.to_string())
    }
}

/// The bounds of an exchange that waits for the whole answer.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long it may take.
    pub patience: Duration,
    /// Longest answer that is read, bytes.
    pub answer_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { patience: Duration::from_secs(60), answer_max: 256 << 20 }
    }
}

/// An open connection to a socket.
#[derive(Debug)]
pub struct Connection(SendRequest<Body>);

impl Connection {
    /// Connects. The connection's own task ends with the last answer's body, or when this value is dropped.
    ///
    /// # Errors
    /// Fails if no process listens there.
    pub async fn open(socket: &Path) -> Result<Self, Failure> {
        let stream = UnixStream::connect(socket).await.map_err(Failure::Unreachable)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(Failure::broken)?;
        tokio::spawn(connection);
        Ok(Self(sender))
    }

    /// Sends a request and returns the answer, whose body is still to be read. `kind` is the content type of the body; none
    /// if empty.
    ///
    /// # Errors
    /// Fails if the connection breaks.
    pub async fn send(
        &mut self,
        method: Method,
        target: &str,
        kind: &str,
        body: Body,
    ) -> Result<Response<Incoming>, Failure> {
        let mut request = Request::builder().method(method).uri(target).header("host", "sidetrack");
        if !kind.is_empty() {
            request = request.header("content-type", kind);
        }
        let request = request.body(body).map_err(Failure::broken)?;
        self.0.ready().await.map_err(Failure::broken)?;
        self.0.send_request(request).await.map_err(Failure::broken)
    }
}

/// Returns the next bytes of a body; `None` at its end.
///
/// # Errors
/// Fails if the connection breaks.
pub async fn next(body: &mut Incoming) -> Result<Option<Bytes>, Failure> {
    loop {
        match poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
            None => return Ok(None),
            Some(Err(error)) => return Err(Failure::broken(error)),
            // Trailers are not data.
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}

/// Reads the rest of a body, at most `most` bytes.
///
/// # Errors
/// Fails if the connection breaks, or if there is more.
pub async fn whole(mut body: Incoming, most: usize) -> Result<Vec<u8>, Failure> {
    let mut whole = Vec::new();
    while let Some(data) = next(&mut body).await? {
        whole.extend_from_slice(&data);
        if whole.len() > most {
            return Err(Failure::broken("its answer is too long"));
        }
    }
    Ok(whole)
}

/// A client for code without a runtime. It blocks the thread until the whole answer is there.
#[derive(Debug)]
pub struct Blocking {
    runtime: tokio::runtime::Runtime,
    connection: Connection,
    limits: Limits,
}

impl Blocking {
    /// Connects.
    ///
    /// # Errors
    /// Fails if no process listens there.
    pub fn open(socket: &Path, limits: Limits) -> Result<Self, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(Failure::broken)?;
        let connection = runtime.block_on(Connection::open(socket))?;
        Ok(Self { runtime, connection, limits })
    }

    /// Sends a request and returns the status and the body of the answer. `body` is called inside the runtime.
    ///
    /// # Errors
    /// Fails if the connection breaks, or if the answer is too late or too long.
    pub fn ask(
        &mut self,
        method: Method,
        target: &str,
        kind: &str,
        body: impl FnOnce() -> Body,
    ) -> Result<(StatusCode, Vec<u8>), Failure> {
        let Limits { patience, answer_max } = self.limits;
        let connection = &mut self.connection;
        self.runtime.block_on(async {
            let exchange = async {
                let answer = connection.send(method, target, kind, body()).await?;
                Ok((answer.status(), whole(answer.into_body(), answer_max).await?))
            };
            let late = |_| Failure::broken(format!("no answer within {} s", patience.as_secs()));
            tokio::time::timeout(patience, exchange).await.map_err(late)?
        })
    }

    /// Sends a text and returns the status and the text of the answer.
    ///
    /// # Errors
    /// Fails as [`Blocking::ask`] does, or if this is not a method.
    pub fn text(&mut self, method: &str, target: &str, body: &str) -> Result<(u16, String), Failure> {
        let method = method.parse().map_err(Failure::broken)?;
        let body = body.to_owned();
        let (status, answer) = self.ask(method, target, "", || Body::from(body))?;
        Ok((status.as_u16(), String::from_utf8_lossy(&answer).into_owned()))
    }
}

/// Sends one text to a socket and returns the status and the text of the answer. Blocks the thread.
///
/// # Errors
/// Fails as [`Blocking::open`] and [`Blocking::text`] do.
pub fn ask(socket: &Path, method: &str, target: &str, body: &str) -> Result<(u16, String), Failure> {
    Blocking::open(socket, Limits::default())?.text(method, target, body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::thread::JoinHandle;

    fn path(folder: &tempfile::TempDir) -> PathBuf {
        folder.path().join("socket")
    }

    /// Serves one connection: each answer in turn, after a request that ends with `x`. Returns what came.
    fn serve(answers: &[&'static str]) -> (tempfile::TempDir, JoinHandle<Vec<String>>) {
        let folder = tempfile::tempdir().expect("a folder");
        let listener = UnixListener::bind(path(&folder)).expect("a socket");
        let answers = answers.to_vec();
        let served = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let answered = answers.into_iter().map(|answer| {
                let mut request = Vec::new();
                while !request.ends_with(b"x") {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).expect("a request");
                    request.extend(byte);
                }
                stream.write_all(answer.as_bytes()).expect("sent");
                String::from_utf8(request).expect("text")
            });
            answered.collect()
        });
        (folder, served)
    }

    #[test]
    fn requests_follow_each_other_on_one_connection() {
        let (folder, served) = serve(&[
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
            "HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n",
        ]);
        let mut blocking = Blocking::open(&path(&folder), Limits::default()).expect("it listens");
        assert_eq!(blocking.text("POST", "/a", "x").expect("an answer"), (200, "hi".to_owned()));
        assert_eq!(blocking.text("PUT", "/b?c", "yx").expect("an answer"), (404, "abcd".to_owned()));
        let came = served.join().expect("served");
        assert!(came[0].starts_with("POST /a HTTP/1.1\r\nhost: sidetrack\r\n"), "{came:?}");
        assert!(came[1].starts_with("PUT /b?c HTTP/1.1\r\n") && came[1].ends_with("\r\n\r\nyx"), "{came:?}");
    }

    #[test]
    fn an_answer_that_is_cut_or_too_long_is_an_error() {
        let long = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlong";
        let cut = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf";
        for (answer, answer_max, expected) in [(long, 3, "its answer is too long"), (cut, 100, "")] {
            let (folder, served) = serve(&[answer]);
            let limits = Limits { answer_max, ..Limits::default() };
            let mut blocking = Blocking::open(&path(&folder), limits).expect("it listens");
            let error = blocking.text("POST", "/", "x").expect_err("no answer").to_string();
            assert!(error.contains(expected), "{error}");
            served.join().expect("served");
        }
    }

    #[test]
    fn a_server_that_is_silent_or_absent_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let absent = ask(&path(&folder), "GET", "/", "").expect_err("no socket");
        assert!(matches!(absent, Failure::Unreachable(_)), "{absent}");
        let _silent = UnixListener::bind(path(&folder)).expect("a socket");
        let limits = Limits { patience: Duration::from_millis(1), ..Limits::default() };
        let mut blocking = Blocking::open(&path(&folder), limits).expect("it listens");
        let error = blocking.text("GET", "/", "").expect_err("too late").to_string();
        assert_eq!(error, "no answer within 0 s");
    }
}
