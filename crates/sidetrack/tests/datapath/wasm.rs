//! Functions in WebAssembly: what a module sees and changes, and the end of a flow whose module misbehaves.

use crate::node::Node;
use crate::peers::{Server, connect, expect_end, expect_reset};
use sidetrack::config::Config;
use sidetrack::wasm::Program;
use sidetrack_core::chain::{Chain, Offered};
use sidetrack_core::flow::{EndReason, Flow, Intercept, Protocol, Side};
use sidetrack_core::function::{Stop, WasmSpec};
use sidetrack_core::time::Instant;
use std::io::Write;
use std::net::{Shutdown, SocketAddr};

/// The module of `examples/engine-function`.
const MASK: &str = include_str!("../../../../examples/engine-function/mask.wat");

fn flow() -> Flow {
    Flow {
        protocol: Protocol::Tcp,
        intercept: Intercept::Socks,
        listener: "test".into(),
        client: "192.0.2.1:1000".parse().expect("an address"),
        orig_dst: "192.0.2.2:80".parse::<SocketAddr>().expect("an address").into(),
        host: None,
        process: None,
        user: None,
    }
}

fn spec(module: &[u8]) -> WasmSpec {
    WasmSpec {
        file: "test.wat".into(),
        module: module.into(),
        configuration: "end=!".into(),
        memory_bytes: 256 * 1024,
        fuel: 200_000,
    }
}

/// A chain of one module.
fn chain(module: &[u8]) -> Result<Chain, String> {
    let program = Program::new(&spec(module))?;
    let stage = program.stage(&"m".into(), &flow()).map_err(|stop| stop.detail)?;
    Chain::new(vec![("m".into(), stage)], Instant::ZERO).map_err(|stop| stop.detail)
}

/// Offers bytes and returns what comes out at once.
fn pass(chain: &mut Chain, from: Side, bytes: &[u8]) -> Result<Vec<u8>, Stop> {
    match chain.handle(Instant::ZERO, from, bytes)? {
        Offered::Unchanged => Ok(bytes.to_vec()),
        Offered::Inside => Ok(chain.take(from, usize::MAX).to_vec()),
    }
}

/// A module whose function for the client's data has this body.
fn module(body: &str) -> String {
    format!(
        "(module (import \"env\" \"proxy_get_buffer_bytes\" (func $get (param i32 i32 i32 i32 i32) (result i32)))
           (import \"env\" \"proxy_set_buffer_bytes\" (func $set (param i32 i32 i32 i32 i32) (result i32)))
           (import \"env\" \"proxy_get_property\" (func $property (param i32 i32 i32 i32) (result i32)))
           (import \"env\" \"proxy_continue_stream\" (func $continue (param i32) (result i32)))
           (import \"env\" \"proxy_grpc_send\" (func $other (param i32 i32 i32 i32) (result i32)))
           (memory (export \"memory\") 2) (data (i32.const 16) \"source\\00port\")
           (func (export \"malloc\") (param i32) (result i32) (i32.const 1024))
           (func (export \"proxy_on_downstream_data\") (param $flow i32) (param $size i32) (param $last i32) (result i32)
             {body}))"
    )
}

#[test]
fn a_module_changes_what_clients_send() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("mask.wat");
    std::fs::write(&file, MASK).expect("a file");
    let origin = Server::echo();
    let rule = format!(
        "carrier = 'direct'\nchain = ['mask']\n[function.mask]\nkind = 'wasm'\nmodule = '{}'\n",
        file.display()
    );
    let node = Node::reverse(origin.address, &rule);
    let mut client = connect(node.entry());
    let said: Vec<u8> = b"card 1234, ".repeat(20_000);
    let writer = {
        let mut client = client.try_clone().expect("a copy");
        let said = said.clone();
        std::thread::spawn(move || {
            client.write_all(&said).expect("an open stream");
            client.shutdown(Shutdown::Write).expect("an open stream");
        })
    };
    expect_end(&mut client, &b"card ****, ".repeat(20_000));
    writer.join().expect("no panic");
    node.ends_with(EndReason::Ok);
    // The module refuses zero bytes.
    let mut client = connect(node.entry());
    client.write_all(b"zero: \0").expect("an open stream");
    expect_reset(&mut client);
    let ended = node.ends_with(EndReason::FunctionRefused);
    assert_eq!(ended.detail.as_deref(), Some("function 'mask': the module closed the connection"));
}

#[test]
fn a_module_that_misbehaves_ends_the_flow_and_says_why() {
    let deep = "(block (loop (br 0))) (i32.const 0)";
    let grown = "(if (i32.eq (memory.grow (i32.const 100)) (i32.const -1)) (then unreachable)) (i32.const 0)";
    let far = "(i32.load (i32.const 2000000000))";
    for (body, words) in
        [("unreachable", "unreachable"), (deep, "fuel"), (grown, "unreachable"), (far, "bounds")]
    {
        let mut chain = chain(module(body).as_bytes()).expect("it starts");
        let stop = pass(&mut chain, Side::Client, b"hello").expect_err("a trap");
        assert_eq!(stop.reason, EndReason::FunctionFailed, "{body}");
        assert!(stop.detail.starts_with("function 'm': the module stopped: "), "{}", stop.detail);
        assert!(stop.detail.contains(words), "{body}: {}", stop.detail);
    }
    // Pointers that lie outside are answered with a code.
    let body = "(drop (call $set (i32.const 2) (i32.const 0) (i32.const 9) (i32.const -8) (i32.const 64)))
                (drop (call $property (i32.const -1) (i32.const 99) (i32.const 0) (i32.const 0)))
                (drop (call $get (i32.const 2) (i32.const 0) (i32.const 9) (i32.const -4) (i32.const -8)))
                (drop (call $set (i32.const 99) (i32.const 0) (i32.const 9) (i32.const 0) (i32.const 1)))
                (i32.ne (call $other (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)) (i32.const 12))";
    let mut chain = chain(module(body).as_bytes()).expect("it starts");
    assert_eq!(pass(&mut chain, Side::Client, b"hello").expect("it passes"), b"hello");
}

#[test]
fn a_module_holds_bytes_back_and_asks_about_the_flow() {
    // It holds the bytes until there are at least 8, and then puts the client's port before them.
    let body = "(if (i32.lt_u (local.get $size) (i32.const 8)) (then (return (i32.const 1))))
                (drop (call $property (i32.const 16) (i32.const 11) (i32.const 0) (i32.const 4)))
                (drop (call $set (i32.const 2) (i32.const 0) (i32.const 0) (i32.load (i32.const 0)) (i32.load (i32.const 4))))
                (i32.const 0)";
    let mut one = chain(module(body).as_bytes()).expect("it starts");
    assert_eq!(pass(&mut one, Side::Client, b"abc").expect("held"), b"");
    assert_eq!(pass(&mut one, Side::Server, b"answer").expect("not looked at"), b"answer");
    let expected = [&1000_i64.to_le_bytes()[..], b"abcdefgh"].concat();
    assert_eq!(pass(&mut one, Side::Client, b"defgh").expect("passes"), expected);
    // Held bytes pass at the end, and when the module says so.
    let mut held = chain(module(body).as_bytes()).expect("it starts");
    assert_eq!(pass(&mut held, Side::Client, b"abc").expect("held"), b"");
    held.end(Instant::ZERO, Side::Client).expect("an end");
    assert_eq!(held.take(Side::Client, usize::MAX), b"abc");
    let released = "(drop (call $continue (i32.const 2))) (i32.const 1)";
    let mut released = chain(module(released).as_bytes()).expect("it starts");
    assert_eq!(pass(&mut released, Side::Client, b"abc").expect("held, then released"), b"abc");
    // What it holds is bounded.
    let mut greedy = chain(module("(i32.const 1)").as_bytes()).expect("it starts");
    pass(&mut greedy, Side::Client, &[7; 65_536]).expect("as much as is offered at once");
    let stop = pass(&mut greedy, Side::Client, b"x").expect_err("too much");
    assert!(stop.detail.contains("holds back 65536 bytes"), "{}", stop.detail);
}

#[test]
fn bad_modules_are_refused_or_end_their_flows_and_nothing_panics() {
    for bad in [&b""[..], b"\0asm", b"\0asm\x01\0\0\0", b"(module", b"(module)", b"\xff\xfe"] {
        assert!(chain(bad).is_err());
    }
    let start =
        "(module (func $loop (loop (br 0))) (start $loop) (func (export \"proxy_on_upstream_data\")))";
    assert!(chain(start.as_bytes()).expect_err("a start that never ends").contains("fuel"));
    // Lines of the example, taken out, repeated and with other numbers.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let lines: Vec<_> = MASK.lines().collect();
    let mut ran = 0;
    for _ in 0..300 {
        let mut lines = lines.clone();
        let (one, two) = (next(lines.len()), next(lines.len()));
        match next(3) {
            0 => lines.retain({
                let mut at = 0;
                move |_| {
                    at += 1;
                    at != one + 1
                }
            }),
            1 => lines.insert(one, lines[two]),
            _ => lines.swap(one, two),
        }
        let mut text = lines.join("\n");
        let (find, with) =
            (["1024", "(i32.const 0)", "48", "i32.add", "64"], ["-1", "i32.sub", "(i32.const 7)", "65535"]);
        text = text.replacen(find[next(5)], with[next(4)], 1 + next(3));
        let Ok(mut chain) = chain(text.as_bytes()) else { continue };
        ran += 1;
        for _ in 0..3 {
            let bytes = vec![b'0' + next(9) as u8; 1 + next(3000)];
            if pass(&mut chain, Side::Client, &bytes).is_err() {
                break;
            }
        }
        let _ = chain.end(Instant::ZERO, Side::Client);
    }
    assert!(ran > 0, "none ran");
}

#[test]
fn the_file_of_a_module_is_checked_with_the_configuration() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("bad.wat"), "(module (func (export \"other\")))").expect("a file");
    std::fs::write(path("mask.wat"), MASK).expect("a file");
    let text = |keys: &str| {
        format!(
            "version = 1\ndefault = 'deny'\n[[listen]]\nkind = 'socks'\naddress = '127.0.0.1:1080'\n[function.m]\nkind = 'wasm'\n{keys}\n"
        )
    };
    let config = |keys: &str| Config::from_text("test.toml", &text(keys));
    for (keys, words) in [
        (String::new(), "a function in WebAssembly needs its `module`"),
        (format!("module = '{}'", path("none.wat")), "cannot read"),
        (format!("module = '{}'", path("bad.wat")), "it exports neither"),
        (format!("module = '{}'\nfuel = 0", path("mask.wat")), "0 is out of range"),
        (format!("module = '{}'\nuser = '1:1'", path("mask.wat")), "`user` means nothing with this kind"),
    ] {
        let error = config(&keys).expect_err("wrong").render(false);
        assert!(error.contains(words), "{keys}: {error}");
    }
    assert!(config(&format!("module = '{}'", path("mask.wat"))).is_ok());
}
