//! The screens beside the flows, in the browser of [`crate::browser`].

use crate::chromium::Browser;
use crate::support::{carried, ended, enter, flow, live};
use crate::{HOSTILE, Rig};
use sidetrack::live::LiveFlow;
use sidetrack_core::flow::EndReason;
use sidetrack_testkit::eventually;

/// Goes to a screen.
pub(crate) fn go(browser: &mut Browser, screen: &str) {
    browser.eval(&format!("location.hash = '{screen}'"));
    browser.wait_for(&format!(
        "document.querySelector('nav [aria-current]').getAttribute('href') === '#{screen}'"
    ));
}

/// Whether an element that fits shows this text, as an expression.
pub(crate) fn shown(element: &str, text: &str) -> String {
    format!("[...document.querySelectorAll('{element}')].some((one) => one.innerText.includes('{text}'))")
}

/// An entry of the map whose name begins so, as an expression.
pub(crate) fn entry(name: &str) -> String {
    format!(
        "[...document.querySelectorAll('.node')].find((node) => node.getAttribute('aria-label').startsWith('{name}'))"
    )
}

/// The map shows what flows pass. Keys move, and Enter shows the flows of an entry.
pub(crate) fn the_map(browser: &mut Browser) {
    go(browser, "map");
    for name in ["curl: 1 flow", "out: 2 flows", "socks6://gw:1080", "www.example", HOSTILE] {
        browser.wait_for(&entry(name));
    }
    browser.press("ArrowDown");
    for _ in 0..3 {
        if browser.eval("document.activeElement.getAttribute('aria-label').startsWith('curl:')") == true {
            break;
        }
        browser.press("ArrowDown");
    }
    browser.wait_for("document.querySelector('.mapnote').textContent.startsWith('curl: 1 flow · ')");
    browser.wait_for(&format!("{}.classList.contains('lit')", entry("www.example")));
    assert_eq!(browser.eval(&format!("{}.classList.contains('lit')", entry("10.0.0.1:"))), false);
    browser.press("ArrowRight");
    browser.wait_for("document.activeElement.getAttribute('aria-label').startsWith('out: 2 flows')");
    browser.press("ArrowLeft");
    browser.press("Enter");
    browser.wait_for("document.querySelector('#filter')?.value === 'proc == \"curl\"'");
    browser.wait_for("document.querySelectorAll('.body .row:not([hidden])').length === 1");
    go(browser, "map");
    browser.wait_for("document.querySelectorAll('.node .name').length === 4");
    shows_all(browser);
    the_map_is_saved(browser);
    go(browser, "flows");
}

/// Takes the filter away: the button stands on the map.
fn shows_all(browser: &mut Browser) {
    browser.eval(
        "[...document.querySelectorAll('.map .tools button')].find((button) => !button.hidden).click()",
    );
    browser.wait_for(&entry(HOSTILE));
}

/// Flows that the kernel carries stand on their screen, and lead to the flow.
pub(crate) fn the_fast_path(browser: &mut Browser, flow: &LiveFlow) {
    go(browser, "fastpath");
    browser.wait_for(&shown(".panel", "No flow has passed by user space yet"));
    flow.shunted();
    browser.wait_for(&shown(".panel caption", "Live flows whose bytes pass by user space"));
    browser.wait_for(&shown(".panel td", "10.0.0.1:22"));
    browser.eval("document.querySelector('.panel td button').click()");
    browser.wait_for("document.querySelector('#filter')?.value === 'id == 2'");
    browser.wait_for("document.querySelectorAll('.body .row:not([hidden])').length === 1");
    go(browser, "map");
    browser.wait_for("document.querySelectorAll('.node .name').length > 0");
    shows_all(browser);
    go(browser, "flows");
}

/// Of many entries, the last stands for several.
pub(crate) fn the_map_is_bounded(browser: &mut Browser, rig: &Rig) {
    go(browser, "map");
    let flows: Vec<_> = (0..40)
        .map(|at| {
            let mut known = flow(&format!("10.4.0.{at}:443"));
            known.host = Some(format!("many-{at}.example").parse().expect("a name"));
            let flow = live(200 + at, known, carried(None, &[]));
            (enter(&rig.ledger, &flow), flow)
        })
        .collect();
    browser.wait_for(&entry("12 others: 12 flows"));
    assert_eq!(
        browser.eval("[...document.querySelectorAll('.titles text')].at(-1).textContent"),
        "Destinations (30)"
    );
    for (slot, flow) in &flows {
        rig.ledger.leave(*slot, ended(flow, EndReason::Ok));
    }
    rig.recorder.lock().expect("whole").visit();
    browser.wait_for("!document.querySelector('.node.others')");
    go(browser, "flows");
}

/// The drawing is a file of its own, whatever names it has.
fn the_map_is_saved(browser: &mut Browser) {
    let folder = tempfile::tempdir().expect("a folder");
    let to = serde_json::json!({"behavior": "allow", "downloadPath": folder.path()});
    browser.call("Browser.setDownloadBehavior", to);
    browser.press("s");
    let saved = || {
        let entries = std::fs::read_dir(folder.path()).ok()?.flatten();
        let path = entries
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|kind| kind == "svg"))?;
        std::fs::read_to_string(path).ok().filter(|text| text.ends_with("</svg>"))
    };
    eventually("the file is whole", || saved().is_some());
    let text = saved().expect("saved");
    assert!(text.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""), "{text}");
    assert!(text.contains("&lt;img src=x") && !text.contains("<img"), "{text}");
    assert!(text.contains("\u{fffd}") && !text.contains('\u{1}'), "XML has no such character");
    assert!(
        text.contains("www.example") && text.contains("stroke-width=") && !text.contains("class="),
        "{text}"
    );
}

/// Names in the cells of tables. The largest resources come first.
pub(crate) fn hostile_names_stay_text(browser: &mut Browser) {
    go(browser, "chains");
    browser.wait_for(&shown(".list td", &format!("✕ {HOSTILE}")));
    go(browser, "cache");
    browser.wait_for(&shown(".list td", "75.0 %"));
    browser.wait_for(&shown(".list td", &format!("http://99.example/{HOSTILE}")));
    assert_eq!(browser.eval("document.querySelectorAll('.list')[1].tBodies[0].rows.length"), 20);
    go(browser, "health");
    browser.wait_for(&shown(".list .bad td", HOSTILE));
    go(browser, "control");
    browser.wait_for(&shown(".list td", "is being set up"));
    browser.wait_for(&shown(".list .wrong", &format!("✕ {HOSTILE}: {HOSTILE}")));
    let steps = browser.eval("[...document.querySelectorAll('.steps8')].map((list) => [...list.children].map((step) => step.innerText[0]).join('')).join()");
    assert_eq!(steps, "✓✓✓…····,✓✓✓✓✓✓✓✓,✓✕······");
}

/// A session that may only look is offered nothing that changes.
pub(crate) fn a_reader_only_looks(browser: &mut Browser, rig: &Rig, token: &str) {
    const CHANGES: &str =
        "[...document.querySelectorAll('.list button:not(.linklike)')].map((one) => one.innerText).join()";
    go(browser, "cache");
    browser.wait_for(&format!("{CHANGES}.startsWith('Purge…,Purge…')"));
    browser.eval("fetch('/page/session', { method: 'DELETE' })");
    browser.eval("location.hash = ''");
    browser.open(&format!("http://{}/", rig.address));
    browser.wait_for("document.activeElement?.id === 'token'");
    browser.write(token);
    browser.press("Enter");
    browser.wait_for(&shown("header .chip", "read only"));
    for (screen, text) in [("cache", "75.0 %"), ("chains", "0 of 0 healthy")] {
        go(browser, screen);
        browser.wait_for(&shown(".list td", text));
        assert_eq!(browser.eval(CHANGES), "", "{screen}");
    }
}
