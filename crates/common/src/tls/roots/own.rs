//! Certificates that are valid only for themselves, for example those of development servers, which no authority signed.

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
};
use sidetrack_core::flow::Host;
use std::net::IpAddr;
use std::sync::Arc;

/// The object identifier of basicConstraints, 2.5.29.19, in DER.
const BASIC_CONSTRAINTS: [u8; 5] = [0x06, 0x03, 0x55, 0x1d, 0x13];
/// TRUE in DER.
const TRUE: [u8; 3] = [0x01, 0x01, 0xff];

/// Whether a certificate states that it is an authority (RFC 5280 Sec. 4.2.1.9). If it states nothing, it is not one.
pub(super) fn may_sign(certificate: &CertificateDer<'_>) -> bool {
    let der = certificate.as_ref();
    let Some(at) = der.windows(BASIC_CONSTRAINTS.len()).position(|bytes| bytes == BASIC_CONSTRAINTS) else {
        return false;
    };
    let rest = der.get(at + BASIC_CONSTRAINTS.len()..).unwrap_or_default();
    // The extension may be critical; then OCTET STRING, SEQUENCE, and `cA` as its first element.
    let rest = rest.strip_prefix(&TRUE).unwrap_or(rest);
    matches!(rest, [0x04, _, 0x30, len, inner @ ..] if *len >= 3 && inner.starts_with(&TRUE))
}

/// Certificates that are valid only for themselves.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) certificates: Arc<[CertificateDer<'static>]>,
    /// There are no authorities. The anchor that rustls was given is one of these certificates and must not sign.
    pub(super) alone: bool,
}

impl Named {
    /// Whether the peer shows one of them. The handshake then proves that the peer has the key.
    fn has(&self, shown: &CertificateDer<'_>) -> bool {
        self.certificates.iter().any(|named| named.as_ref() == shown.as_ref())
    }

    /// # Errors
    /// There are no authorities to ask.
    fn ask_authorities(&self) -> Result<(), Error> {
        if self.alone {
            return Err(Error::InvalidCertificate(CertificateError::UnknownIssuer));
        }
        Ok(())
    }
}

/// A store with this certificate alone, so that rustls checks its dates and purposes.
fn store_of(shown: &CertificateDer<'_>) -> Result<Arc<RootCertStore>, Error> {
    let mut alone = RootCertStore::empty();
    alone.add(shown.clone().into_owned())?;
    Ok(Arc::new(alone))
}

/// Accepts servers whose certificate an authority signed or is named, and servers that are not verified.
#[derive(Debug)]
pub(super) struct Servers {
    pub(super) of_authorities: Arc<WebPkiServerVerifier>,
    pub(super) named: Named,
    pub(super) unverified: Arc<[Host]>,
}

impl Servers {
    /// Accepts a named certificate within its dates, for the names in it.
    fn itself(shown: &CertificateDer<'_>, name: &ServerName<'_>, now: UnixTime) -> Result<(), Error> {
        let store = store_of(shown)?;
        let verifier = WebPkiServerVerifier::builder_with_provider(store, super::provider()).build();
        let verifier = verifier.map_err(|error| Error::General(error.to_string()))?;
        match verifier.verify_server_cert(shown, &[], name, &[], now) {
            Ok(_) => Ok(()),
            // webpki checks the dates before the issuer, and before whether the certificate is an authority. Certificates of
            // `openssl req -x509` say that they are one. Only these two errors are excused.
            Err(Error::InvalidCertificate(why)) if is_excused(&why) => {
                let parsed = webpki::EndEntityCert::try_from(shown)
                    .map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))?;
                parsed
                    .verify_is_valid_for_subject_name(name)
                    .map_err(|_| Error::InvalidCertificate(CertificateError::NotValidForName))
            }
            Err(error) => Err(error),
        }
    }

    fn is_unverified(&self, name: &ServerName<'_>) -> bool {
        self.unverified.iter().any(|host| match (host, name) {
            (Host::Name(host), ServerName::DnsName(name)) => {
                host.as_str().eq_ignore_ascii_case(name.as_ref())
            }
            (Host::Ip(host), ServerName::IpAddress(ip)) => *host == IpAddr::from(*ip),
            _ => false,
        })
    }
}

/// Accepts clients whose certificate an authority signed or is named.
#[derive(Debug)]
pub(super) struct Clients {
    pub(super) of_authorities: Arc<dyn ClientCertVerifier>,
    pub(super) named: Named,
}

impl Clients {
    /// The same as for a server, without a name.
    fn itself(shown: &CertificateDer<'_>, now: UnixTime) -> Result<(), Error> {
        let store = store_of(shown)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(store, super::provider()).build();
        let verifier = verifier.map_err(|error| Error::General(error.to_string()))?;
        match verifier.verify_client_cert(shown, &[], now) {
            Err(Error::InvalidCertificate(why)) if is_excused(&why) => Ok(()),
            result => result.map(drop),
        }
    }
}

fn is_excused(why: &CertificateError) -> bool {
    match why {
        CertificateError::UnknownIssuer => true,
        CertificateError::Other(other) => {
            matches!(other.0.downcast_ref::<webpki::Error>(), Some(webpki::Error::CaUsedAsEndEntity))
        }
        _ => false,
    }
}

/// Leaves signatures to the verifier of the authorities. The methods are the same in both of rustls' traits.
macro_rules! signatures_of_authorities {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.of_authorities.verify_tls12_signature(message, certificate, signature)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.of_authorities.verify_tls13_signature(message, certificate, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.of_authorities.supported_verify_schemes()
        }
    };
}

impl ServerCertVerifier for Servers {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.is_unverified(name) {
            return Ok(ServerCertVerified::assertion());
        }
        if self.named.has(shown) {
            return Self::itself(shown, name, now).map(|()| ServerCertVerified::assertion());
        }
        self.named.ask_authorities()?;
        self.of_authorities.verify_server_cert(shown, others, name, ocsp, now)
    }

    signatures_of_authorities!();
}

impl ClientCertVerifier for Clients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A client may withhold a certificate whose authority is not listed. Without a list it may show any.
        let signs = self.named.certificates.iter().all(may_sign);
        if signs { self.of_authorities.root_hint_subjects() } else { &[] }
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if self.named.has(shown) {
            return Self::itself(shown, now).map(|()| ClientCertVerified::assertion());
        }
        self.named.ask_authorities()?;
        self.of_authorities.verify_client_cert(shown, others, now)
    }

    signatures_of_authorities!();
}

#[cfg(test)]
mod tests {
    use crate::tls::{Roots, certificates};
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    use rustls::pki_types::UnixTime;
    use std::time::Duration;

    /// Whether a server with this certificate and name is trusted if the user names `trust`.
    fn believed(trust: &str, shown: &str, name: &str, now: UnixTime) -> Result<(), String> {
        let verifier = Roots::of_system_and(Some(trust)).unwrap().verifier().unwrap();
        let (shown, name) = (certificates(shown).unwrap(), name.to_owned().try_into().unwrap());
        let done = verifier.verify_server_cert(&shown[0], &[], &name, &[], now);
        done.map(|_| ()).map_err(|error| error.to_string())
    }

    fn params(name: &str, is_ca: IsCa) -> CertificateParams {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.is_ca = is_ca;
        (params.not_before, params.not_after) =
            (rcgen::date_time_ymd(2020, 1, 1), rcgen::date_time_ymd(2100, 1, 1));
        params
    }

    #[test]
    fn a_named_certificate_is_believed_for_itself_alone() {
        let now = UnixTime::since_unix_epoch(Duration::from_secs(1_800_000_000));
        let late = UnixTime::since_unix_epoch(Duration::from_secs(5_000_000_000));
        // Made like most tools make them, and like `openssl req -x509` does.
        for is_ca in [IsCa::NoCa, IsCa::ExplicitNoCa, IsCa::Ca(BasicConstraints::Unconstrained)] {
            let key = KeyPair::generate().unwrap();
            let signs = matches!(is_ca, IsCa::Ca(_));
            let params = params("dev.example", is_ca);
            let own = params.self_signed(&key).unwrap().pem();
            let stranger =
                self::params("dev.example", IsCa::NoCa).self_signed(&KeyPair::generate().unwrap()).unwrap();
            assert_eq!(believed(&own, &own, "dev.example", now), Ok(()), "signs: {signs}");
            assert!(believed(&own, &own, "other.example", now).is_err());
            assert!(believed(&own, &own, "dev.example", late).is_err(), "its time is over");
            assert!(believed(&own, &stranger.pem(), "dev.example", now).is_err());
            // A certificate that it signed is accepted only if it may sign.
            let issuer = Issuer::new(params, key);
            let other = KeyPair::generate().unwrap();
            let signed = self::params("bank.example", IsCa::NoCa).signed_by(&other, &issuer).unwrap().pem();
            assert_eq!(believed(&own, &signed, "bank.example", now).is_ok(), signs);
        }
    }
}
