//! Authentication of a whole connection instead of a single request (NTLM, and Negotiate of RFC 4559): finds the
//! messages that belong to it.
//!
//! RFC 9110 Sec. 11.2 does not allow a scheme to assume that all requests of a connection come from one user agent.
//! These schemes assume it all the same. So a connection that carried such a message serves only the client that sent
//! it, until it is closed.

use super::fields::{Fields, same_name};

/// Schemes that authenticate each request by itself: the registered ones, and those in wide use.
const OF_A_REQUEST: [&[u8]; 25] = [
    b"apikey",
    b"aws",
    b"aws4-ecdsa-p256-sha256",
    b"aws4-hmac-sha256",
    b"basic",
    b"bearer",
    b"concealed",
    b"digest",
    b"dpop",
    b"gnap",
    b"goog4-rsa-sha256",
    b"hawk",
    b"hoba",
    b"key",
    b"mutual",
    b"oauth",
    b"privatetoken",
    b"scram-sha-1",
    b"scram-sha-256",
    b"sharedkey",
    b"sharedkeylite",
    b"signature",
    b"token",
    b"vapid",
    b"webpush",
];

/// Schemes that are known to authenticate the connection.
const OF_A_CONNECTION: [&[u8]; 5] = [b"kerberos", b"msnegotiate", b"negotiate", b"nego2", b"ntlm"];

/// The field that tells clients that this proxy does not share such connections (RFC 4559 Sec. 6). Clients use the
/// schemes only if they see it.
pub const PROXY_SUPPORT: (&str, &str) = ("Proxy-Support", "Session-Based-Authentication");

/// Whether a request may authenticate its connection. Credentials of an unknown scheme count, too, because their
/// effect on the connection is not known.
pub fn request_binds(fields: &Fields) -> bool {
    ["authorization", "proxy-authorization"].iter().any(|name| {
        fields.all(name).any(|value| {
            let scheme = scheme_of(value);
            !scheme.is_empty() && !is_in(&OF_A_REQUEST, scheme)
        })
    })
}

/// Whether a request names a scheme that is known to authenticate the connection.
pub fn request_needs_own_connection(fields: &Fields) -> bool {
    ["authorization", "proxy-authorization"]
        .iter()
        .any(|name| fields.all(name).any(|value| is_in(&OF_A_CONNECTION, scheme_of(value))))
}

/// Whether a response is part of the authentication of its connection. It offers or continues such a scheme, or says
/// that the connection is authenticated from now on (`Persistent-Auth`).
pub fn response_binds(fields: &Fields) -> bool {
    let persists = |value: &[u8]| !same_name(value, b"false");
    fields.all("persistent-auth").any(persists) || challenges(fields)
}

/// Whether a response offers or continues a scheme that authenticates the connection.
pub fn challenges(fields: &Fields) -> bool {
    ["www-authenticate", "proxy-authenticate"].iter().any(|name| {
        // Several challenges may share a line, and so may the parameters of one challenge. Each member begins with
        // its scheme or with a parameter name, and no parameter has the name of one of these schemes.
        fields.members(name).any(|member| is_in(&OF_A_CONNECTION, scheme_of(member)))
    })
}

/// Returns the scheme of credentials or of a challenge.
fn scheme_of(value: &[u8]) -> &[u8] {
    value.split(|byte| matches!(byte, b' ' | b'\t' | b'=')).next().unwrap_or_default()
}

fn is_in(list: &[&[u8]], scheme: &[u8]) -> bool {
    list.iter().any(|other| same_name(scheme, other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_connection_schemes_and_of_unknown_ones_bind() {
        for (name, value, binds, is_known) in [
            ("Authorization", "NTLM TlRMTVNTUAABAAAA", true, true),
            ("authorization", "ntlm TlRMTVNTUAABAAAA", true, true),
            ("Authorization", "Negotiate YII", true, true),
            ("Proxy-Authorization", "NEGOTIATE YII", true, true),
            ("Authorization", "Kerberos x", true, true),
            ("Authorization", "X-Own-Scheme abc", true, false),
            ("Authorization", "7f3a", true, false),
            ("Authorization", "Basic YTpi", false, false),
            ("Authorization", "bearer x", false, false),
            ("Authorization", "Digest username=\"NTLM\"", false, false),
            ("Authorization", "AWS4-HMAC-SHA256 Credential=x", false, false),
            ("Authorization", "", false, false),
            ("X-Authorization", "NTLM x", false, false),
        ] {
            let fields = Fields::from([("Host", "h"), (name, value)]);
            assert_eq!(request_binds(&fields), binds, "{name}: {value}");
            assert_eq!(request_needs_own_connection(&fields), is_known, "{name}: {value}");
        }
    }

    #[test]
    fn responses_bind_by_their_challenge_or_by_their_word() {
        for (name, value, binds) in [
            ("WWW-Authenticate", "NTLM", true),
            ("WWW-Authenticate", "Negotiate oYG2", true),
            ("WWW-Authenticate", "Basic realm=\"a, NTLM\", Negotiate", true),
            ("Proxy-Authenticate", "ntlm TlRM", true),
            ("WWW-Authenticate", "Basic realm=\"NTLM\"", false),
            ("WWW-Authenticate", "Bearer", false),
            ("Persistent-Auth", "true", true),
            ("Persistent-Auth", "false", false),
            ("Authentication-Info", "nextnonce=\"x\"", false),
        ] {
            assert_eq!(response_binds(&Fields::from([(name, value)])), binds, "{name}: {value}");
        }
    }
}
