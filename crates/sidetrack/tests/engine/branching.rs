//! A branch in the packet engine: the payload of a connection chooses its arm, and all arms merge.

use crate::site::{ENGINE, Site, WAYS, engine_by};
use sidetrack_testkit::{LIMIT, is_root};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};

/// Says something to the server, which greets and echoes. Returns the echo.
pub(crate) fn say(words: &'static str) -> String {
    let stream = TcpStream::connect_timeout(&ENGINE.parse().expect("an address"), LIMIT).expect("connected");
    stream.set_read_timeout(Some(LIMIT)).expect("limit");
    (&stream).write_all(words.as_bytes()).expect("sent");
    let mut reading = BufReader::new(stream.try_clone().expect("a copy"));
    reading.read_line(&mut String::new()).expect("greeted");
    stream.shutdown(Shutdown::Write).expect("open");
    let mut back = String::new();
    reading.read_to_string(&mut back).expect("all of the echo, and the end");
    back
}

/// Says something and waits for the end. Returns whether that is a reset.
pub(crate) fn is_reset(words: &[u8]) -> bool {
    let mut stream =
        TcpStream::connect_timeout(&ENGINE.parse().expect("an address"), LIMIT).expect("connected");
    stream.set_read_timeout(Some(LIMIT)).expect("limit");
    stream.write_all(words).expect("sent");
    let ended = stream.read_to_end(&mut Vec::new());
    ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
}

#[test]
fn the_payload_chooses_the_arm_of_a_flow_without_sockets() {
    if !is_root() {
        return;
    }
    let functions = "\n[function.way]\nkind = \"branch\"\narms = [{ name = \"web\", match = { host = \"*.example\" }, chain = \
                     [\"shout\"] }, { name = \"words\", prefix = \"WORDS\", chain = [\"gate\", \"scrub\"] }]\n\
                     [function.shout]\nkind = \"replace\"\ndirection = \"up\"\nreplace = [{ find = \"dull\", with = \"DULL\" }]\n\
                     [function.scrub]\nkind = \"replace\"\ndirection = \"up\"\nreplace = [{ find = \"dull\", with = \"shining\" }]\n\
                     [function.gate]\nkind = \"filter\"\ndeny_words = \"secret\"\n[function.all]\nkind = \"count\"\n\
                     [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nchain = [\"way\", \"all\"]\n";
    for way in WAYS {
        let mut site = Site::taking_frames();
        let server = site.server("10.0.2.1");
        // The server is asked once the client has said something. It greets, and a greeting before the client's first bytes
        // would leave the choice open.
        let choose = format!("engine = {{ choose = [{{ regex = '.', to = \"{}\" }}],", server.address);
        let listen = engine_by(way, &format!("to = \"{}\"", server.address)).replace("engine = {", &choose);
        site.start("default = \"direct\"\n", &format!("{listen}{functions}"));
        for (said, back) in [
            (
                "GET / HTTP/1.1\r\nHost: a.example\r\n\r\na dull day",
                "GET / HTTP/1.1\r\nHost: a.example\r\n\r\na DULL day",
            ),
            ("WORDS on a dull day", "WORDS on a shining day"),
            ("a dull day", "a dull day"),
        ] {
            assert_eq!(site.line.client.run(move || say(said)), back, "{way}");
            let record = site.record();
            assert_eq!(record.text("reason"), "ok", "{way}: {said}");
        }
        assert!(site.line.client.run(|| is_reset(b"WORDS and a secret")), "{way}");
        let record = site.record();
        assert_eq!(record.text("reason"), "function_refused", "{way}");
        assert!(record.text("detail").contains("function 'gate'"), "{way}");
    }
}
