// A table of any length: only the rows that can be seen exist, and they are used again while it scrolls.

import { el } from './dom.js';
import { isBad } from './columns.js';

/** The height of a row, pixels; style.css has the same. */
const ROW = 24;
/** Rows beyond the edge. */
const SPARE = 8;

export class Table {
  /** `on.open(row)`: a row is opened; `on.select(row)`; `on.sort(column)`. `now()`: the node's time, milliseconds. */
  constructor({ label, on, now }) {
    this.on = on;
    this.now = now;
    this.rows = [];
    this.columns = [];
    this.sort = { id: 'flow', isDown: true };
    this.selected = null;
    this.pool = [];
    this.head = el('div', { class: 'row head', role: 'row', 'aria-rowindex': '1' });
    this.body = el('div', { class: 'body', role: 'rowgroup', on: { mouseover: ({ target }) => this.tell(target.closest('.cell')) } });
    this.empty = el('div', { class: 'empty' });
    this.grid = el('div', {
      class: 'grid', role: 'grid', tabindex: '0', 'aria-label': label,
      on: { scroll: () => this.scrolled(), focus: () => this.selected ?? this.move(0) },
    }, el('div', { class: 'headgroup', role: 'rowgroup' }, this.head), this.body);
    this.element = el('div', { class: 'table' }, this.grid, this.empty);
    new ResizeObserver(() => this.draw()).observe(this.grid);
  }

  setColumns(columns) {
    this.columns = columns;
    const template = columns.map((column) => (column.grow ? `minmax(${column.width}px, ${column.grow}fr)` : `${column.width}px`)).join(' ');
    const least = columns.reduce((sum, column) => sum + column.width, 0);
    this.grid.style.setProperty('--columns', template);
    this.grid.style.setProperty('--least', `${least}px`);
    this.grid.setAttribute('aria-colcount', String(columns.length));
    this.head.replaceChildren(...columns.map((column) => el('div', {
      class: column.right ? 'cell right' : 'cell', role: 'columnheader', title: column.hint,
      'aria-sort': this.sort.id === column.id ? (this.sort.isDown ? 'descending' : 'ascending') : 'none',
    }, el('button', { type: 'button', tabindex: '-1', on: { click: () => this.on.sort(column) } },
      column.title, el('span', { class: 'arrow', 'aria-hidden': 'true' },
        this.sort.id === column.id ? (this.sort.isDown ? ' ▼' : ' ▲') : '')))));
    this.body.replaceChildren();
    this.pool = [];
    this.draw();
  }

  /** Shows these rows, in this order. `isEmpty`: elements to show if there are none. */
  setRows(rows, isEmpty) {
    this.rows = rows;
    // After another connection to the node the same flow is another object.
    const { selected } = this;
    if (selected && !rows.includes(selected)) {
      this.selected = rows.find((row) => row.flow === selected.flow && row.ts === selected.ts) ?? selected;
    }
    this.body.style.height = `${rows.length * ROW}px`;
    this.grid.setAttribute('aria-rowcount', String(rows.length + 1));
    this.empty.replaceChildren(...(rows.length === 0 ? isEmpty : []));
    this.empty.hidden = rows.length > 0;
    this.draw();
  }

  scrolled() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
    });
  }

  /** Brings the rows that can be seen up to date. */
  draw() {
    const first = Math.max(0, Math.floor(this.grid.scrollTop / ROW) - SPARE);
    const count = Math.ceil(this.grid.clientHeight / ROW) + 2 * SPARE;
    const last = Math.min(this.rows.length, first + count);
    const now = this.now();
    while (this.pool.length < Math.min(count, last - first)) this.pool.push(this.newLine());
    for (const line of this.pool) line.isUsed = false;
    for (let index = first; index < last; index += 1) {
      // The same index is drawn by the same line, so that scrolling changes few lines.
      const line = this.pool[index % this.pool.length];
      line.isUsed = true;
      this.drawLine(line, index, now);
    }
    for (const line of this.pool) line.element.hidden = !line.isUsed;
  }

  newLine() {
    const cells = this.columns.map((column) => el('div', { class: column.right ? 'cell right' : 'cell', role: 'gridcell' }, ''));
    const line = { cells, texts: cells.map(() => null), index: -1, isUsed: true };
    line.element = el('div', {
      class: 'row', role: 'row', hidden: true,
      on: { click: () => this.select(this.rows[line.index], true), dblclick: () => this.open() },
    }, cells);
    this.body.append(line.element);
    return line;
  }

  drawLine(line, index, now) {
    const row = this.rows[index];
    if (line.index !== index) {
      line.index = index;
      line.element.style.transform = `translateY(${index * ROW}px)`;
      line.element.setAttribute('aria-rowindex', String(index + 2));
      line.element.id = `row-${index}`;
    }
    const isSelected = row === this.selected;
    line.element.className = 'row' + (isSelected ? ' selected' : '') + (row.reason ? ' ended' : '') + (isBad(row.reason) ? ' bad' : '');
    line.element.setAttribute('aria-selected', String(isSelected));
    if (isSelected) this.grid.setAttribute('aria-activedescendant', line.element.id);
    this.columns.forEach((column, at) => {
      const text = column.text(row, now);
      if (line.texts[at] === text) return;
      line.texts[at] = text;
      const cell = line.cells[at];
      if (column.chips) cell.replaceChildren(...column.chips(row).map((chip) => el('span', { class: 'chip' }, chip)));
      else cell.firstChild.data = text;
    });
  }

  /** A cell whose text does not fit shows it all under the mouse. */
  tell(cell) {
    if (cell) cell.title = cell.scrollWidth > cell.clientWidth ? [...cell.childNodes].map((part) => part.textContent).join(' → ') : '';
  }

  /** Selects a row, or none. */
  select(row, isByHand = false) {
    this.selected = row ?? null;
    if (!row) this.grid.removeAttribute('aria-activedescendant');
    this.draw();
    this.on.select(this.selected, isByHand);
  }

  /** Moves the selection by some rows. */
  move(by) {
    if (this.rows.length === 0) return;
    const at = this.rows.indexOf(this.selected);
    const first = Math.floor(this.grid.scrollTop / ROW);
    const last = this.rows.length - 1;
    // Without a selection the first row that can be seen is taken, unless an end is asked for.
    const from = at >= 0 ? at + by : Number.isFinite(by) ? first : by;
    const to = Math.max(0, Math.min(last, from));
    this.show(to);
    this.select(this.rows[to]);
  }

  /** Scrolls until a row can be seen. */
  show(index) {
    const top = index * ROW;
    const room = this.grid.clientHeight - this.head.offsetHeight;
    if (top < this.grid.scrollTop) this.grid.scrollTop = top;
    else if (top + ROW > this.grid.scrollTop + room) this.grid.scrollTop = top + ROW - room;
  }

  open() {
    if (this.selected) this.on.open(this.selected);
  }
}
