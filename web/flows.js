// The first screen: flows that run and that have ended, in one table.

import { button, el, memory, say } from './dom.js';
import { ask } from './ask.js';
import { COLUMNS, columnsFor } from './columns.js';
import { Drawer, explainOf, ruleOf } from './drawer.js';
import { FilterField } from './filter.js';
import { Table } from './table.js';
import { count } from './units.js';

/** Flows of the history in one answer. */
const HISTORY_MAX = 5000;

const SCOPES = [
  ['live', 'Live'], ['recent', 'Live and just ended'], ['15m', 'Last 15 min'], ['1h', 'Last hour'], ['1day', 'Last day'], ['30days', 'Last 30 days'],
];

export class Flows {
  /** `watch`: the live rows. `mayKill`: the session may end flows. */
  constructor({ watch, mayKill }) {
    this.watch = watch;
    this.filter = '';
    this.scope = memory.get('scope', 'recent');
    this.old = [];
    this.frozen = null;
    this.chosen = memory.get('columns', null);
    this.field = new FilterField({ on: (text) => this.useFilter(text), rows: () => this.table.rows });
    this.scopes = el('select', { 'aria-label': 'Which flows', on: { change: () => this.useScope(this.scopes.value) } },
      SCOPES.map(([value, label]) => el('option', { value }, label)));
    this.scopes.value = this.scope;
    this.freezing = button('Freeze', () => this.freeze(), { title: 'f', 'aria-pressed': 'false' });
    this.choosing = button('Columns', () => this.choose(), { title: 'c', 'aria-expanded': 'false', 'aria-controls': 'choice' });
    this.choice = el('div', { id: 'choice', class: 'choice', role: 'group', 'aria-label': 'Columns', hidden: true });
    this.sums = el('span', { class: 'sums', role: 'status' });
    this.table = new Table({
      label: 'Flows',
      now: () => this.frozen?.now ?? Date.now() + watch.offset,
      on: {
        open: (row) => this.drawer.open(row),
        select: (row, isByHand) => { if (row && (isByHand || this.drawer.isOpen)) this.drawer.open(row); },
        sort: (column) => this.sortBy(column),
      },
    });
    this.table.sort = memory.get('sort', { id: 'flow', isDown: true });
    this.drawer = new Drawer({ on: { close: () => this.table.grid.focus() }, mayKill });
    this.element = el('section', { class: 'flows', 'aria-label': 'Flows' },
      el('div', { class: 'tools' }, this.field.element, this.scopes, this.freezing, this.choosing, this.sums),
      this.choice,
      el('div', { class: 'split' }, this.table.element, this.drawer.element));
    new ResizeObserver(() => { if (!this.chosen) this.showColumns(); }).observe(this.table.element);
    this.showColumns();
  }

  /** The screen is shown. */
  enter() {
    this.draw();
    if (this.isOld) this.loadOld();
  }

  get isOld() {
    return !['live', 'recent'].includes(this.scope);
  }

  showColumns() {
    const ids = this.chosen ?? columnsFor(this.table.element.clientWidth || innerWidth);
    if (this.shown === ids.join()) return;
    this.shown = ids.join();
    this.table.setColumns(COLUMNS.filter((column) => ids.includes(column.id)));
  }

  choose() {
    const isOpen = this.choice.hidden;
    this.choice.hidden = !isOpen;
    this.choosing.setAttribute('aria-expanded', String(isOpen));
    if (!isOpen) return;
    const ids = this.shown.split(',');
    const boxes = COLUMNS.map((column) => el('label', { title: column.hint },
      el('input', { type: 'checkbox', value: column.id, checked: ids.includes(column.id), on: { change: () => this.takeChoice() } }),
      ' ' + column.title));
    this.choice.replaceChildren(...boxes, button('As at first', () => {
      this.chosen = null;
      memory.set('columns', null);
      this.choice.hidden = true;
      this.showColumns();
    }));
    this.choice.querySelector('input').focus();
  }

  takeChoice() {
    const ids = [...this.choice.querySelectorAll('input:checked')].map((box) => box.value);
    if (ids.length === 0) return;
    this.chosen = ids;
    memory.set('columns', ids);
    this.showColumns();
  }

  sortBy(column) {
    const { sort } = this.table;
    const isDown = sort.id === column.id ? !sort.isDown : Boolean(column.right);
    this.table.sort = { id: column.id, isDown };
    memory.set('sort', this.table.sort);
    this.table.setColumns(this.table.columns);
    this.draw();
  }

  useFilter(text) {
    this.filter = text;
    this.watch.start(text);
    if (this.isOld) this.loadOld();
    this.draw();
  }

  useScope(scope) {
    this.scope = scope;
    this.scopes.value = scope;
    memory.set('scope', scope);
    this.old = [];
    this.wrong = null;
    if (this.isOld) this.loadOld();
    this.draw();
  }

  async loadOld() {
    const asked = this.scope + this.filter;
    this.isLoading = true;
    try {
      const answer = await ask('/v1/history', { query: { since: this.scope, filter: this.filter, limit: String(HISTORY_MAX) } });
      if (asked !== this.scope + this.filter) return;
      this.old = answer.flows.filter((flow) => flow.reason);
      for (const row of this.old) {
        row.since_ms = Date.parse(row.ts);
        row.is_past = true;
      }
      this.hasMore = answer.has_more;
      this.wrong = null;
    } catch (error) {
      this.wrong = error;
    }
    this.isLoading = false;
    this.draw();
  }

  freeze() {
    this.frozen = this.frozen ? null : { now: Date.now() + this.watch.offset };
    if (this.frozen) {
      const copies = new Map(this.table.rows.map((row) => [row, { ...row }]));
      this.table.selected = copies.get(this.table.selected) ?? null;
      this.table.setRows([...copies.values()], this.emptyText());
    } else {
      this.table.selected = null;
    }
    this.freezing.setAttribute('aria-pressed', String(Boolean(this.frozen)));
    say(this.freezing, this.frozen ? 'Go on' : 'Freeze');
    this.draw();
  }

  /** The rows of the scope. What ended just now stands in the history too. */
  rows() {
    const rows = [...this.watch.live.values()];
    if (this.scope === 'live') return rows;
    rows.push(...this.watch.past.values());
    if (!this.isOld) return rows;
    const known = new Set(rows.map((row) => `${row.flow} ${row.ts}`));
    return rows.concat(this.old.filter((row) => !known.has(`${row.flow} ${row.ts}`)));
  }

  sorted(rows) {
    const { id, isDown } = this.table.sort;
    const column = COLUMNS.find((one) => one.id === id) ?? COLUMNS[0];
    const now = this.table.now();
    const keyed = rows.map((row) => ({ row, key: id === 'flow' ? row.since_ms : column.key(row, now) }));
    const collator = new Intl.Collator();
    // Rising first: that is almost the order in which rows come, so that most updates sort in one pass.
    keyed.sort((one, other) => {
      const order = typeof one.key === 'string' ? collator.compare(one.key, other.key) : one.key - other.key;
      return order || one.row.flow - other.row.flow;
    });
    const sorted = keyed.map(({ row }) => row);
    return isDown ? sorted.reverse() : sorted;
  }

  /** After an update of the node, or of what is asked for. */
  draw() {
    if (!this.element.isConnected) return;
    this.tell();
    if (this.frozen) return;
    this.table.setRows(this.sorted(this.rows()), this.emptyText());
  }

  tell() {
    const shown = this.frozen ? this.table.rows.length : this.watch.live.size;
    const parts = [this.frozen ? `frozen: ${count(shown)} flows` : `${count(shown)} live`];
    if (this.watch.past.size > 0 && this.scope !== 'live') parts.push(`${count(this.watch.past.size)} just ended`);
    if (this.watch.missed > 0) parts.push(`${count(this.watch.missed)} ended too fast to be shown`);
    if (this.isOld) parts.push(this.isLoading ? 'searching…' : `${count(this.old.length)}${this.hasMore ? ' latest' : ''} of the history`);
    say(this.sums, parts.join(' · '));
  }

  emptyText() {
    if (this.wrong && this.isOld) return [el('h2', {}, this.wrong.message), el('p', {}, this.wrong.help)];
    if (this.filter) {
      return [el('h2', {}, 'No flow matches'), el('p', {}, 'The filter is ', el('code', {}, this.filter)),
        button('Remove the filter', () => this.field.put(''))];
    }
    return [el('h2', {}, 'No flow runs'), el('p', {}, 'As soon as a program connects through this node, its flow stands here. To try it:'),
      el('pre', {}, 'sidetrack run -- curl https://example.org/'),
      el('p', { class: 'dim' }, 'The flows of a run stand on the page of that run. Those of this node come through its listeners: see Health.')];
  }

  /** A key of the keyboard. True: it had a meaning. */
  key(event) {
    const { table, drawer } = this;
    const page = Math.max(1, Math.floor(table.grid.clientHeight / 24) - 2);
    const acts = {
      j: () => table.move(1), ArrowDown: () => table.move(1), k: () => table.move(-1), ArrowUp: () => table.move(-1),
      PageDown: () => table.move(page), PageUp: () => table.move(-page),
      g: () => table.move(-Infinity), Home: () => table.move(-Infinity), G: () => table.move(Infinity), End: () => table.move(Infinity),
      Enter: () => table.open(), '/': () => this.field.focus(), f: () => this.freeze(), c: () => this.choose(),
      x: () => { table.open(); drawer.isOpen && drawer.askToKill(); },
      y: () => { table.open(); drawer.isOpen && drawer.make(explainOf(drawer.flow), 'the command'); },
      r: () => { table.open(); drawer.isOpen && drawer.make(ruleOf(drawer.flow), 'a rule; edit it and put it into the configuration'); },
      Escape: () => {
        if (!this.choice.hidden) this.choose();
        else if (drawer.isOpen) drawer.close();
        else table.select(null);
      },
    };
    acts[event.key]?.();
    return event.key in acts;
  }
}
