//! A headless Chromium, driven by the DevTools protocol over two pipes: messages of JSON, each with a zero byte at its end. It
//! ends with the pipes.

use serde_json::{Value, json};
use sidetrack_testkit::LIMIT;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

/// Connects the pipes to the descriptors 3 and 4, where Chromium expects them.
const START: &str = r#"exec chromium "$@" 3<&0 4>&1 0</dev/null 1>&2"#;

/// Works as root and without a GPU, a session bus or a large /dev/shm; asks no server of its maker.
const OPTIONS: [&str; 12] = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-extensions",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
];

/// A browser with one tab.
pub(crate) struct Browser {
    child: Child,
    to: Option<ChildStdin>,
    from: Receiver<Value>,
    session: Option<String>,
    last_id: u64,
    /// Exceptions of scripts and violations of policies, as they came.
    pub(crate) complaints: Vec<String>,
    _home: tempfile::TempDir,
}

impl Browser {
    pub(crate) fn start() -> Self {
        let home = tempfile::tempdir().expect("a folder");
        let mut command = Command::new("sh");
        command.args(["-c", START, "chromium"]).args(OPTIONS);
        command.arg(format!("--user-data-dir={}", home.path().join("profile").display())).arg("about:blank");
        command
            .env("HOME", home.path())
            .env("XDG_RUNTIME_DIR", home.path())
            .env_remove("DBUS_SESSION_BUS_ADDRESS");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("sh");
        let to = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().expect("a pipe"));
        let (sender, from) = channel();
        std::thread::spawn(move || {
            for message in answers.split(0).map_while(Result::ok) {
                let value = serde_json::from_slice(&message).expect("JSON");
                if sender.send(value).is_err() {
                    return;
                }
            }
        });
        let mut browser =
            Self { child, to, from, session: None, last_id: 0, complaints: Vec::new(), _home: home };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", attach);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Calls a method of the protocol, and returns its result.
    pub(crate) fn call(&mut self, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let mut message = json!({"id": self.last_id, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        let to = self.to.as_mut().expect("open");
        to.write_all(format!("{message}\0").as_bytes()).expect("chromium runs: is the package installed?");
        let until = Instant::now() + LIMIT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let mut answer =
                self.from.recv_timeout(left).expect("chromium answers: is the package installed?");
            if answer["id"] == self.last_id {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].take();
            }
            self.note(&answer);
        }
    }

    fn note(&mut self, event: &Value) {
        let params = &event["params"];
        match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => self.complaints.push(params["exceptionDetails"].to_string()),
            Some("Log.entryAdded") if params["entry"]["source"] == "security" => {
                self.complaints.push(params["entry"].to_string());
            }
            _ => {}
        }
    }

    /// The value of an expression in the tab. A promise is awaited.
    pub(crate) fn eval(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let mut result = self.call("Runtime.evaluate", params);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {}", result["exceptionDetails"]);
        result["result"]["value"].take()
    }

    /// Waits until an expression is true.
    pub(crate) fn wait_for(&mut self, expression: &str) {
        let until = Instant::now() + LIMIT;
        while self.eval(&format!("(async () => Boolean(await ({expression})))()")) != true {
            if Instant::now() > until {
                let seen = self.eval("document.body.innerText");
                panic!(
                    "not true in time: {expression}\n{}\n{:?}",
                    seen.as_str().unwrap_or(""),
                    self.complaints
                );
            }
            std::thread::sleep(std::time::Duration::from_millis(30));
        }
    }

    /// Opens an address in the tab.
    pub(crate) fn open(&mut self, address: &str) {
        let gone = self.call("Page.navigate", json!({"url": address}));
        assert!(gone["errorText"].is_null(), "{gone}");
        self.wait_for("document.readyState === 'complete'");
    }

    /// Presses a key: a character, or the name of a key.
    pub(crate) fn press(&mut self, key: &str) {
        let code = match key {
            "Enter" => 13,
            "Escape" => 27,
            "Tab" => 9,
            "ArrowLeft" => 37,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            _ => 0,
        };
        let is_text = key.chars().count() == 1;
        let text = if key == "Enter" { "\r" } else { key };
        let mut down = json!({"type": "keyDown", "key": key, "windowsVirtualKeyCode": code});
        if is_text || key == "Enter" {
            down["text"] = text.into();
        }
        self.call("Input.dispatchKeyEvent", down);
        self.call(
            "Input.dispatchKeyEvent",
            json!({"type": "keyUp", "key": key, "windowsVirtualKeyCode": code}),
        );
    }

    /// Types a text into what has the focus.
    pub(crate) fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
    }

    /// Gives the tab this size in pixels, and this scheme of colours.
    pub(crate) fn be(&mut self, width: u32, height: u32, scheme: &str) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features);
    }

    /// Writes a picture of the tab, as PNG, into the folder that `SIDETRACK_PICTURES` names. Does nothing without one.
    pub(crate) fn picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("SIDETRACK_PICTURES") else { return };
        let answer = self.call("Page.captureScreenshot", json!({"format": "png"}));
        let data = data_encoding::BASE64.decode(answer["data"].as_str().expect("data").as_bytes());
        let path = std::path::Path::new(&folder).join(format!("{name}.png"));
        std::fs::write(path, data.expect("base64")).expect("written");
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The end of its pipe ends it.
        drop(self.to.take());
        let until = Instant::now() + LIMIT;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > until {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
