// The fast paths: flows whose bytes pass by user space, entries of the shunt, and why flows stay.

import { ageOf } from './columns.js';
import { ask } from './ask.js';
import { button, el } from './dom.js';
import { empty, metrics, table } from './panel.js';
import { age, bytes, count, rate } from './units.js';

/** Why a flow stays with its sockets (docs/wire.md). */
const STAYS = {
  closing: 'one side had closed',
  this_host: 'client or server is this host',
  ip_versions: 'one side IPv4, the other IPv6',
  tcp_options: 'the sides agreed on different options of TCP',
  segments: 'the sides allow segments of different length',
  translated: 'rules of others change the addresses',
  interface: 'an interface without Ethernet addresses',
  full: 'no room: [wire] flows_max',
  busy: 'no quiet instant; it is tried again',
  refused: 'the kernel refused a step; see the log',
};

/** The entries of `[shunt]`. `null`: this node has none. */
async function entries() {
  try {
    return (await ask('/v1/shunt')).flows;
  } catch (error) {
    if (error.status !== 409 && error.status !== 404) throw error;
    return null;
  }
}

function ofShunt(flows) {
  const both = (counts) => bytes(counts.bytes_up + counts.bytes_down);
  return table('Entries of the shunt',
    [{ title: 'State' }, { title: 'Action' }, { title: 'Client' }, { title: 'Server' }, { title: 'Transport' }, { title: 'Path' }, { title: 'Rule' }, { title: 'Fast', right: true }, { title: 'Slow', right: true }, { title: 'Rate', right: true }, { title: 'Why not' }],
    flows.map((flow) => ({
      cells: [flow.state, flow.action + (flow.pinned ? ' (set by hand)' : ''), flow.client, flow.server, flow.transport, flow.fast_path ?? '', flow.rule ?? '',
        both(flow.fast), both(flow.slow), rate(flow.bytes_per_s ?? 0), [flow.obstacle, flow.cause].filter(Boolean).map((why) => (typeof why === 'string' ? why : JSON.stringify(why))).join(', ')],
    })));
}

/** Live flows that the kernel carries, the fastest first. */
function ofKernel(rows, show) {
  const speed = (row) => (row.up_bytes_per_second ?? 0) + (row.down_bytes_per_second ?? 0);
  const now = Date.now();
  return table('Live flows whose bytes pass by user space',
    [{ title: 'Flow', right: true }, { title: 'Listener' }, { title: 'Client' }, { title: 'Server' }, { title: 'Rule' }, { title: 'Carried', right: true }, { title: 'Rate', right: true }, { title: 'Age', right: true }],
    rows.sort((one, other) => speed(other) - speed(one)).slice(0, MOST).map((row) => ({
      cells: [button(count(row.flow), () => show(`id == ${row.flow}`), { class: 'linklike', title: 'the flow' }), row.listener ?? row.intercept ?? '', row.client ?? '', row.host ?? row.orig_dst ?? '',
        row.rule ?? 'default', bytes(row.bytes_up + row.bytes_down), rate(speed(row)), age(ageOf(row, now))],
    })));
}

/** Most rows of live flows. */
const MOST = 200;

export async function fastPath({ watch, show }) {
  const [flows, text] = await Promise.all([entries(), ask('/metrics', { text: true })]);
  const carried = [...watch.live.values()].filter((row) => row.shunted);
  const stayed = metrics(text).filter(({ name, value }) => name === 'sidetrack_wire_stayed_flows_total' && value > 0);
  const taken = metrics(text).find(({ name }) => name === 'sidetrack_wire_taken_flows_total')?.value ?? 0;
  if (!flows?.length && carried.length === 0 && taken === 0 && stayed.length === 0) {
    return [empty('No flow has passed by user space yet', el('p', {}, 'Rules with ', el('code', {}, 'shunt'), ' or ', el('code', {}, '[wire]'), ' lead trusted flows there: see docs/wire.md and docs/shunt.md.'))];
  }
  return [
    carried.length > 0 && ofKernel(carried, show),
    carried.length > MOST && el('p', { class: 'dim' }, `The fastest ${count(MOST)} of ${count(carried.length)}.`),
    watch.filter !== '' && el('p', { class: 'dim' }, 'Live flows: only those that the filter of the flows selects.'),
    flows?.length > 0 && ofShunt(flows),
    taken > 0 && el('p', { class: 'fine' }, `✓ The kernel has taken ${count(taken)} flows over from our sockets since the start.`),
    stayed.length > 0 && table('Attempts after which a flow stayed with its sockets',
      [{ title: 'Because' }, { title: 'Times', right: true }], stayed.map(({ labels, value }) => ({ cells: [STAYS[labels.reason] ?? labels.reason, count(value)] }))),
  ];
}
