// The screen with the ways of the flows: where they come from, what they pass, where they go.

import { button, el, fill, say } from './dom.js';
import { fileOf, fitted, save, set, svg } from './svg.js';
import { bytes, count, rate, time } from './units.js';
import { ways } from './ways.js';

/** Pixels: height of an entry, distance of two, room above them, least width of a column, and most width of an entry. */
const HEIGHT = 36;
const PITCH = 44;
const TOP = 84;
const COLUMN_LEAST = 200;
const NODE_MOST = 340;

/** Classes of latency: below so many microseconds. */
const CLASSES = [[5e3, 'below 5 ms'], [20e3, '5 to 20 ms'], [80e3, '20 to 80 ms'], [300e3, '80 to 300 ms'], [Infinity, '300 ms and more']];

/** The class of style.css for a latency, microseconds. */
export function classOf(us) {
  return us > 0 ? `late${CLASSES.findIndex(([most]) => us < most)}` : 'unknown';
}

/** The width of a line, pixels: it grows with the logarithm of the rate. */
function thickness(perSecond) {
  return perSecond > 0 ? Math.min(16, 1.5 + 2.4 * Math.max(0, Math.log10(perSecond / 1000))) : 1;
}

/** What is known of an entry or a line. */
function words({ flows, rate: perSecond, latency }, flow = '') {
  return [count(flows) + flow, rate(perSecond), latency > 0 ? time(latency / 1e6) : ''].filter(Boolean).join(' · ');
}

export class WayMap {
  /** `show(filter)`: shows these flows; `use(filter)`: changes the filter of the live flows. */
  constructor({ watch, show, use }) {
    this.watch = watch;
    this.show = show;
    /** Elements by key. */
    this.nodes = new Map();
    this.lines = new Map();
    /** Keys of the entries, column by column. */
    this.order = [];
    this.picked = null;
    this.pointed = null;
    this.sums = el('span', { class: 'sums' });
    this.filter = el('span', { class: 'sums' });
    this.note = el('p', { class: 'mapnote', role: 'status' });
    this.saving = button('Save as SVG', () => this.save(), { title: 's' });
    this.back = svg('g');
    this.front = svg('g');
    this.titles = svg('g', { class: 'titles' });
    this.legend = svg('g', { class: 'legend' });
    this.svg = svg('svg', { class: 'ways', role: 'group', 'aria-label': 'Map of the live flows. Arrow keys move, Enter shows the flows of an entry.' }, this.legend, this.titles, this.back, this.front);
    this.room = el('div', { class: 'room' }, this.svg);
    this.empty = el('div', { class: 'empty', hidden: true }, el('h2', {}, 'No flow runs'), el('p', {}, 'As soon as a program connects through this node, its way stands here.'));
    this.all = button('All flows', () => use(''), { hidden: true });
    this.element = el('section', { class: 'map', 'aria-label': 'Map' },
      el('div', { class: 'tools' }, this.sums, this.filter, this.all, this.saving), this.note, this.empty, this.room);
    for (const [event, act] of [['mouseover', (key) => this.point(key)], ['mouseleave', () => this.point(null)], ['focusin', (key) => this.pick(key)], ['focusout', () => this.pick(null)], ['click', (key) => this.open(key)]]) {
      this.svg.addEventListener(event, ({ target }) => act(target.closest('.node')?.dataset.key ?? null));
    }
    new ResizeObserver(() => this.draw()).observe(this.room);
    this.drawLegend();
  }

  enter() {
    this.draw();
  }

  point(key) {
    if (key === this.pointed) return;
    this.pointed = key;
    this.draw();
  }

  pick(key) {
    this.picked = key;
    this.draw();
    const node = this.found?.get(key);
    say(this.note, node ? `${node.label}: ${words(node, node.flows === 1 ? ' flow' : ' flows')}, ${bytes(node.bytes)} so far. ${node.filter ? 'Enter shows them.' : 'These are too many for a line each.'}` : '');
  }

  /** Shows the flows of an entry. */
  open(key) {
    const node = this.found?.get(key);
    if (!node?.filter) return;
    this.show(this.watch.filter ? `(${this.watch.filter}) and ${node.filter}` : node.filter);
  }

  draw() {
    if (!this.element.isConnected) return;
    const seen = ways(this.watch.live.values(), this.pointed ?? this.picked);
    this.tell(seen);
    this.empty.hidden = seen.flows > 0;
    this.room.hidden = seen.flows === 0;
    this.found = new Map(seen.columns.flatMap(({ nodes }) => nodes.map((node) => [node.key, node])));
    this.place(seen.columns);
    set(this.svg, { class: (this.pointed ?? this.picked) !== null ? 'ways picking' : 'ways' });
    this.drawTitles(seen.columns);
    this.drawNodes(seen.columns);
    this.drawLines(seen.lines);
  }

  tell({ flows, lines }) {
    say(this.sums, `${count(flows)} live flows on ${count(lines.length)} lines`);
    const { filter } = this.watch;
    this.all.hidden = filter === '';
    if (filter) fill(this.filter, 'that match ', el('code', {}, filter));
    else say(this.filter, '');
  }

  /** Gives each entry its place. */
  place(columns) {
    this.columns = columns;
    const width = Math.max(this.room.clientWidth - 2, columns.length * COLUMN_LEAST);
    const most = Math.max(1, ...columns.map(({ nodes }) => nodes.length));
    const each = width / Math.max(1, columns.length);
    this.nodeWidth = Math.min(NODE_MOST, each * 0.68);
    const gap = columns.length > 1 ? (width - 16 - this.nodeWidth) / (columns.length - 1) : 0;
    columns.forEach((column, at) => {
      column.x = 8 + at * gap;
      // Few entries stand lower, but never out of sight.
      const above = Math.min(((most - column.nodes.length) * PITCH) / 2, 2 * PITCH);
      column.nodes.forEach((node, row) => {
        node.x = column.x;
        node.y = TOP + above + row * PITCH;
        node.at = at;
      });
    });
    set(this.svg, { width, height: TOP + most * PITCH + 8 });
  }

  drawTitles(columns) {
    const texts = columns.map(({ title, x, nodes }) => svg('text', { x, y: TOP - 22 }, `${title} (${count(nodes.length)})`));
    this.titles.replaceChildren(...texts);
  }

  drawNodes(columns) {
    this.order = columns.map(({ nodes }) => nodes.map(({ key }) => key));
    const flat = columns.flatMap(({ nodes }) => nodes);
    const tabbed = this.found.has(this.picked ?? this.last) ? this.picked ?? this.last : flat[0]?.key;
    for (const node of flat) {
      let made = this.nodes.get(node.key);
      if (!made) {
        const [name, what] = [svg('text', { class: 'name', x: 8, y: 15 }), svg('text', { class: 'what', x: 8, y: 29 })];
        const [flows, late] = [15, 29].map((y) => svg('text', { class: 'what', y, 'text-anchor': 'end' }));
        const [box, title] = [svg('rect', { height: HEIGHT, rx: 3 }), svg('title')];
        const group = svg('g', { role: 'button', 'data-key': node.key }, title, box, name, what, flows, late);
        made = { group, box, title, name, what, flows, late };
        this.nodes.set(node.key, made);
        this.front.append(group);
      }
      set(made.group, {
        class: ['node', node.isLit ? 'lit' : '', node.filter ? '' : 'others'].filter(Boolean).join(' '), transform: `translate(${node.x} ${node.y})`,
        tabindex: node.key === tabbed ? 0 : -1, 'aria-label': `${node.label}: ${words(node, node.flows === 1 ? ' flow' : ' flows')}`,
      });
      set(made.box, { width: this.nodeWidth, class: classOf(node.latency) });
      say(made.title, `${node.label}\n${words(node, ' flows')}`);
      const flows = count(node.flows);
      say(made.name, fitted(node.label, this.nodeWidth - 26 - 6.7 * flows.length));
      say(made.what, rate(node.rate));
      say(made.flows, flows);
      say(made.late, node.latency > 0 ? time(node.latency / 1e6) : '');
      for (const text of [made.flows, made.late]) set(text, { x: this.nodeWidth - 8 });
    }
    this.forget(this.nodes, this.found);
  }

  drawLines(lines) {
    const found = new Map(lines.map((line) => [line.key, line]));
    const ends = new Map();
    const slots = (node, side, other) => {
      const key = `${side}${node.key}`;
      if (!ends.has(key)) {
        const others = lines.filter((line) => line[side === 'o' ? 'from' : 'to'] === node).map((line) => (side === 'o' ? line.to : line.from));
        ends.set(key, others.sort((one, two) => one.y - two.y));
      }
      const others = ends.get(key);
      return node.y + 6 + ((others.indexOf(other) + 0.5) * (HEIGHT - 12)) / others.length;
    };
    for (const line of lines) {
      let made = this.lines.get(line.key);
      if (!made) {
        const [path, title, label] = [svg('path', { fill: 'none' }), svg('title'), svg('text', { 'text-anchor': 'middle' })];
        made = { group: svg('g', {}, title, path, label), path, title, label };
        this.lines.set(line.key, made);
        this.back.append(made.group);
      }
      const [x1, x2] = [line.from.x + this.nodeWidth, line.to.x];
      const [y1, y2] = [slots(line.from, 'o', line.to), slots(line.to, 'i', line.from)];
      set(made.group, { class: `way ${classOf(line.latency)}${line.isLit ? ' lit' : ''}` });
      set(made.path, { d: this.path(line, x1, y1, x2, y2), 'stroke-width': thickness(line.rate).toFixed(1) });
      say(made.title, `${line.from.label} → ${line.to.label}\n${words(line, ' flows')}`);
      set(made.label, { x: (x1 + x2) / 2, y: (y1 + y2) / 2 - 4 });
      say(made.label, fitted([rate(line.rate), line.latency > 0 ? time(line.latency / 1e6) : ''].filter(Boolean).join(' · '), x2 - x1));
    }
    this.forget(this.lines, found);
  }

  /** The path of a line. It passes above or below the entries of a column that it leaves out, so that it seems to pass none of them. */
  path({ from, to }, x1, y1, x2, y2) {
    const curve = (xa, ya, xb, yb) => `C${(xa + xb) / 2} ${ya} ${(xa + xb) / 2} ${yb} ${xb} ${yb}`;
    let [x, y, path] = [x1, y1, `M${x1} ${y1}`];
    for (const column of this.columns.slice(from.at + 1, to.at)) {
      const [first, last] = [column.nodes[0].y - 9, column.nodes.at(-1).y + HEIGHT + 9];
      const middle = y + ((y2 - y) * (column.x + this.nodeWidth / 2 - x)) / (x2 - x);
      const lane = middle - first < last - middle ? Math.min(middle, first) : Math.max(middle, last);
      path += `${curve(x, y, column.x, lane)}H${column.x + this.nodeWidth}`;
      [x, y] = [column.x + this.nodeWidth, lane];
    }
    return path + curve(x, y, x2, y2);
  }

  forget(made, found) {
    for (const [key, { group }] of made) {
      if (found.has(key)) continue;
      group.remove();
      made.delete(key);
    }
  }

  drawLegend() {
    const items = [...CLASSES.map(([, text], at) => [`late${at}`, text]), ['unknown', 'latency not known']];
    this.legend.append(svg('text', { x: 8, y: 14 }, 'Latency to the server or first hop. A line is thicker if more bytes pass in a second.'));
    items.forEach(([kind, text], at) => {
      const x = 8 + at * 142;
      this.legend.append(svg('g', { class: `way sample ${kind}` }, svg('path', { d: `M${x} 32h26`, 'stroke-width': 4 })), svg('text', { x: x + 32, y: 36 }, text));
    });
  }

  save() {
    const now = new Date(Date.now() + this.watch.offset).toISOString().slice(0, 19);
    this.draw();
    save(`sidetrack-map-${now.replaceAll(':', '')}Z.svg`, 'image/svg+xml', fileOf(this.svg));
  }

  move(columns, rows) {
    const key = this.picked ?? this.last ?? this.order[0]?.[0];
    let at = this.order.findIndex((column) => column.includes(key));
    if (at < 0) return;
    let row = this.order[at].indexOf(key);
    if (this.picked !== null) {
      at = Math.max(0, Math.min(this.order.length - 1, at + columns));
      row = Math.max(0, Math.min(this.order[at].length - 1, row + rows));
    }
    this.last = this.order[at][row];
    const { group } = this.nodes.get(this.last);
    group.focus();
    group.scrollIntoView({ block: 'nearest', inline: 'nearest' });
  }

  /** A key of the keyboard. True: it had a meaning. */
  key(event) {
    const acts = {
      ArrowDown: () => this.move(0, 1), j: () => this.move(0, 1), ArrowUp: () => this.move(0, -1), k: () => this.move(0, -1),
      ArrowRight: () => this.move(1, 0), l: () => this.move(1, 0), ArrowLeft: () => this.move(-1, 0), h: () => this.move(-1, 0),
      Enter: () => this.open(this.picked), ' ': () => this.open(this.picked), s: () => this.save(), Escape: () => document.activeElement?.blur(),
    };
    acts[event.key]?.();
    return event.key in acts;
  }
}
