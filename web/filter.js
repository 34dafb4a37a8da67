// The field for a filter. The node reads the text: it says what is wrong and what may come next.

import { el, say } from './dom.js';
import { ask } from './ask.js';

/** Values of fields that only the rows know. */
const FROM_ROWS = {
  proc: (row) => row.process, process: (row) => row.process, host: (row) => row.host, user: (row) => row.user,
  carrier: (row) => row.carrier,
};
const VALUES_MAX = 8;

export class FilterField {
  /** `on(text)`: a valid filter was entered. `rows()`: the rows of the table, whose values are offered. */
  constructor({ on, rows }) {
    this.on = on;
    this.rows = rows;
    this.words = [];
    this.at = -1;
    this.input = el('input', {
      id: 'filter', type: 'search', spellcheck: 'false', autocomplete: 'off', autocapitalize: 'off', enterkeyhint: 'search',
      placeholder: 'Filter: proc == curl and dst in 10.0.0.0/8', role: 'combobox', 'aria-label': 'Filter',
      'aria-expanded': 'false', 'aria-controls': 'filter-words', 'aria-autocomplete': 'list', 'aria-describedby': 'filter-error',
      on: {
        input: () => this.look(), focus: () => this.look(), click: () => this.look(), keydown: (event) => this.key(event),
        blur: () => setTimeout(() => this.close(), 150), search: () => this.input.value === '' && this.enter(),
      },
    });
    this.list = el('ul', { id: 'filter-words', class: 'words', role: 'listbox', 'aria-label': 'What may come next', hidden: true });
    this.wrong = el('div', { id: 'filter-error', class: 'wrong', role: 'status' });
    this.element = el('div', { class: 'filter' }, this.input, this.list, this.wrong);
  }

  focus() {
    this.input.focus();
    this.input.select();
  }

  /** Puts a text in, and enters it. */
  put(text) {
    this.input.value = text;
    this.enter();
  }

  look() {
    this.looking = this.typed();
  }

  async typed() {
    const text = this.input.value;
    const at = this.input.selectionStart ?? text.length;
    this.asked?.abort();
    this.asked = new AbortController();
    try {
      const answer = await ask('/v1/filter', { query: { filter: text, at: String(at) }, signal: this.asked.signal });
      // While somebody writes, the end of the text is not wrong yet.
      if (answer.is_valid || answer.error.from < at - 1) this.tell(answer.error);
      this.offer(answer.completion, text, at);
    } catch (error) {
      if (error.name !== 'AbortError') this.close();
    }
  }

  tell(error) {
    say(this.wrong, error ? `column ${error.from + 1}: ${error.message}` : '');
    this.input.setAttribute('aria-invalid', String(Boolean(error)));
  }

  offer({ from, words, field }, text, at) {
    this.from = from;
    this.to = at;
    const typed = text.slice(from, at).replace(/^["']/, '');
    const value = FROM_ROWS[field];
    const found = new Set(words);
    if (value) {
      for (const row of this.rows()) {
        const one = value(row);
        if (one && one.startsWith(typed) && one !== typed) found.add(/^[\w.*?-]+$/.test(one) ? one : JSON.stringify(one));
        if (found.size >= VALUES_MAX) break;
      }
    }
    this.words = [...found];
    this.at = -1;
    this.list.replaceChildren(...this.words.map((word, index) => el('li', {
      id: `word-${index}`, role: 'option', 'aria-selected': 'false',
      on: { mousedown: (event) => { event.preventDefault(); this.take(index); } },
    }, word)));
    this.show(this.words.length > 0 && document.activeElement === this.input);
  }

  show(isOpen) {
    this.list.hidden = !isOpen;
    this.input.setAttribute('aria-expanded', String(isOpen));
    if (!isOpen) this.input.removeAttribute('aria-activedescendant');
  }

  close() {
    this.show(false);
    this.at = -1;
  }

  pick(index) {
    this.list.children[this.at]?.setAttribute('aria-selected', 'false');
    this.at = (index + this.words.length) % this.words.length;
    const item = this.list.children[this.at];
    item.setAttribute('aria-selected', 'true');
    item.scrollIntoView({ block: 'nearest' });
    this.input.setAttribute('aria-activedescendant', item.id);
  }

  take(index) {
    const text = this.input.value;
    const before = text.slice(0, this.from) + this.words[index] + ' ';
    this.input.value = before + text.slice(this.to).trimStart();
    this.input.setSelectionRange(before.length, before.length);
    this.look();
  }

  /** Takes the chosen word, or the first; a list for an older text is waited for. */
  async takeLatest() {
    await this.looking;
    if (this.words.length > 0) this.take(Math.max(0, this.at));
  }

  key(event) {
    const isOpen = !this.list.hidden;
    if (event.key === 'ArrowDown' && isOpen) this.pick(this.at + 1);
    else if (event.key === 'ArrowUp' && isOpen) this.pick(this.at < 0 ? -1 : this.at - 1);
    else if (event.key === 'Tab' && isOpen && !event.shiftKey) this.takeLatest();
    else if (event.key === 'Enter' && isOpen && this.at >= 0) this.take(this.at);
    else if (event.key === 'Enter') this.enter();
    else if (event.key === 'Escape') {
      if (isOpen) this.close();
      else this.input.blur();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Asks whether the filter is right, and uses it. */
  async enter() {
    const text = this.input.value.trim();
    this.asked?.abort();
    try {
      const answer = await ask('/v1/filter', { query: { filter: text } });
      this.tell(answer.error);
      if (!answer.is_valid) {
        this.input.setSelectionRange(answer.error.from, Math.max(answer.error.to, answer.error.from + 1));
        return;
      }
      this.close();
      this.on(text);
    } catch (error) {
      this.tell({ from: 0, message: error.message });
    }
  }
}
