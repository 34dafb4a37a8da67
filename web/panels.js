// The other screens: each asks the admin interface and shows what it says.

import { button, el } from './dom.js';
import { ask } from './ask.js';
import { cache } from './cache.js';
import { chains } from './chains.js';
import { control } from './control.js';
import { fastPath } from './fastpath.js';
import { Overlay } from './overlay.js';
import { metrics, panel, share, table } from './panel.js';
import { count, time } from './units.js';

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

/** What this machine lacks; what is fine is only counted. */
function doctor(checks) {
  const signs = { warn: '⚠ to look at', fail: '✕ missing' };
  const lacking = checks.filter(({ level }) => level !== 'ok').sort((one, other) => (one.level > other.level ? 1 : -1));
  if (lacking.length === 0) return el('p', { class: 'fine' }, `✓ This machine lacks nothing: ${count(checks.length)} checks.`);
  return table(`What this machine lacks; ${count(checks.length - lacking.length)} more checks are fine`,
    [{ title: '' }, { title: 'Check' }, { title: 'Found' }, { title: 'Needed for' }, { title: 'What to do' }],
    lacking.map(({ name, level, found, needed_for: use, fix }) => ({ kind: level === 'fail' ? 'bad' : null, cells: [signs[level] ?? level, name, found, use, fix ?? ''] })));
}

async function health() {
  const [status, text, { checks }] = await Promise.all([ask('/v1/status'), ask('/metrics', { text: true }), ask('/v1/doctor')]);
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
    doctor(checks),
    el('p', { class: 'dim' }, 'What depends on rights that this process has given up, ', el('code', {}, 'sudo sidetrack doctor'), ' says.'),
  ];
}

/** The screens beside the flows. */
export const PANELS = [
  { id: 'chains', title: 'Chains', make: panel('Chains and functions', chains) },
  { id: 'overlay', title: 'Overlay', make: (context) => new Overlay(context) },
  { id: 'policy', title: 'Policy', make: panel('Policy', policy) },
  { id: 'cache', title: 'Cache', make: panel('Cache', cache) },
  { id: 'fastpath', title: 'Fast path', make: panel('Fast path', fastPath) },
  { id: 'control', title: 'Control', make: panel('Control', control) },
  { id: 'health', title: 'Health', make: panel('Health', health) },
];
