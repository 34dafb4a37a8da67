// One flow: its decision trace as a timeline, what TCP measured, and what can be done with it.

import { button, copy, el, fill, say } from './dom.js';
import { ask } from './ask.js';
import { bytes, count, micros, rate, time } from './units.js';
import { isBad } from './columns.js';

/** How often a running flow is asked again, milliseconds. */
const AGAIN_MS = 1000;

/** The steps in plain words. */
const STEPS = {
  caught: 'caught', first_bytes: 'first bytes', decided: 'policy decided', container: 'function', resolved: 'name resolved',
  connected: 'connected', hop_secured: 'hop: TLS', hop_answered: 'hop answered', far_side: 'far side answered',
  server_secured: 'server: TLS', reused: 'open connection reused', answered: 'SYN answered (held until then)', ready: 'ready',
  first_byte: 'first byte', ended: 'ended',
};

/** A value in TOML. JSON's strings are valid basic strings, but for DEL. */
const toml = (text) => JSON.stringify(text).replace(/\u007f/g, '\\u007F');
/** A word for a shell. */
const shell = (text) => (/^[\w.:@%+=,/-]+$/.test(text) ? text : `'${text.replace(/'/g, "'\\''")}'`);

/** Address and port of `1.2.3.4:5`, `[::1]:5` or `name:5`. */
function split(destination) {
  const at = destination.lastIndexOf(':');
  return [destination.slice(0, at).replace(/^\[|\]$/g, ''), destination.slice(at + 1)];
}

/** A rule that matches flows like this one, to be edited. */
export function ruleOf(flow) {
  const [to, port] = split(flow.orig_dst ?? '');
  const isName = /[g-z]/i.test(to) && !to.includes(':');
  const host = flow.host ?? (isName ? to : null);
  const match = [
    host ? `host = ${toml(host)}` : `to = ${toml(to + (to.includes(':') ? '/128' : '/32'))}`,
    port ? `port = ${Number(port)}` : null,
    flow.process && !flow.process.startsWith('pid:') ? `process = ${toml(flow.process)}` : null,
    flow.protocol === 'udp' ? 'protocol = "udp"' : null,
  ].filter(Boolean);
  const hops = flow.carrier && !['kernel', 'direct'].includes(flow.carrier) ? flow.carrier.split(' -> ') : null;
  const carrier = hops ? `carrier = [${hops.map(toml).join(', ')}]` : 'carrier = "direct"';
  const name = `${flow.process ?? 'flows'}-to-${host ?? to}`.replace(/[^\w.-]+/g, '-');
  return `[[rule]]\nname = ${toml(name)}\nmatch = { ${match.join(', ')} }\n`
    + (flow.reason === 'policy_denied' ? '# It is denied now. To allow it: remove this line, and set a carrier.\naction = "deny"\n' : carrier + '\n');
}

/** The command that explains the decision from the configuration. */
export function explainOf(flow) {
  const words = ['sidetrack', 'explain', flow.client ?? '127.0.0.1:1', flow.orig_dst ?? ''];
  const add = (option, value) => { if (value) words.push(option, value); };
  add('--host', flow.host && split(flow.orig_dst ?? '')[0] !== flow.host ? flow.host : null);
  add('--listener', flow.listener);
  add('--process', flow.process?.startsWith('pid:') ? null : flow.process);
  if (flow.user?.startsWith('uid:')) add('--user', flow.user.slice(4));
  return words.map(shell).join(' ');
}

export class Drawer {
  /** `on.close()`. `mayKill`: the session may end flows. */
  constructor({ on, mayKill }) {
    this.on = on;
    this.mayKill = mayKill;
    this.id = null;
    this.title = el('h2', { tabindex: '-1' });
    this.state = el('span', { class: 'state' });
    this.about = el('dl', { class: 'about' });
    this.time = el('ol', { class: 'timeline', 'aria-label': 'Timeline' });
    this.rules = el('ol', { class: 'rules', 'aria-label': 'Rules that were tried' });
    this.tcp = el('div', { class: 'tcp' });
    this.actions = el('div', { class: 'actions' });
    this.text = el('pre', { class: 'made', tabindex: '0', hidden: true });
    this.note = el('p', { class: 'dim', role: 'status' });
    const part = (title, ...children) => el('section', {}, el('h3', {}, title), children);
    this.element = el('aside', { class: 'drawer', hidden: true, 'aria-label': 'Flow' },
      el('header', {}, this.title, this.state, button('×', () => this.close(), { class: 'plain', 'aria-label': 'Close (Esc)', title: 'Close (Esc)' })),
      el('div', { class: 'inside' }, this.actions, this.text, this.note, this.about,
        part('Where the time went', this.time), part('Rules tried', this.rules), part('TCP', this.tcp)));
  }

  get isOpen() {
    return !this.element.hidden;
  }

  open(row) {
    this.row = row;
    if (this.id !== row.flow || !this.isOpen) {
      this.id = row.flow;
      this.isAsking = false;
      this.text.hidden = true;
      say(this.note, '');
      for (const list of [this.time, this.rules, this.tcp]) list.replaceChildren();
    }
    this.element.hidden = false;
    this.show({ flow: row });
    this.load();
  }

  close() {
    clearTimeout(this.again);
    this.id = null;
    this.element.hidden = true;
    this.on.close();
  }

  async load() {
    clearTimeout(this.again);
    const id = this.id;
    if (this.row.is_past) {
      say(this.note, 'The trace of this flow is gone: the node keeps traces of the latest flows only. These are its fields from the history.');
      return;
    }
    try {
      const trace = await ask(`/v1/flows/${id}/trace`);
      if (id !== this.id) return;
      say(this.note, '');
      this.show(trace);
      if (!trace.flow.reason) this.again = setTimeout(() => this.load(), AGAIN_MS);
    } catch (error) {
      if (id === this.id) say(this.note, `${error.message}${error.help ? ' — ' + error.help : ''}`);
    }
  }

  show(trace) {
    const { flow } = trace;
    this.flow = { ...this.row, ...flow };
    say(this.title, `Flow ${flow.flow}`);
    say(this.state, flow.reason ?? 'live');
    this.state.className = 'state' + (flow.reason ? ' ended' : ' live') + (isBad(flow.reason) ? ' bad' : '');
    this.showActions();
    this.showAbout(trace);
    if (trace.steps) {
      this.showTime(trace);
      this.showRules(trace);
      this.showTcp(trace);
    }
  }

  showActions() {
    // A question that is open must not vanish under the mouse.
    if (this.isAsking && !this.flow.reason) return;
    this.isAsking = false;
    fill(this.actions,
      this.mayKill && !this.flow.reason && button('End this flow', () => this.askToKill(), { title: 'x' }),
      button('Make a rule', () => this.make(ruleOf(this.flow), 'a rule; edit it and put it into the configuration'), { title: 'r' }),
      button('Copy explain', () => this.make(explainOf(this.flow), 'the command'), { title: 'y' }));
  }

  askToKill() {
    if (!this.mayKill || this.flow.reason || this.isAsking) return;
    this.isAsking = true;
    const yes = button('End it', () => this.kill(), { class: 'danger' });
    fill(this.actions, el('span', {}, `End flow ${this.id}? The program sees a reset.`), yes,
      button('Keep it', () => { this.isAsking = false; this.showActions(); }));
    yes.focus();
  }

  async kill() {
    this.isAsking = false;
    try {
      await ask(`/v1/flows/${this.id}`, { method: 'DELETE' });
      say(this.note, 'The node ends this flow.');
    } catch (error) {
      say(this.note, `${error.message}${error.help ? ' — ' + error.help : ''}`);
    }
    this.showActions();
    this.load();
  }

  /** Shows a text to be used elsewhere, and copies it. */
  async make(text, what) {
    this.text.hidden = false;
    say(this.text, text);
    say(this.note, (await copy(text)) ? `Copied: ${what}.` : `Select and copy it: ${what}.`);
  }

  showAbout({ verdict, destination, resolved, resolved_count: found, dialled }) {
    const f = this.flow;
    const pairs = [
      ['client', f.client], ['process', f.process], ['user', f.user], ['asked for', f.orig_dst], ['host', f.host],
      ['TLS name', f.tls_name], ['verdict', verdict], ['rule', f.rule ?? 'default'], ['agreement', f.agreement],
      ['chain', (f.chain ?? []).join(' → ')], ['goes to', destination !== f.orig_dst ? destination : null],
      ['resolved', resolved?.length ? resolved.join(', ') + (found > resolved.length ? `, and ${found - resolved.length} more` : '') : null],
      ['dialled', dialled], ['carrier', f.carrier], ['path', f.path],
      ['bytes', `↑ ${bytes(f.bytes_up)}   ↓ ${bytes(f.bytes_down)}`],
      ['rate', f.reason ? null : [f.up_bytes_per_second && '↑ ' + rate(f.up_bytes_per_second), f.down_bytes_per_second && '↓ ' + rate(f.down_bytes_per_second)].filter(Boolean).join('   ')],
      ['packets', f.packets_up === null || f.packets_up === undefined ? null : `↑ ${count(f.packets_up)}   ↓ ${count(f.packets_down)}`],
      ['caught', f.ts && `${f.ts}${f.intercept ? ', by ' + (f.listener ?? '') + ' (' + f.intercept + ')' : ''}`],
      ['lasted', time(f.duration_seconds)], ['detail', f.detail],
    ];
    fill(this.about, pairs.filter(([, value]) => value).flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]));
  }

  showTime({ steps }) {
    // The end of a long flow would leave no room for its beginning.
    const setUp = steps.filter((step) => step.step !== 'ended');
    const all = Math.max(...setUp.map((step) => step.at_seconds), 1e-6);
    let before = 0;
    fill(this.time, steps.map((step) => {
      const isEnd = step.step === 'ended';
      const took = step.at_seconds - before;
      const bar = el('span', { class: 'bar' });
      if (!isEnd) {
        bar.style.left = `${(before / all) * 100}%`;
        bar.style.width = `max(2px, ${(took / all) * 100}%)`;
      }
      before = step.at_seconds;
      return el('li', { class: `step ${step.step}` },
        el('span', { class: 'at' }, time(step.at_seconds) || '0 ms'),
        el('span', { class: 'took' }, took > 0 ? '+' + time(took) : ''),
        el('span', { class: 'name' }, STEPS[step.step] ?? step.step, step.what ? el('span', { class: 'what' }, ' ' + step.what) : null),
        el('span', { class: 'track', 'aria-hidden': 'true' }, isEnd ? null : bar));
    }));
  }

  showRules({ rules }) {
    if (!rules) {
      fill(this.rules, el('li', { class: 'dim' }, 'Policy was not asked, or its rules are no longer known.'));
      return;
    }
    const tried = rules.filter((rule) => rule.outcome !== 'not_reached');
    const rest = rules.length - tried.length;
    const say = { matched: '✓ matches', failed: '✗ not ', waits: '… waits for first bytes or the process' };
    fill(this.rules, tried.map((rule) => el('li', { class: rule.outcome },
      el('span', { class: 'name' }, rule.rule), el('span', { class: 'why' }, (say[rule.outcome] ?? rule.outcome) + (rule.condition ?? '')))),
    tried.every((rule) => rule.outcome !== 'matched') && el('li', { class: 'dim' }, 'No rule matches: the default decides.'),
    rest > 0 && el('li', { class: 'dim' }, `${rest} more were not reached`));
  }

  showTcp({ tcp_client: client, tcp_server: server }) {
    const sides = [['client', client], ['server or first hop', server]].filter(([, seen]) => seen);
    if (sides.length === 0) {
      fill(this.tcp, el('p', { class: 'dim' }, 'Nothing was measured: the flow is short, not TCP, or not carried by us.'));
      return;
    }
    const line = (name, of) => el('tr', {}, el('th', { scope: 'row' }, name), sides.map(([, seen]) => el('td', {}, of(seen))));
    fill(this.tcp, el('table', {},
      el('thead', {}, el('tr', {}, el('th', {}), sides.map(([name]) => el('th', { scope: 'col' }, name)))),
      el('tbody', {},
        line('RTT', (seen) => micros(seen.rtt_seconds * 1e6)),
        line('least RTT', (seen) => (seen.min_rtt_seconds === null ? '' : micros(seen.min_rtt_seconds * 1e6))),
        line('sent again', (seen) => `${count(seen.retransmitted_segments)} segments`),
        line('lost', (seen) => `${count(seen.lost_segments)} segments`),
        line('delivery rate', (seen) => rate(seen.delivery_rate_bytes ?? 0)))));
  }
}
