// The chains that rules lead flows through, and the functions in them.

import { button, el } from './dom.js';
import { ask } from './ask.js';
import { empty, metrics, share, table } from './panel.js';
import { bytes, count, rate, time } from './units.js';
import { quoted } from './ways.js';

/** The functions of a chain in order, with arrows between. */
function steps(names, show) {
  return names.flatMap((name, at) => [at > 0 ? ' → ' : null, button(name, () => show(`chain == ${quoted(name)}`), { class: 'linklike', title: 'its flows' })]);
}

/** What the live flows that fit add up to. */
function live(watch, fits) {
  let [flows, perSecond, late, timed] = [0, 0, 0, 0];
  for (const row of watch.live.values()) {
    if (!fits(row)) continue;
    flows += 1;
    perSecond += (row.up_bytes_per_second ?? 0) + (row.down_bytes_per_second ?? 0);
    if (row.first_byte_seconds > 0) {
      late += row.first_byte_seconds;
      timed += 1;
    }
  }
  return { flows, perSecond, firstByte: timed > 0 ? late / timed : null };
}

/** Flows that have ended, by rule: all, and those that a function refused or failed. */
function ended(found) {
  const sums = new Map();
  for (const { name, labels, value } of found) {
    if (name !== 'sidetrack_flows_total') continue;
    const sum = sums.get(labels.rule) ?? { all: 0, refused: 0, failed: 0 };
    sum.all += value;
    if (labels.reason === 'function_refused') sum.refused += value;
    if (labels.reason === 'function_failed') sum.failed += value;
    sums.set(labels.rule, sum);
  }
  return sums;
}

function chainRow({ names, rules }, watch, sums, show) {
  const key = names.join(',');
  const running = live(watch, (row) => (row.chain ?? []).join(',') === key);
  const total = { all: 0, refused: 0, failed: 0 };
  for (const rule of rules) {
    const sum = sums.get(rule ?? 'default');
    if (sum) for (const word of Object.keys(total)) total[word] += sum[word];
  }
  const isBad = total.refused + total.failed > 0;
  return {
    kind: null,
    cells: [el('span', {}, steps(names, show)), rules.map((rule) => rule ?? 'default').join(', ') || 'of a rule before', count(running.flows), rate(running.perSecond), time(running.firstByte),
      count(total.all), count(total.refused), isBad && total.failed > 0 ? `✕ ${count(total.failed)}` : count(total.failed)],
  };
}

function functionRow(one, { watch, mayChange, again, show }) {
  const running = live(watch, (row) => row.chain?.includes(one.name));
  const { containers } = one;
  const start = () => button('Start now', async ({ target }) => {
    await ask(`/v1/functions/${encodeURIComponent(one.name)}/start`, { method: 'POST' });
    target.blur();
    again();
  });
  return {
    kind: containers?.trouble ? 'bad' : null,
    cells: [el('span', {}, steps([one.name], show)), one.kind, count(running.flows), count(one.flows), one.kind === 'count' ? bytes(one.bytes_up) : '', one.kind === 'count' ? bytes(one.bytes_down) : '',
      containers ? share(containers.well, containers.wanted, `${containers.well} of ${containers.wanted} healthy`, true) : '',
      containers ? count(containers.falls) : '',
      containers?.trouble ? el('span', {}, `✕ ${containers.trouble} `, mayChange && start()) : containers?.image ?? ''],
  };
}

/** The screen. */
export async function chains(context) {
  const { watch, show } = context;
  const [{ functions }, { rules }, text] = await Promise.all([ask('/v1/functions'), ask('/v1/rules'), ask('/metrics', { text: true })]);
  if (functions.length === 0) return [empty('This node has no functions', el('p', {}, 'A function works on the bytes of flows: '), el('pre', {}, '[function.audit]\nkind = "count"\n\n[[rule]]\nname = "records"\nchain = ["audit"]'))];
  const known = new Map();
  const enter = (names, rule) => {
    if (names.length === 0) return;
    const key = names.join(',');
    if (!known.has(key)) known.set(key, { names, rules: [] });
    if (rule !== undefined) known.get(key).rules.push(rule);
  };
  for (const rule of rules) enter(rule.chain ?? [], rule.name);
  // Flows keep a chain that a reload took from their rule.
  for (const row of watch.live.values()) enter(row.chain ?? []);
  const sums = ended(metrics(text));
  return [
    watch.filter !== '' && el('p', { class: 'dim' }, 'Live flows are those that match the filter of the flows.'),
    table('Chains: what flows pass, from the client to the server',
      [{ title: 'Chain' }, { title: 'Rules' }, { title: 'Live', right: true }, { title: 'Rate', right: true }, { title: 'First byte', right: true }, { title: 'Ended', right: true }, { title: 'Refused by a function', right: true }, { title: 'A function failed', right: true }],
      [...known.values()].map((chain) => chainRow(chain, watch, sums, show))),
    table('Functions',
      [{ title: 'Function' }, { title: 'Kind' }, { title: 'Live', right: true }, { title: 'Flows', right: true }, { title: '↑', right: true }, { title: '↓', right: true }, { title: 'Containers' }, { title: 'Given up', right: true }, { title: '' }],
      functions.map((one) => functionRow(one, context))),
    el('p', { class: 'dim' }, 'Ended, refused and failed count the flows of the chain’s rules since the start. “First byte” is the mean of the live flows. How long one flow took in each container, its drawer says.'),
  ];
}
