//! The page in a real Chromium. One browser serves all steps: starting it takes longer than any of them.

use crate::chromium::Browser;
use crate::support::{carried, denied, ended, enter, flow, full, live};
use crate::{HOSTILE, Rig, real, screens, tokens};
use sidetrack::live::{Ended, LiveFlow};
use sidetrack_core::flow::{EndReason, Process};
use sidetrack_core::net::IpNet;
use sidetrack_core::policy::{Action, Condition, Match, Policy, Rule};
use sidetrack_testkit::eventually;
use std::sync::Arc;

/// What the page must not do, whatever names it shows.
const WATCH: &str = "window.violations = [];
    addEventListener('securitypolicyviolation', (event) => window.violations.push(event.violatedDirective + ' ' + event.blockedURI));";

/// A flow whose every name is hostile.
fn hostile(id: u64) -> Arc<LiveFlow> {
    let mut known = flow("10.9.8.7:443");
    known.process =
        Some(Process { pid: Some(9), name: Some(format!("{HOSTILE}\u{1}")), ..Process::default() });
    known.user = Some(HOSTILE.into());
    known.listener = HOSTILE.into();
    known.host = Some("<script>alert(1)<script>".parse().expect("a name, for all that a peer may send"));
    live(id, known, carried(Some(HOSTILE), &[]))
}

#[test]
fn the_page_in_a_real_browser() {
    let (folder, admin, read) = tokens();
    let rig = Rig::new(folder.path());
    let flows = [full(1), live(2, flow("10.0.0.1:22"), denied(None)), hostile(3)];
    let slots = flows.each_ref().map(|flow| enter(&rig.ledger, flow));
    let mut browser = Browser::start();
    browser.call("Page.addScriptToEvaluateOnNewDocument", serde_json::json!({"source": WATCH}));
    browser.be(1280, 800, "light");
    log_in(&mut browser, &rig, &admin);
    browser.wait_for("document.querySelectorAll('.body .row:not([hidden])').length === 3");
    keys_open_a_flow_with_its_trace(&mut browser);
    a_filter_is_completed(&mut browser);
    screens::the_map(&mut browser);
    screens::the_fast_path(&mut browser, &flows[1]);
    a_flow_ends_after_one_question(&mut browser, &flows[0]);
    for screen in ["chains", "overlay", "policy", "cache", "fastpath", "control", "health"] {
        browser.eval(&format!("location.hash = '{screen}'"));
        browser.wait_for("document.querySelector('.panel h2, .panel caption')");
    }
    screens::hostile_names_stay_text(&mut browser);
    browser.eval("location.hash = 'policy'");
    browser.wait_for(&format!("document.body.innerText.includes('{HOSTILE}')"));
    browser.eval("location.hash = 'flows'");
    a_frozen_table_stays(&mut browser, &rig);
    rig.ledger.leave(slots[1], ended(&flows[1], EndReason::PolicyDenied));
    rig.ledger
        .leave(slots[2], Ended { detail: Some(HOSTILE.into()), ..ended(&flows[2], EndReason::Refused) });
    rig.recorder.lock().expect("whole").visit();
    browser.wait_for("document.querySelector('.grid').innerText.includes('policy_denied')");
    a_chosen_column_shows_the_detail(&mut browser);
    pictures(&mut browser, &rig);
    let rig = it_says_when_the_node_is_away(&mut browser, rig, folder.path());
    screens::the_map_is_bounded(&mut browser, &rig);
    many_rows_are_shown(&mut browser, &rig);
    measure(&mut browser, &rig);
    screens::a_reader_only_looks(&mut browser, &rig, &read);
    nothing_was_violated(&mut browser);
    drop(rig);
    real::the_page_of_a_real_node(&mut browser);
    nothing_was_violated(&mut browser);
    assert_eq!(browser.complaints, Vec::<String>::new());
}

/// No name has become a script or an element, and no policy was violated.
fn nothing_was_violated(browser: &mut Browser) {
    assert_eq!(browser.eval("window.hacked ?? null"), serde_json::Value::Null, "no name became a script");
    assert_eq!(browser.eval("document.querySelectorAll('img').length"), 0);
    assert_eq!(browser.eval("JSON.stringify(window.violations)"), "[]");
}

fn log_in(browser: &mut Browser, rig: &Rig, token: &str) {
    browser.open(&format!("http://{}/", rig.address));
    browser.wait_for("document.activeElement?.id === 'token'");
    browser.write("a wrong token");
    browser.press("Enter");
    browser.wait_for("document.querySelector('#login-error').textContent.includes('wrong')");
    // The next attempt has to wait for a second after the first failure.
    browser.wait_for(&format!(
        "(async () => {{
            const input = document.querySelector('#token');
            if (!input) return true;
            input.value = '{token}';
            input.form.requestSubmit();
            await new Promise((done) => setTimeout(done, 300));
            return !document.querySelector('#token');
        }})()"
    ));
    assert_eq!(browser.eval("location.href.includes('token') || document.cookie !== ''"), false);
}

fn keys_open_a_flow_with_its_trace(browser: &mut Browser) {
    // The newest first: 3, 2, 1.
    for key in ["j", "j", "j"] {
        browser.press(key);
    }
    browser.press("G");
    browser.press("Enter");
    browser.wait_for("document.querySelector('.drawer h2')?.textContent === 'Flow 1'");
    browser.wait_for("document.querySelectorAll('.timeline .step').length >= 3");
    assert!(
        browser
            .eval("document.querySelector('.about').innerText")
            .to_string()
            .contains("carried socks6://gw:1080")
    );
    browser.press("y");
    browser.wait_for("document.querySelector('.made').textContent.startsWith('sidetrack explain 10.1.0.5:40000 10.9.8.7:443')");
    browser.press("r");
    browser.wait_for("document.querySelector('.made').textContent.startsWith('[[rule]]')");
    browser.press("Escape");
    browser.wait_for("document.querySelector('.drawer').hidden");
}

fn a_filter_is_completed(browser: &mut Browser) {
    browser.press("/");
    browser.write("pro");
    browser.wait_for("document.querySelectorAll('.words:not([hidden]) li').length === 2");
    browser.press("Tab");
    browser.wait_for("document.querySelector('#filter').value === 'proc '");
    browser.write("== curl");
    browser.press("Enter");
    browser.wait_for("document.querySelectorAll('.body .row:not([hidden])').length === 1");
    browser.eval("(() => { const field = document.querySelector('#filter'); field.focus(); field.value = 'port == x'; })()");
    browser.press("Enter");
    browser.wait_for("document.querySelector('#filter-error').textContent.startsWith('column 9')");
    browser.eval(
        "(() => { const field = document.querySelector('#filter'); field.focus(); field.value = ''; })()",
    );
    browser.press("Enter");
    browser.wait_for("document.querySelectorAll('.body .row:not([hidden])').length === 3");
    browser.eval("document.querySelector('.grid').focus()");
}

fn a_flow_ends_after_one_question(browser: &mut Browser, flow: &LiveFlow) {
    browser.press("G");
    browser.press("x");
    browser.wait_for("document.querySelector('.actions .danger') === document.activeElement");
    assert_eq!(flow.ending(), None, "the page asks first");
    browser.eval("document.querySelector('.actions .danger').click()");
    eventually("the flow is ended", || flow.ending() == Some(EndReason::Killed));
    browser.press("Escape");
}

fn a_frozen_table_stays(browser: &mut Browser, rig: &Rig) {
    browser.wait_for("document.querySelectorAll('.body .row:not([hidden])').length === 3");
    browser.eval("document.querySelector('.grid').focus()");
    browser.press("f");
    browser.wait_for("document.querySelector('.sums').textContent.startsWith('frozen: 3 flows')");
    let slot = enter(&rig.ledger, &full(50));
    browser.wait_for("document.title.startsWith('4 flows')");
    assert_eq!(browser.eval("document.querySelectorAll('.body .row:not([hidden])').length"), 3);
    browser.press("f");
    browser.wait_for("document.querySelectorAll('.body .row:not([hidden])').length === 4");
    rig.ledger.leave(slot, ended(&full(50), EndReason::Ok));
}

fn a_chosen_column_shows_the_detail(browser: &mut Browser) {
    browser.press("c");
    browser.wait_for("document.querySelector('.choice input')");
    browser.eval("document.querySelector('.choice input[value=detail]').click()");
    browser.wait_for(&format!("document.querySelector('.grid').innerText.includes('refused') && document.querySelector('.grid').textContent.includes('{HOSTILE}')"));
    browser.eval("[...document.querySelectorAll('.choice button')].at(-1).click()");
    browser.wait_for("document.querySelector('.choice').hidden");
    browser.eval("document.querySelector('.grid').focus()");
}

/// Rules that some flows of the pictures do not match.
fn policy_of_pictures() -> Arc<Policy> {
    let rule = |name: &str, to: [u8; 4]| {
        let to = IpNet::from(std::net::IpAddr::from(to));
        let conditions = vec![Condition::To([to].into_iter().collect())];
        Rule { name: name.into(), matcher: Match::new(conditions), action: Action::default() }
    };
    let last = Rule { name: "databases".into(), matcher: Match::new(Vec::new()), action: Action::default() };
    Arc::new(Policy::new(
        vec![rule("intranet", [10, 0, 0, 1]), rule("mirrors", [192, 0, 2, 7]), last],
        Action::Deny,
    ))
}

/// Flows of all kinds, for the pictures, with bytes that move.
fn scenery(rig: &Rig, policy: &Arc<Policy>, id: u64) -> Arc<LiveFlow> {
    let at = usize::try_from(id).unwrap_or(0);
    let programs = ["curl", "git", "postgres", "rsync", "python3", "apt"];
    let hosts =
        ["registry.example", "git.example", "db.example", "mirror.example", "api.example", "cdn.example"];
    let mut known = flow(&format!("192.0.2.{}:{}", at % 250 + 1, [443, 22, 5432, 873][at % 4]));
    known.process = Some(Process {
        pid: Some(9),
        name: Some(programs[at % 6].into()),
        uid: Some(1000),
        is_hidden: false,
    });
    known.host = Some(hosts[at / 2 % 6].parse().expect("a name"));
    known.client =
        ([10, 1, 0, u8::try_from(at % 9).unwrap_or(0)], 40_000 + u16::try_from(at).unwrap_or(0)).into();
    let verdict = match at % 5 {
        0 => carried(Some("through-gateway"), &["socks5://gw.example:1080", "http://edge.example:3128"]),
        1 | 2 => carried(Some("direct-to-mirrors"), &[]),
        _ => carried(Some("databases"), &["socks6://inner.example:1080"]),
    };
    let flow = LiveFlow::new(sidetrack_core::flow::FlowId(id));
    flow.decide(sidetrack::live::Decided::new(known, Some(verdict)).by(policy));
    flow.step(sidetrack::live::Step::Decided);
    flow.step(sidetrack::live::Step::Resolved);
    let us = |us| std::time::Duration::from_micros(us + id * 97 % 800);
    flow.connected(us(11_200));
    flow.first_byte(us(23_900));
    let flow = Arc::new(flow);
    let slot = enter(&rig.ledger, &flow);
    let reasons = [EndReason::Ok, EndReason::Refused, EndReason::Ok, EndReason::Idle];
    if at % 7 == 3 {
        rig.ledger.leave(slot, ended(&flow, reasons[at / 7 % 4]));
        rig.recorder.lock().expect("whole").visit();
    }
    flow
}

/// Moves bytes for longer than an update of the table takes.
fn moves(flows: &[Arc<LiveFlow>]) {
    for _ in 0..8 {
        for (at, flow) in (1..).zip(flows) {
            flow.count(at * at * 91 % 7000, if at % 3 == 0 { 0 } else { at * at * at * 17 });
        }
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
}

/// Pictures at three widths and in both schemes, for people who change the page: `SIDETRACK_PICTURES=FOLDER`.
fn pictures(browser: &mut Browser, rig: &Rig) {
    if std::env::var_os("SIDETRACK_PICTURES").is_none() {
        return;
    }
    let policy = policy_of_pictures();
    let flows: Vec<_> = (100..160).map(|id| scenery(rig, &policy, id)).collect();
    for (width, height) in [(375, 700), (1280, 800), (2560, 1300)] {
        for scheme in ["light", "dark"] {
            browser.be(width, height, scheme);
            for screen in ["policy", "health", "map", "flows"] {
                browser.eval(&format!("location.hash = '{screen}'"));
                browser.wait_for(
                    "document.querySelector('.panel caption, .map .node, .body .row:not([hidden])')",
                );
                moves(&flows);
                browser.picture(&format!("{screen}-{width}-{scheme}"));
            }
            browser.eval("document.querySelector('.grid').focus()");
            browser.press("g");
            browser.press("Enter");
            browser.wait_for("document.querySelectorAll('.timeline .step').length >= 3");
            moves(&flows);
            browser.picture(&format!("flow-{width}-{scheme}"));
            browser.press("Escape");
        }
    }
    browser.be(1280, 800, "light");
}

/// Stops the node under the page, and starts it again.
fn it_says_when_the_node_is_away(browser: &mut Browser, rig: Rig, folder: &std::path::Path) -> Rig {
    let address = rig.address;
    drop(rig);
    browser.wait_for("document.querySelector('.banner').innerText.includes('has not answered since')");
    let rig = Rig::again(folder, address);
    enter(&rig.ledger, &full(9));
    browser.wait_for("document.querySelector('.banner').innerText.includes('answers again')");
    browser.wait_for("document.querySelector('.link').classList.contains('live')");
    browser.wait_for("document.querySelector('.sums').textContent.startsWith('1 live')");
    rig
}

/// A table of ten thousand rows has few elements, and shows both ends.
fn many_rows_are_shown(browser: &mut Browser, rig: &Rig) {
    for id in 1000..11_000 {
        enter(&rig.ledger, &full(id));
    }
    browser.wait_for("document.querySelector('.grid').getAttribute('aria-rowcount') >= 10002");
    assert!(browser.eval("document.querySelectorAll('.body .row').length").as_u64().expect("a number") < 200);
    browser.eval("document.querySelector('.grid').focus()");
    browser.press("G");
    browser.wait_for("document.querySelector('.body .selected')?.getAttribute('aria-rowindex') >= 10002");
}

/// Scrolls for some seconds, one step for each frame.
const SCROLL: &str = "(async () => {
    const grid = document.querySelector('.grid');
    for (let n = 0; n < 300; n += 1) {
        grid.scrollTop = (grid.scrollTop + 1700) % (grid.scrollHeight - grid.clientHeight);
        await new Promise(requestAnimationFrame);
    }
})()";

/// The CPU time that the tab's main thread needs while it does something, seconds.
fn busy(browser: &mut Browser, what: impl FnOnce(&mut Browser)) -> f64 {
    let time = |browser: &mut Browser| {
        let metrics = browser.call("Performance.getMetrics", serde_json::json!({}));
        let all = metrics["metrics"].as_array().expect("a list");
        let task = all.iter().find(|metric| metric["name"] == "TaskDuration").expect("known");
        task["value"].as_f64().expect("a number")
    };
    let before = time(browser);
    what(browser);
    time(browser) - before
}

/// Prints what scrolling and updates cost the tab with this number of rows.
fn measure_tab(browser: &mut Browser, rows: &str) {
    let scrolled = busy(browser, |browser| drop(browser.eval(SCROLL)));
    println!("{rows} rows: {:.1} ms for a frame while scrolling", scrolled / 0.3);
    let rested = busy(browser, |_| std::thread::sleep(std::time::Duration::from_secs(10)));
    println!("{rows} rows: {:.1} ms for an update", rested * 100.0);
}

/// CPU time of this process so far, seconds.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("proc");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |at: usize| fields[at].parse::<f64>().expect("a number");
    (ticks(11) + ticks(12)) / 100.0
}

/// Prints what ten thousand rows cost, and a hundred thousand, if `SIDETRACK_MEASURE` is set. Nothing is asserted.
fn measure(browser: &mut Browser, rig: &Rig) {
    if std::env::var_os("SIDETRACK_MEASURE").is_none() {
        return;
    }
    let flows: Vec<_> = rig.ledger.snapshot();
    for (what, each) in [("none moves", usize::MAX), ("a tenth moves", 10), ("all move", 1)] {
        let before = cpu_seconds();
        for second in 0..15_u64 {
            flows.iter().step_by(each).for_each(|flow| flow.count(second * 100 + 1, second * 5000 + 1));
            std::thread::sleep(std::time::Duration::from_secs(1));
        }
        println!("10,000 rows, {what}: {:.2} CPU s per minute", (cpu_seconds() - before) * 4.0);
    }
    browser.call("Performance.setTimeDomain", serde_json::json!({"timeDomain": "threadTicks"}));
    browser.call("Performance.enable", serde_json::json!({}));
    measure_tab(browser, "10,000");
    for id in 20_000..110_000 {
        enter(&rig.ledger, &full(id));
    }
    let start = std::time::Instant::now();
    browser.wait_for("document.querySelector('.grid').getAttribute('aria-rowcount') >= 100002");
    println!("100,000 rows: shown after {:?}", start.elapsed());
    measure_tab(browser, "100,000");
    println!(
        "100,000 rows: {} MB in the page",
        browser.eval("Math.round(performance.memory.usedJSHeapSize / 1e6)")
    );
    let memory = std::fs::read_to_string("/proc/self/status").expect("proc");
    println!("100,000 rows: {:?}", memory.lines().find(|line| line.starts_with("VmHWM")));
}
