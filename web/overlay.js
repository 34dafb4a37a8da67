// The overlay: its nodes as a matrix and as a drawing, and how the links of this node have been while the page was open.

import { el } from './dom.js';
import { ask } from './ask.js';
import { classOf } from './map.js';
import { Panel, empty, table } from './panel.js';
import { fitted, svg } from './svg.js';
import { bytes, count, time } from './units.js';

/** Nodes that are drawn, at most. */
const NODES_MAX = 40;
/** A sample is taken at every so many updates of the node, which come once a second. */
const EVERY = 3;
/** Samples of a link: those of half an hour. */
const SAMPLES_MAX = 600;
/** Two samples with more time between them are not joined, milliseconds. */
const GAP_MS = 15000;
/** The largest drawing, pixels. */
const SIZE_MAX = 440;

const ms = (value) => time(value / 1000);
const percent = (value) => (value > 0 ? `${value < 1 ? value.toFixed(2) : value.toFixed(1)} %` : '0 %');

/** A line of values over time. `samples`: pairs of time and value; `text` writes a value. */
export function sparkline(label, samples, text) {
  const values = samples.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [from, to] = [samples[0]?.[0] ?? 0, samples.at(-1)?.[0] ?? 0];
  const x = (at) => 2 + (146 * (at - from)) / Math.max(1, to - from);
  const y = (value) => 24 - (20 * (value - Math.min(0, low))) / Math.max(high, 1e-9);
  let path = '';
  samples.forEach(([at, value], index) => {
    const isJoined = index > 0 && at - samples[index - 1][0] <= GAP_MS;
    path += `${isJoined ? 'L' : 'M'}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  const what = values.length === 0 ? `${label}: not measured yet` : `${label} in the last ${time((to - from) / 1000)}: ${text(low)} to ${text(high)}, now ${text(values.at(-1))}`;
  return el('span', { class: 'spark', title: what },
    svg('svg', { width: 150, height: 26, role: 'img', 'aria-label': what }, svg('path', { d: path, fill: 'none' }), values.length > 0 && svg('circle', { cx: x(to), cy: y(values.at(-1)), r: 2 })),
    el('span', {}, values.length > 0 ? `${text(low)} … ${text(high)}` : ''));
}

/** All nodes that are known, this one first, and the links between them by both names. */
function network(status) {
  const names = new Set([status.node]);
  const links = new Map();
  const put = (one, other, link) => {
    names.add(one).add(other);
    for (const key of [`${one}\n${other}`, `${other}\n${one}`]) links.set(key, { ...links.get(key), ...link });
  };
  for (const { ends: [one, other], cost_ms: cost, troubled } of status.graph ?? []) put(one, other, { cost, troubled, isUp: true });
  for (const link of status.links) put(status.node, link.neighbour, { cost: link.cost_ms, rtt: link.rtt_ms, loss: link.loss_percent, isUp: link.up });
  for (const { to } of status.paths) names.add(to);
  const [own, ...rest] = names;
  const sorted = [own, ...rest.sort()];
  return { names: sorted.slice(0, NODES_MAX), left: Math.max(0, sorted.length - NODES_MAX), links };
}

function cell(link) {
  if (!link) return el('td', { class: 'none' }, '·');
  const what = link.isUp ? [ms(link.cost), link.troubled ? '⚠ in trouble' : null, link.loss > 0 ? `${percent(link.loss)} lost` : null].filter(Boolean) : ['✕ down'];
  return el('td', { class: link.isUp ? `tie ${classOf(link.cost * 1000)}` : 'tie down' }, what.join(' '));
}

function matrix({ names, left, links }) {
  return el('table', { class: 'list matrix' }, el('caption', {}, `Links: cost of each, which follows its latency and loss${left > 0 ? `; ${count(left)} more nodes are not shown` : ''}`),
    el('thead', {}, el('tr', {}, el('th', {}, ''), names.map((name) => el('th', { scope: 'col' }, name)))),
    el('tbody', {}, names.map((one) => el('tr', {}, el('th', { scope: 'row' }, one), names.map((other) => (one === other ? el('td', { class: 'none' }, '') : cell(links.get(`${one}\n${other}`))))))));
}

/** The nodes on a circle, this one on top. */
function drawing({ names, links }) {
  const size = Math.min(SIZE_MAX, 170 + 45 * names.length);
  const middle = size / 2;
  const places = new Map(names.map((name, at) => {
    const angle = (2 * Math.PI * at) / names.length - Math.PI / 2;
    return [name, [middle + Math.cos(angle) * (middle - 70), middle + Math.sin(angle) * (middle - 40)]];
  }));
  const lines = [];
  for (const [key, link] of links) {
    const [one, other] = key.split('\n');
    const [from, to] = [places.get(one), places.get(other)];
    if (one > other || !from || !to) continue;
    const text = link.isUp ? ms(link.cost) : 'down';
    lines.push(svg('g', { class: `way ${link.isUp ? classOf(link.cost * 1000) : 'down'}` }, svg('title', {}, `${one} – ${other}: ${text}`),
      svg('path', { d: `M${from[0]} ${from[1]}L${to[0]} ${to[1]}`, 'stroke-width': link.troubled ? 5 : 2.5 }),
      names.length <= 12 && svg('text', { class: 'cost', x: (from[0] + to[0]) / 2, y: (from[1] + to[1]) / 2 - 4, 'text-anchor': 'middle' }, text)));
  }
  const nodes = names.map((name, at) => {
    const [x, y] = places.get(name);
    return svg('g', { class: at === 0 ? 'node own' : 'node', transform: `translate(${x} ${y})` }, svg('title', {}, at === 0 ? `${name}, this node` : name),
      svg('rect', { x: -54, y: -13, width: 108, height: 26, rx: 13 }), svg('text', { y: 4, 'text-anchor': 'middle' }, fitted(name, 96)));
  });
  return svg('svg', { class: 'ways circle', width: size, height: size, viewBox: `0 0 ${size} ${size}`, role: 'img', 'aria-label': 'The nodes and their links; the matrix says the same' }, lines, nodes);
}

function linkRow(link, samples) {
  const legs = (link.legs ?? []).map((leg) => `${leg.used ? '●' : '○'} ${leg.from} – ${leg.to}: ${leg.up ? `${ms(leg.rtt_ms)}, ${percent(leg.loss_percent)} lost` : 'down'}`);
  return {
    kind: link.up ? null : 'bad',
    cells: [link.neighbour, link.up ? '● up' : '✕ down', ms(link.rtt_ms), sparkline('Round trip', samples.map(([at, rtt]) => [at, rtt]), ms), percent(link.loss_percent),
      sparkline('Loss', samples.map(([at, , loss]) => [at, loss]), percent), ms(link.jitter_ms), ms(link.cost_ms), legs.join('; '), (link.lacks ?? []).join(', ')],
  };
}

export class Overlay extends Panel {
  constructor() {
    super('Overlay', () => this.overview());
    /** Samples by neighbour: time, round trip and loss. */
    this.samples = new Map();
    this.ticks = 0;
    this.isNone = false;
  }

  /** The node has told of an update: takes a sample now and then, whatever screen is shown. */
  tick() {
    this.ticks += 1;
    if (this.isNone || this.isShown || this.ticks % EVERY !== 1) return;
    this.sample().catch(() => {});
  }

  async sample() {
    let status;
    try {
      status = await ask('/v1/overlay');
    } catch (error) {
      if (error.status === 404) this.isNone = true;
      throw error;
    }
    this.isNone = false;
    const now = Date.now();
    const seen = new Set(status.links.map(({ neighbour }) => neighbour));
    for (const name of this.samples.keys()) if (!seen.has(name)) this.samples.delete(name);
    for (const { neighbour, up, rtt_ms: rtt, loss_percent: loss } of status.links) {
      if (!this.samples.has(neighbour)) this.samples.set(neighbour, []);
      const all = this.samples.get(neighbour);
      if (up) all.push([now, rtt, loss]);
      if (all.length > SAMPLES_MAX) all.shift();
    }
    return status;
  }

  async overview() {
    let status;
    try {
      status = await this.sample();
    } catch (error) {
      if (error.status !== 404) throw error;
      return [empty('This node is not part of an overlay', el('p', {}, 'With [overlay] in the configuration it is: see docs/overlay-protocol.md.'))];
    }
    const nodes = network(status);
    const facts = [['This node', status.node], ['Sessions', `${count(status.sessions)} now; ${count(status.sessions_opened)} begun here, ${count(status.sessions_delivered)} delivered, ${count(status.sessions_resumed)} resumed on another path, ${count(status.sessions_refused)} refused`],
      ['Relayed', `${count(status.relayed)} flows, ${bytes(status.relayed_bytes)}`], ['Packets dropped', count(status.packets_dropped)], ['Strangers', `${count(status.strangers)} connections of nodes that are not members`]];
    return [
      el('dl', { class: 'facts' }, facts.flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)])),
      el('div', { class: 'beside' }, drawing(nodes), matrix(nodes)),
      table('Links of this node; the lines are what was measured while this page was open',
        [{ title: 'Neighbour' }, { title: 'State' }, { title: 'Round trip', right: true }, { title: '' }, { title: 'Loss', right: true }, { title: '' }, { title: 'Jitter', right: true }, { title: 'Cost', right: true }, { title: 'Legs' }, { title: 'Lacks' }],
        status.links.map((link) => linkRow(link, this.samples.get(link.neighbour) ?? []))),
      table('Paths of flows', [{ title: 'To' }, { title: 'Over' }, { title: 'Cost', right: true }],
        status.paths.map(({ to, path, cost_ms: cost }) => ({ kind: path.length === 0 ? 'bad' : null, cells: [to, path.length === 0 ? '✕ no path' : path.join(' → '), path.length === 0 ? '' : ms(cost)] }))),
      status.groups?.length > 0 && table('Groups', [{ title: 'Group' }, { title: 'This node' }, { title: 'Members' }], status.groups.map(({ name, joined, members }) => ({ cells: [name, joined ? 'member' : '', members.join(', ')] }))),
    ];
  }
}
