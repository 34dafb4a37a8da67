//! The argument of `run --secret`.
//!
//! ```text
//! wanted = NAME "=" ( "file:" PATH / "env:" VARIABLE ) "@" host *( "," host )
//! host   = ( name / IPv4 / IPv6 ) / ( name / IPv4 / "[" IPv6 "]" ) ":" port       ; without a port: 443
//! ```

use crate::flow::{Destination, Host};
use std::str::FromStr;

/// The port of HTTP over TLS.
const HTTPS: u16 = 443;

/// A secret that is wanted: the variable for its placeholder, where it is, and the servers that get it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The variable of the command.
    pub name: String,
    /// Where the secret is.
    pub source: Source,
    /// The servers that get it, at least one.
    pub hosts: Vec<Destination>,
}

/// Where a secret is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// In the file at this path.
    File(String),
    /// In this variable of our own environment.
    Variable(String),
}

/// Why the text is wrong. No error shows what stands where a secret could have been written by mistake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WantedError {
    /// A part is missing.
    #[error("write NAME=file:PATH@HOST or NAME=env:VARIABLE@HOST, such as API_KEY=file:key.txt@api.example")]
    Form,
    /// The name is not that of a variable.
    #[error("'{0}' is not the name of a variable: write letters, digits and '_', with no digit first")]
    Name(String),
    /// A pattern instead of a host.
    #[error("{name}: '{host}' stands for several hosts: name each one, with commas")]
    Pattern {
        /// The variable.
        name: String,
        /// The pattern.
        host: String,
    },
    /// It is not a host.
    #[error("{name}: '{host}' is not a host: write HOST or HOST:PORT")]
    Host {
        /// The variable.
        name: String,
        /// The text.
        host: String,
    },
}

impl FromStr for Wanted {
    type Err = WantedError;

    fn from_str(text: &str) -> Result<Self, WantedError> {
        let (name, rest) = text.split_once('=').ok_or(WantedError::Form)?;
        let is_variable = |name: &str| {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
            !name.is_empty() && name.bytes().all(fits) && !name.as_bytes()[0].is_ascii_digit()
        };
        if !is_variable(name) {
            return Err(WantedError::Name(name.to_owned()));
        }
        let (source, hosts) = rest.rsplit_once('@').ok_or(WantedError::Form)?;
        let source = match source.split_once(':') {
            Some(("file", path)) if !path.is_empty() => Source::File(path.to_owned()),
            Some(("env", variable)) if is_variable(variable) => Source::Variable(variable.to_owned()),
            _ => return Err(WantedError::Form),
        };
        let hosts = hosts.split(',').map(|host| server(name, host)).collect::<Result<_, _>>()?;
        Ok(Self { name: name.to_owned(), source, hosts })
    }
}

/// One server.
fn server(name: &str, text: &str) -> Result<Destination, WantedError> {
    let (name, host) = (name.to_owned(), text.to_owned());
    if text.contains('*') || text.contains('/') {
        return Err(WantedError::Pattern { name, host });
    }
    if let Ok(host) = Host::from_bytes(text.as_bytes()) {
        return Ok(Destination { host, port: HTTPS, zone: 0 });
    }
    match text.parse::<Destination>() {
        Ok(to) if to.port != 0 && to.zone == 0 => Ok(to),
        _ => Err(WantedError::Host { name, host }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read() {
        let wanted = |text: &str| text.parse::<Wanted>().unwrap();
        let read = wanted("API_KEY=file:/run/a@b/key@api.example,[2001:db8::1]:8443,192.0.2.1");
        assert_eq!(read.source, Source::File("/run/a@b/key".to_owned()));
        let hosts: Vec<_> = read.hosts.iter().map(Destination::to_string).collect();
        assert_eq!(hosts, ["api.example:443", "[2001:db8::1]:8443", "192.0.2.1:443"]);
        let read = wanted("_k2=env:TOKEN@API.Example:8443");
        assert_eq!((&*read.name, read.source), ("_k2", Source::Variable("TOKEN".to_owned())));
        assert_eq!(read.hosts[0].to_string(), "api.example:8443");
    }

    #[test]
    fn wrong_arguments_are_refused_and_no_error_shows_a_secret() {
        let error = |text: &str| text.parse::<Wanted>().unwrap_err();
        for text in [
            "API_KEY",
            "API_KEY=hunter2@api.example",
            "API_KEY=file:@api.example",
            "API_KEY=env:@api.example",
            "API_KEY=env:a-hunter2@api.example",
            "API_KEY=hunter2",
        ] {
            assert_eq!(error(text), WantedError::Form, "{text}");
            assert!(!error(text).to_string().contains("hunter2"));
        }
        for name in ["", "1A", "A-B", "Ä"] {
            assert_eq!(error(&format!("{name}=file:x@a.example")), WantedError::Name(name.to_owned()));
        }
        for host in ["*.example", "*", "10.0.0.0/8"] {
            let got = error(&format!("A=file:x@{host}"));
            assert!(matches!(got, WantedError::Pattern { .. }), "{host}: {got}");
        }
        for host in ["", "a.example:", "a.example:0", "a.example:https", "a b"] {
            let got = error(&format!("A=file:x@{host}"));
            assert!(matches!(got, WantedError::Host { .. }), "{host}: {got}");
        }
    }
}
