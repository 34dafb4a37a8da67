// The other screens: each asks the admin interface and shows what it says.

import { button, el, fill } from './dom.js';
import { ask } from './ask.js';
import { bytes, count, rate, time } from './units.js';

/** How often a screen asks, milliseconds. */
const EVERY_MS = 2000;

/** A screen that asks again and again while it is shown. `look()` returns its elements. */
class Panel {
  constructor(label, look) {
    this.look = look;
    this.inside = el('div', {});
    this.note = el('p', { class: 'wrong', role: 'alert', hidden: true });
    this.element = el('section', { class: 'panel', 'aria-label': label }, this.note, this.inside);
  }

  enter() {
    this.isShown = true;
    this.ask();
  }

  leave() {
    this.isShown = false;
    clearTimeout(this.again);
  }

  async ask() {
    clearTimeout(this.again);
    try {
      const parts = await this.look();
      // What has the focus must not vanish.
      if (!this.inside.contains(document.activeElement) || document.activeElement === document.body) fill(this.inside, parts);
      this.note.hidden = true;
    } catch (error) {
      this.note.hidden = false;
      fill(this.note, error.message, error.help ? ` — ${error.help}` : '');
    }
    if (this.isShown) this.again = setTimeout(() => this.ask(), EVERY_MS);
  }
}

/** A table. `columns`: title, and `right` for numbers; `rows`: lists of texts and elements. */
function table(caption, columns, rows) {
  return el('table', { class: 'list' }, el('caption', {}, caption),
    el('thead', {}, el('tr', {}, columns.map(({ title, right }) => el('th', { scope: 'col', class: right ? 'right' : null }, title)))),
    el('tbody', {}, rows.map((row) => el('tr', { class: row.kind ?? null }, row.cells.map((cell, at) => el('td', { class: columns[at].right ? 'right' : null }, cell))))));
}

function empty(title, ...more) {
  return el('div', { class: 'nothing' }, el('h2', {}, title), more);
}

/** A share as a bar with its number. */
function share(used, most, text) {
  const part = most > 0 ? Math.min(1, used / most) : 0;
  const bar = el('span', { class: part > 0.9 ? 'fill full' : 'fill' });
  bar.style.width = `${part * 100}%`;
  return el('span', { class: 'share' }, el('span', { class: 'track' }, bar), el('span', {}, text));
}

/** Reads metrics: a list of name, labels and value. */
export function metrics(text) {
  const found = [];
  for (const line of text.split('\n')) {
    const match = /^([a-z_]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? '').matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === 'n' ? '\n' : c));
    }
    found.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return found;
}

async function policy({ watch, show }) {
  const [{ rules, generation }, text] = await Promise.all([ask('/v1/rules'), ask('/metrics', { text: true })]);
  const ended = new Map();
  for (const { name, labels, value } of metrics(text)) {
    if (name !== 'sidetrack_flows_total') continue;
    const sum = ended.get(labels.rule) ?? { all: 0, denied: 0 };
    sum.all += value;
    if (labels.reason === 'policy_denied') sum.denied += value;
    ended.set(labels.rule, sum);
  }
  const live = new Map();
  if (watch.filter === '') for (const row of watch.live.values()) live.set(row.rule ?? '', (live.get(row.rule ?? '') ?? 0) + 1);
  const line = (rule) => {
    const name = rule.name ?? '';
    const hits = ended.get(name || 'default') ?? ended.get(name) ?? { all: 0, denied: 0 };
    const running = live.get(name) ?? 0;
    const isDead = rule.place !== null && hits.all + running === 0;
    const action = rule.action === 'deny' ? 'deny' : rule.action.carry;
    return {
      kind: isDead ? 'dead' : null,
      cells: [rule.place === null ? '' : String(rule.place),
        rule.name === null ? 'default' : button(rule.name, () => show(`rule == ${JSON.stringify(rule.name)}`), { class: 'linklike', title: 'its flows' }),
        rule.matches.join(' and ') || 'every flow', action, count(running), count(hits.all), count(hits.denied), isDead ? 'no flow yet' : ''],
    };
  };
  return [table(`Rules of configuration ${generation}; the first that matches decides`,
    [{ title: 'No.', right: true }, { title: 'Rule' }, { title: 'Matches' }, { title: 'Action' }, { title: 'Live', right: true }, { title: 'Ended', right: true }, { title: 'Of them denied', right: true }, { title: '' }],
    rules.map(line)),
  el('p', { class: 'dim' }, 'Counts are since the start of the node. A rule without a flow may stand behind one that matches first: ', el('code', {}, 'sidetrack explain'), ' shows it.')];
}

async function cache({ mayChange, again }) {
  const { caches } = await ask('/v1/cache');
  if (caches.length === 0) return [empty('This node has no cache', el('p', {}, 'A listener of kind “http” has one with '), el('pre', {}, 'cache_bytes = 268435456'))];
  const text = await ask('/metrics', { text: true });
  const hits = metrics(text).filter(({ name }) => name.startsWith('sidetrack_cache'));
  const purge = (listener) => {
    const start = button('Purge…', () => {
      const yes = button('Remove all resources', async () => {
        await ask('/v1/cache', { method: 'DELETE', query: { listener, all: 'true' } });
        yes.blur();
        again();
      }, { class: 'danger' });
      start.replaceWith(yes);
      yes.focus();
    });
    return start;
  };
  const rows = caches.map(({ listener, memory, disk }) => ({
    cells: [listener, count(memory.resources), share(memory.bytes, memory.capacity_bytes, `${bytes(memory.bytes)} of ${bytes(memory.capacity_bytes)}`),
      disk ? count(disk.resources) : '', disk ? share(disk.bytes, disk.capacity_bytes, `${bytes(disk.bytes)} of ${bytes(disk.capacity_bytes)}`) : 'none',
      mayChange ? purge(listener) : ''],
  }));
  return [table('Caches', [{ title: 'Listener' }, { title: 'In memory', right: true }, { title: 'Memory' }, { title: 'On disk', right: true }, { title: 'Disk' }, { title: '' }], rows),
    hits.length > 0 && table('Counts since the start', [{ title: 'What' }, { title: 'Count', right: true }], hits.map(({ name, labels, value }) => ({ cells: [`${name.replace('sidetrack_cache_', '')} ${Object.values(labels).join(' ')}`, count(value)] })))];
}

async function fastPath() {
  let flows;
  try {
    ({ flows } = await ask('/v1/shunt'));
  } catch (error) {
    if (error.status !== 409 && error.status !== 404) throw error;
    return [empty('This node has no fast path', el('p', {}, 'With [shunt] in the configuration, trusted flows pass by user space. Its entries stand here.'))];
  }
  if (flows.length === 0) return [empty('No flow was wanted on the fast path yet', el('p', {}, 'Policy marks flows for it: see docs/shunt.md.'))];
  const both = (counts) => bytes(counts.bytes_up + counts.bytes_down);
  return [table('Flows of the fast path',
    [{ title: 'State' }, { title: 'Action' }, { title: 'Client' }, { title: 'Server' }, { title: 'Transport' }, { title: 'Path' }, { title: 'Rule' }, { title: 'Fast', right: true }, { title: 'Slow', right: true }, { title: 'Rate', right: true }, { title: 'Why not' }],
    flows.map((flow) => ({
      cells: [flow.state, flow.action + (flow.pinned ? ' (set by hand)' : ''), flow.client, flow.server, flow.transport, flow.fast_path ?? '', flow.rule ?? '',
        both(flow.fast), both(flow.slow), rate(flow.bytes_per_s ?? 0), [flow.obstacle, flow.cause].filter(Boolean).map((why) => (typeof why === 'string' ? why : JSON.stringify(why))).join(', ')],
    })))];
}

/** Counters that should stay 0, and what they mean. */
const DROPS = {
  sidetrack_shed_total: 'flows refused because a limit was reached',
  sidetrack_records_dropped_total: 'records lost: a reader or the disk was too slow',
  sidetrack_history_missing_total: 'flows that the history lacks',
  sidetrack_datagrams_dropped_total: 'datagrams that were not passed on',
  sidetrack_held_overruns_total: 'times that SYNs were lost because they were not read in time',
  sidetrack_closed_for_others_total: 'connections closed to make room for others',
  sidetrack_engine_shed_total: 'new connections that the packet engine did not serve',
  sidetrack_engine_internal_total: 'errors of the packet engine itself',
};

async function health() {
  const [status, text] = await Promise.all([ask('/v1/status'), ask('/metrics', { text: true })]);
  const { config } = status;
  const facts = [
    ['Version', status.version], ['Process', String(status.pid)], ['Running for', time(status.uptime_seconds)], ['Since', status.started],
    ['Live flows', count(status.flows_active)], ['Ended flows', count(status.flows_ended)],
    ['Descriptors', share(status.fds_in_use, status.fds_limit, `${count(status.fds_in_use)} of ${count(status.fds_limit)}`)],
    ['Configuration', `${config.path ?? 'from the command line'}, number ${config.generation}`],
  ];
  const found = metrics(text);
  const drops = Object.entries(DROPS).flatMap(([name, what]) => {
    const lines = found.filter((line) => line.name === name && line.value > 0);
    return lines.map(({ labels, value }) => ({ kind: 'bad', cells: ['✕ ' + what, Object.values(labels).join(', '), count(value)] }));
  });
  const reasons = new Map();
  for (const { name, labels, value } of found) if (name === 'sidetrack_flows_total') reasons.set(labels.reason, (reasons.get(labels.reason) ?? 0) + value);
  const sorted = [...reasons].sort((one, other) => other[1] - one[1]);
  return [
    config.last_error && el('div', { class: 'trouble' }, el('h2', {}, 'The latest reload failed'), el('pre', {}, config.last_error)),
    config.waiting_for_restart?.length > 0 && el('div', { class: 'trouble' }, el('h2', {}, 'These settings wait for a restart'), el('pre', {}, config.waiting_for_restart.join('\n'))),
    el('dl', { class: 'facts' }, facts.flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)])),
    drops.length > 0 ? table('Lost or refused since the start', [{ title: 'What' }, { title: 'Where' }, { title: 'Count', right: true }], drops)
      : el('p', { class: 'fine' }, '✓ Nothing was lost or refused since the start.'),
    table('Listeners', [{ title: 'Name' }, { title: 'Kind' }, { title: 'Addresses' }], status.listeners.map(({ name, kind, addresses }) => ({ cells: [name, kind, addresses.join(', ')] }))),
    sorted.length > 0 && table('How flows ended since the start', [{ title: 'Reason' }, { title: 'Flows', right: true }], sorted.map(([reason, value]) => ({ cells: [reason, count(value)] }))),
    el('p', { class: 'dim' }, 'What this machine lacks for some uses, ', el('code', {}, 'sidetrack doctor'), ' says.'),
  ];
}

function panel(label, look) {
  return (context) => {
    const made = new Panel(label, () => look({ ...context, again: () => made.ask() }));
    return made;
  };
}

/** The screens beside the flows. */
export const PANELS = [
  { id: 'policy', title: 'Policy', make: panel('Policy', policy) },
  { id: 'cache', title: 'Cache', make: panel('Cache', cache) },
  { id: 'fastpath', title: 'Fast path', make: panel('Fast path', fastPath) },
  { id: 'health', title: 'Health', make: panel('Health', health) },
];
