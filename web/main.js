// The page: a login if the node asks for one, then the screens.

import { button, el, fill, memory, say } from './dom.js';
import { ask, onLoggedOut } from './ask.js';
import { Flows } from './flows.js';
import { login } from './login.js';
import { WayMap } from './map.js';
import { PANELS } from './panels.js';
import { clock, count, rate } from './units.js';
import { Watch } from './watch.js';

const KEYS = [
  ['j k ↑ ↓', 'move'], ['g G', 'first, last'], ['Enter', 'open the flow'], ['Esc', 'close'], ['/', 'filter'], ['f', 'freeze, go on'],
  ['c', 'columns'], ['x', 'end the flow'], ['y', 'copy the explain command'], ['r', 'make a rule'], ['s', 'save the map'], ['1 … 9', 'screens'], ['t', 'light, dark'], ['?', 'these keys'],
];

const body = el('div', { id: 'all' });
document.body.append(body);

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}
theme(memory.get('theme', null));

function switchTheme() {
  const isDark = matchMedia('(prefers-color-scheme: dark)').matches;
  const now = document.documentElement.dataset.theme ?? (isDark ? 'dark' : 'light');
  const next = now === 'dark' ? 'light' : 'dark';
  memory.set('theme', next);
  theme(next);
}

class Page {
  constructor(session) {
    this.session = session;
    const mayKill = session.role === 'admin';
    this.watch = new Watch({ change: () => this.changed(), state: (word, since) => this.state(word, since) });
    this.flows = new Flows({ watch: this.watch, mayKill });
    const context = { watch: this.watch, mayChange: mayKill, show: (filter) => this.showFlows(filter), use: (filter) => this.flows.field.put(filter) };
    this.screens = [
      { id: 'flows', title: 'Flows', screen: this.flows },
      { id: 'map', title: 'Map', screen: new WayMap(context) },
      ...PANELS.map(({ id, title, make }) => ({ id, title, screen: make(context) })),
    ];
    this.tabs = el('nav', { 'aria-label': 'Screens' }, this.screens.map(({ id, title }, index) => el('a', { href: `#${id}`, title: String(index + 1) }, title)));
    this.link = el('span', { class: 'link', role: 'status' });
    this.rates = el('span', { class: 'rates' });
    this.banner = el('div', { class: 'banner', role: 'alert', hidden: true });
    this.main = el('main', {});
    this.help = el('dialog', { class: 'help', 'aria-label': 'Keys' }, el('h2', {}, 'Keys'),
      el('dl', {}, KEYS.flatMap(([key, what]) => [el('dt', {}, key), el('dd', {}, what)])), button('Close', () => this.help.close()));
    fill(body,
      el('header', { class: 'top' }, el('strong', {}, 'Sidetrack'), this.tabs, this.rates, this.link,
        session.role === 'read' && el('span', { class: 'chip', title: 'This session may only look.' }, 'read only'),
        button('◐', switchTheme, { class: 'plain', title: 'Light or dark (t)', 'aria-label': 'Light or dark' }),
        button('?', () => this.help.showModal(), { class: 'plain', title: 'Keys (?)', 'aria-label': 'Keys' }),
        session.has_login && button('Log out', () => this.logOut(), { class: 'plain' })),
      this.banner, this.main, this.help);
    this.onKey = (event) => this.key(event);
    this.onHash = () => this.show();
    addEventListener('keydown', this.onKey);
    addEventListener('hashchange', this.onHash);
    this.show();
    this.watch.start('');
  }

  leave() {
    this.watch.stop();
    this.current?.screen.leave?.();
    removeEventListener('keydown', this.onKey);
    removeEventListener('hashchange', this.onHash);
  }

  show() {
    const id = location.hash.slice(1);
    const next = this.screens.find((screen) => screen.id === id) ?? this.screens[0];
    if (next === this.current) return;
    this.current?.screen.leave?.();
    this.current = next;
    for (const tab of this.tabs.children) {
      if (tab.getAttribute('href') === `#${next.id}`) tab.setAttribute('aria-current', 'page');
      else tab.removeAttribute('aria-current');
    }
    fill(this.main, next.screen.element);
    // On a narrow screen the tabs scroll.
    this.tabs.querySelector('[aria-current]').scrollIntoView({ block: 'nearest', inline: 'nearest' });
    next.screen.enter();
    if (next.id === 'flows') this.flows.table.grid.focus();
  }

  showFlows(filter) {
    location.hash = 'flows';
    this.flows.field.put(filter);
  }

  changed() {
    const { sums } = this.watch;
    if (sums) {
      say(this.rates, `↓ ${rate(sums.down_bytes_per_second) || '0 B/s'}  ↑ ${rate(sums.up_bytes_per_second) || '0 B/s'}`);
      document.title = `${count(sums.flows_active)} flows · Sidetrack`;
    }
    for (const { screen } of this.screens) screen.tick?.();
    this.current?.screen.draw?.();
  }

  state(word, since) {
    const texts = { connecting: '… connecting', live: '● live', lost: '✕ disconnected', paused: '‖ paused' };
    say(this.link, texts[word]);
    this.link.className = `link ${word}`;
    if (word === 'lost') {
      this.wasLost = since;
      this.tell(`The node has not answered since ${clock(since)}. What you see is from then. Trying again…`, false);
    } else if (word === 'live' && this.wasLost) {
      this.tell(`The node answers again; it did not since ${clock(this.wasLost)}. What ended meanwhile is in its history.`, true);
      this.wasLost = null;
    }
  }

  /** Shows a line over everything; a good one goes after a while. */
  tell(text, isGood) {
    clearTimeout(this.telling);
    this.banner.hidden = false;
    this.banner.classList.toggle('good', isGood);
    say(this.banner, text);
    if (isGood) this.telling = setTimeout(() => { this.banner.hidden = true; }, 10000);
  }

  async logOut() {
    await ask('/page/session', { method: 'DELETE' });
    begin();
  }

  key(event) {
    const isTyping = event.target.matches?.('input:not([type=checkbox]), textarea, select');
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping || this.help.open) return;
    const tab = this.screens[Number(event.key) - 1];
    if (tab) location.hash = tab.id;
    else if (event.key === 't') switchTheme();
    else if (event.key === '?') this.help.showModal();
    else if ((event.key === 'Enter' || event.key === ' ') && event.target.matches?.('button, a')) return;
    else if (!this.current.screen.key?.(event)) return;
    event.preventDefault();
  }
}

let page = null;

async function begin() {
  page?.leave();
  page = null;
  try {
    const session = await ask('/page/session');
    if (session.role) page = new Page(session);
    else login(body, (entered) => { page = new Page(entered); });
  } catch (error) {
    fill(body, el('div', { class: 'empty' }, el('h2', {}, 'The node does not answer'), el('p', {}, error.message), button('Try again', begin)));
  }
}

onLoggedOut.act = () => { if (page) begin(); };
begin();
