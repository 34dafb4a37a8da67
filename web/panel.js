// What the screens with tables share: asking again and again, tables, bars, and reading metrics.

import { el, fill } from './dom.js';

/** How often a screen asks, milliseconds. */
const EVERY_MS = 2000;

/** A screen that asks again and again while it is shown. `look()` returns its elements. */
export class Panel {
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
export function table(caption, columns, rows) {
  return el('table', { class: 'list' }, el('caption', {}, caption),
    el('thead', {}, el('tr', {}, columns.map(({ title, right }) => el('th', { scope: 'col', class: right ? 'right' : null }, title)))),
    el('tbody', {}, rows.map((row) => el('tr', { class: row.kind ?? null }, row.cells.map((cell, at) => el('td', { class: columns[at].right ? 'right' : null }, cell))))));
}

export function empty(title, ...more) {
  return el('div', { class: 'nothing' }, el('h2', {}, title), more);
}

/** A share as a bar with its number. `isGood`: much is good. */
export function share(used, most, text, isGood = false) {
  const part = most > 0 ? Math.min(1, used / most) : 0;
  const bar = el('span', { class: part > 0.9 && !isGood ? 'fill full' : 'fill' });
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

/** Makes the maker of a screen. */
export function panel(label, look) {
  return (context) => {
    const made = new Panel(label, () => look({ ...context, again: () => made.ask() }));
    return made;
  };
}
