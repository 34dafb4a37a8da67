//! Handshakes in memory: which peers are trusted and which are rejected, at both ends.

use super::*;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection};

const ALPN: &[u8] = b"test/1";

/// Shakes hands until both are done or one rejects the other.
fn handshake(
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: &str,
) -> Result<(ClientConnection, ServerConnection), String> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut client = ClientConnection::new(client, name).unwrap();
    let mut server = ServerConnection::new(server).unwrap();
    for _ in 0..10 {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            server.read_tls(&mut rest).unwrap();
            server.process_new_packets().map_err(|error| format!("server: {error}"))?;
        }
        let mut bytes = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            client.read_tls(&mut rest).unwrap();
            client.process_new_packets().map_err(|error| format!("client: {error}"))?;
        }
    }
    assert!(!client.is_handshaking() && !server.is_handshaking());
    Ok((client, server))
}

/// Completes a handshake; returns the names by which the ends know each other.
fn shake(client: &Mutual, server: &Mutual, name: &str) -> Result<(String, String), String> {
    let (client, server) = handshake(client.client(), server.server(), name)?;
    assert_eq!(client.alpn_protocol(), Some(ALPN));
    let name = |certificates: Option<&[CertificateDer<'static>]>| peer_name(&certificates.unwrap()[0]);
    Ok((name(client.peer_certificates()), name(server.peer_certificates())))
}

/// A certificate that may not sign, and one that it signed nevertheless.
fn leaf_and_signed(leaf: &str, name: &str) -> (Made, Made) {
    let params = |name: &str| rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
    let made = |certificate: &rcgen::Certificate, key: &rcgen::KeyPair| Made {
        certificate_pem: certificate.pem(),
        key_pem: key.serialize_pem(),
    };
    let [leaf_key, key] = [(); 2].map(|()| rcgen::KeyPair::generate().unwrap());
    let own = made(&params(leaf).self_signed(&leaf_key).unwrap(), &leaf_key);
    let issuer = rcgen::Issuer::new(params(leaf), leaf_key);
    let signed = made(&params(name).signed_by(&key, &issuer).unwrap(), &key);
    (own, signed)
}

#[test]
fn a_leaf_as_ca_of_a_tunnel_counts_for_itself_at_both_ends() {
    let ca = authority(30).unwrap();
    let (leaf, other) = leaf_and_signed("leaf.example", "other.example");
    let honest = signed("honest.example", 30, &ca.identity_pem()).unwrap();
    // The authority and the leaf are listed together, and the leaf alone.
    for listed in [format!("{}{}", ca.certificate_pem, leaf.certificate_pem), leaf.certificate_pem.clone()] {
        let mutual = |made: &Made, listed: &str| {
            Mutual::new(&made.identity_pem(), Trust::Authority(listed.into()), ALPN).unwrap()
        };
        let near = mutual(&honest, &listed);
        let all = format!("{}{}", ca.certificate_pem, honest.certificate_pem);
        let (leaf, other) = (mutual(&leaf, &all), mutual(&other, &all));
        assert!(shake(&near, &leaf, "leaf.example").is_ok(), "as a server");
        assert!(shake(&leaf, &near, "honest.example").is_ok(), "as a client");
        assert!(shake(&near, &leaf, "other.example").unwrap_err().starts_with("client: "), "the name counts");
        assert!(shake(&near, &other, "other.example").unwrap_err().starts_with("client: "));
        assert!(shake(&other, &near, "honest.example").unwrap_err().starts_with("server: "));
    }
}

#[test]
fn a_leaf_in_the_file_of_a_location_counts_for_itself() {
    let (leaf, other) = leaf_and_signed("leaf.example", "other.example");
    let ca = authority(30).unwrap();
    let server = |made: &Made| {
        let key = PrivateKeyDer::from_pem_slice(made.key_pem.as_bytes()).unwrap();
        let config =
            ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
        let chain = certificates(&made.certificate_pem).unwrap();
        Arc::new(config.with_no_client_auth().with_single_cert(chain, key).unwrap())
    };
    let signed = signed("signed.example", 30, &ca.identity_pem()).unwrap();
    for listed in [format!("{}{}", ca.certificate_pem, leaf.certificate_pem), leaf.certificate_pem.clone()] {
        let with_ca = listed != leaf.certificate_pem;
        let shake = |made: &Made, name: &str| {
            handshake(Arc::new(towards(&listed, None).unwrap()), server(made), name).map(drop)
        };
        assert_eq!(shake(&leaf, "leaf.example"), Ok(()));
        assert!(shake(&leaf, "other.example").is_err(), "the name counts");
        assert!(shake(&other, "other.example").is_err(), "a leaf signs for nothing");
        assert_eq!(shake(&signed, "signed.example").is_ok(), with_ca);
    }
}

fn pinned(own: &Made, other: &Made) -> Mutual {
    let pins = vec![Pin::of_pem(&other.certificate_pem).unwrap()];
    Mutual::new(&own.identity_pem(), Trust::Pins(pins), ALPN).unwrap()
}

#[test]
fn pinned_keys_are_believed_and_no_others() {
    let [a, b, c] = ["a.example", "b.example", "c.example"].map(|name| self_signed(name, 1).unwrap());
    let names = shake(&pinned(&a, &b), &pinned(&b, &a), "whatever").unwrap();
    assert_eq!(names, ("b.example".to_owned(), "a.example".to_owned()));
    let error = shake(&pinned(&a, &c), &pinned(&b, &a), "b.example").unwrap_err();
    assert!(error.starts_with("client: "), "{error}");
    let error = shake(&pinned(&a, &b), &pinned(&b, &c), "b.example").unwrap_err();
    assert!(error.starts_with("server: "), "{error}");
}

#[test]
fn an_authority_vouches_for_its_own_and_for_the_name() {
    let (ca, other_ca) = (authority(1).unwrap(), authority(1).unwrap());
    let mutual = |ca: &Made, name: &str| {
        let made = signed(name, 1, &ca.identity_pem()).unwrap();
        Mutual::new(&made.identity_pem(), Trust::Authority(ca.certificate_pem.as_str().into()), ALPN).unwrap()
    };
    let (near, far) = (mutual(&ca, "near"), mutual(&ca, "far.example"));
    let names = shake(&near, &far, "far.example").unwrap();
    assert_eq!(names, ("far.example".to_owned(), "near".to_owned()));
    assert!(shake(&near, &far, "other.example").unwrap_err().starts_with("client: "));
    let stranger = mutual(&other_ca, "far.example");
    assert!(shake(&near, &stranger, "far.example").unwrap_err().starts_with("client: "));
    // The client trusts the server, but the server does not trust the client.
    let made = signed("near", 1, &other_ca.identity_pem()).unwrap();
    let trust = Trust::Authority(ca.certificate_pem.as_str().into());
    let liar = Mutual::new(&made.identity_pem(), trust, ALPN).unwrap();
    assert!(shake(&liar, &far, "far.example").unwrap_err().starts_with("server: "));
}

#[test]
fn what_is_no_identity_is_named() {
    let made = self_signed("a", 1).unwrap();
    for (text, word) in [("", "CERTIFICATE"), (made.certificate_pem.as_str(), "PEM"), ("x", "CERTIFICATE")] {
        let error = Mutual::new(text, Trust::Pins(Vec::new()), ALPN).unwrap_err().to_string();
        assert!(error.contains(word), "{text}: {error}");
    }
    let other = self_signed("b", 1).unwrap();
    let mixed = format!("{}{}", made.certificate_pem, other.key_pem);
    assert!(matches!(Mutual::new(&mixed, Trust::Pins(Vec::new()), ALPN), Err(TlsError::Tls(_))));
    assert!(matches!(signed("x", 1, &made.identity_pem()), Err(MakeError::NoAuthority(_))));
    assert!(!format!("{:?}", pinned(&made, &other)).contains("PRIVATE"));
}

#[test]
fn pins_read_as_they_are_written() {
    let pin = Pin::of_key(b"key");
    assert_eq!(pin.to_string().parse(), Ok(pin));
    assert_eq!(pin.to_string(), "sha256//LHDhK3oGRvkiefQnx7OOczTY5Tic/xZ6HcMOc/gmtoM=");
    for bad in ["", "sha256//", "sha256//AAAA", "sha1//LHDhK3oGRvkiefQnx7OOczTY5Tic/xZ6HcMOc/gmtoM="] {
        assert_eq!(bad.parse::<Pin>(), Err(PinError), "{bad}");
    }
}

#[test]
fn a_pin_may_have_a_name_and_then_only_this_name_is_trusted() {
    let made = self_signed("near.test", 1).expect("a key");
    let pin = Pin::of_pem(&made.certificate_pem).expect("a pin");
    assert_eq!(RawKey::of_pem(&made.identity_pem()).expect("a key").pin(), pin);
    for (text, name) in [(pin.to_string(), None), (format!("Near.Test={pin}"), Some("near.test".to_owned()))]
    {
        let peer: Peer = text.parse().expect("a peer");
        assert_eq!(peer, Peer { pin, name });
        assert_eq!(
            peer.to_string(),
            text.to_ascii_lowercase().replace(&pin.to_string().to_ascii_lowercase(), &pin.to_string())
        );
    }
    for wrong in
        [format!("a b={pin}"), format!("={pin}"), format!("near.test{pin}"), "near.test=x".to_owned()]
    {
        assert_eq!(wrong.parse::<Peer>(), Err(PinError), "{wrong}");
    }
    let own = made.identity_pem();
    let with = |peers: &[&Peer]| {
        Mutual::new(&own, Trust::Peers(peers.iter().map(|peer| (*peer).clone()).collect()), b"test")
            .expect("an end")
    };
    let (one, two) = (Peer::from(pin), Peer { pin, name: Some("other.test".into()) });
    let (small, large) = (with(&[&one]), with(&[&two, &one]));
    assert!(small.grows_into(&large) && small.grows_into(&small) && !large.grows_into(&small));
    let copy = small.clone();
    copy.grow(&large);
    assert!(small == large && !small.grows_into(&with(&[&one])));
}
