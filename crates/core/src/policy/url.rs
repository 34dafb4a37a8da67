//! URL patterns, and the two forms of a URL that they are compared with.

use crate::filter::fits;
use crate::http::uri::{Resource, normalised_escapes};

/// The URL of a request, as it was written, and normalised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    written: String,
    /// The normalised form. `None`: equal to the written form.
    normal: Option<String>,
}

impl Url {
    /// Makes both forms of the URL of a resource.
    pub fn of(resource: &Resource) -> Self {
        let written = resource.url();
        let normal = Some(resource.normal_url()).filter(|normal| *normal != written);
        Self { written, normal }
    }

    /// Returns the URL as it was written: scheme, host, port if it is not the default one, path and query.
    pub fn written(&self) -> &str {
        &self.written
    }

    /// Returns the URL as servers understand it (RFC 3986 Sec. 6.2.2): unreserved characters decoded, other escapes
    /// in upper case, no dot segments.
    pub fn normal(&self) -> &str {
        self.normal.as_deref().unwrap_or(&self.written)
    }
}

/// A pattern for whole URLs, in which `*` stands for any text and `?` for one character.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UrlPattern {
    written: Box<str>,
    /// The pattern for normalised URLs. `None`: equal to the written pattern.
    normal: Option<Box<str>>,
}

impl UrlPattern {
    /// Makes a pattern from the text in the configuration.
    pub fn new(text: &str) -> Self {
        let normal = normal_pattern(text);
        Self { written: text.into(), normal: (normal != text).then(|| normal.into()) }
    }

    /// Returns the pattern as in the configuration.
    pub fn as_str(&self) -> &str {
        &self.written
    }

    /// Whether a URL matches. A rule that denies also compares the written form, because the server may use either
    /// form.
    pub(super) fn fits(&self, url: &Url, denies: bool) -> bool {
        let normal = self.normal.as_deref().unwrap_or(&self.written);
        fits(normal, url.normal()) || denies && fits(&self.written, url.written())
    }
}

/// Normalises a pattern: scheme and host in lower case, without the default port, and the escapes of the rest as in
/// normalised URLs.
fn normal_pattern(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return normalised_escapes(text) };
    let end = rest.find('/').unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let (scheme, authority) = (scheme.to_ascii_lowercase(), authority.to_ascii_lowercase());
    let own_port = match &*scheme {
        "http" => ":80",
        "https" => ":443",
        _ => ":",
    };
    let authority = authority.strip_suffix(own_port).or(authority.strip_suffix(':')).unwrap_or(&authority);
    format!("{scheme}://{authority}{}", normalised_escapes(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::message::Method;
    use proptest::prelude::*;

    fn url(text: &str) -> Url {
        Url::of(&Resource::parse(text.as_bytes(), &Method::Get).unwrap())
    }

    #[test]
    fn spellings_of_one_url_fit_one_pattern() {
        let pattern = UrlPattern::new("http://web.example/forbidden*");
        for text in [
            "http://web.example/forbidden",
            "http://web.example/%66orbidden",
            "HTTP://Web.Example:80/%66%6Frbidden",
            "http://web.example:/forbidden?q",
            "http://web.example./forbidden/x",
            "http://web.example/a/../forbidden",
            "http://web.example/./%2E/a/%2e%2e/forbidden",
        ] {
            assert!(pattern.fits(&url(text), true) && pattern.fits(&url(text), false), "{text}");
        }
        for text in
            ["http://web.example/%46orbidden", "http://web.example:81/forbidden", "http://x/forbidden"]
        {
            assert!(!pattern.fits(&url(text), true), "{text}");
        }
        let slash = UrlPattern::new("http://WEB.example:80/a%2fb*");
        assert!(
            slash.fits(&url("http://web.example/a%2Fb"), false)
                && !slash.fits(&url("http://web.example/a/b"), false)
        );
        assert!(UrlPattern::new("https://a:443/*").fits(&url("https://a/"), false));
    }

    #[test]
    fn a_written_form_denies_but_allows_nothing() {
        let pattern = UrlPattern::new("http://web.example/open/*");
        let out = url("http://web.example/open/../secret");
        assert!(pattern.fits(&out, true), "some servers look at what is written");
        assert!(!pattern.fits(&out, false), "and those that do not have let it out of the folder");
    }

    proptest! {
        /// Escape any unreserved characters, and add any path out of a folder: a rule that denies still matches.
        #[test]
        fn no_spelling_passes_by(
            path in "[a-zA-Z0-9._~-]{1,12}",
            escaped in prop::collection::vec(any::<(bool, bool)>(), 12),
            before in "(/x/\\.\\.|/\\.|/%2e|/y/%2E%2e){0,3}",
        ) {
            prop_assume!(path != "." && path != "..");
            let spelled: String = path.bytes().zip(escaped).map(|(byte, (escape, upper))| match (escape, upper) {
                (false, _) => char::from(byte).to_string(),
                (true, false) => format!("%{byte:02x}"),
                (true, true) => format!("%{byte:02X}"),
            }).collect();
            let pattern = UrlPattern::new(&format!("http://web.example/{path}"));
            let spelled = url(&format!("http://web.example{before}/{spelled}"));
            prop_assert!(pattern.fits(&spelled, true) && pattern.fits(&spelled, false), "{:?}", spelled);
        }

        /// Normalising twice changes nothing.
        #[test]
        fn a_normal_url_is_normal(path in "(/|%2[eEfF]|%[0-9a-fA-F]{2}|[a-z.]|\\?|%){0,20}") {
            let once = url(&format!("http://web.example/{path}"));
            let again = url(once.normal());
            prop_assert_eq!(again.normal(), once.normal());
        }
    }
}
