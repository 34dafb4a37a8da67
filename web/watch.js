// The live flows, as the node tells them (`GET /v1/live`). Nothing here is guessed: rows are what the node sent.

import { ask } from './ask.js';

/** Ended flows that stay in the table; the history has more. */
const PAST_MAX = 2000;
/** How long a hidden tab stays connected, milliseconds. */
const HIDDEN_MS = 30000;
/** Time before the next attempt, milliseconds. */
const AGAIN_MS = 2000;

/**
 * Follows the node. Calls `on.change()` after each update, `on.state(word, since)` with `connecting`, `live`, `lost` or
 * `paused`, and `on.wrong(error)` if the node refuses.
 */
export class Watch {
  constructor(on) {
    this.on = on;
    /** Running flows by number. */
    this.live = new Map();
    /** Flows that ended while this page watched, by number. */
    this.past = new Map();
    this.sums = null;
    this.filter = '';
    /** The node's clock minus ours, milliseconds. */
    this.offset = 0;
    this.missed = 0;
    this.source = null;
    this.lostAt = null;
    document.addEventListener('visibilitychange', () => this.seen());
  }

  /** Starts, or starts again with another filter. */
  start(filter) {
    if (filter !== this.filter) {
      this.live.clear();
      this.past.clear();
      this.missed = 0;
    }
    this.filter = filter;
    this.connect();
  }

  stop() {
    clearTimeout(this.again);
    this.source?.close();
    this.source = null;
  }

  connect() {
    this.stop();
    this.on.state(this.lostAt ? 'lost' : 'connecting', this.lostAt);
    const query = this.filter ? '?' + new URLSearchParams({ filter: this.filter }) : '';
    const source = new EventSource('/v1/live' + query);
    this.source = source;
    /** The numbers that this connection has named, until its first pass is over. */
    let fresh = new Set();
    const on = (name, act) => source.addEventListener(name, (event) => {
      if (this.source === source) act(JSON.parse(event.data));
    });
    on('reset', () => { fresh = new Set(); });
    on('flows', (part) => {
      for (const row of part.rows) {
        fresh?.add(row.flow);
        this.enter(row);
      }
      for (const moved of part.moved) this.moved(moved);
      for (const id of part.left) this.live.delete(id);
      // The first pass of a large node comes in many parts: show what is there.
      if (fresh && part.rows.length > 0) this.on.change();
    });
    on('tick', (tick) => {
      if (fresh) {
        for (const id of this.live.keys()) if (!fresh.has(id)) this.live.delete(id);
        fresh = null;
      }
      this.tick(tick);
    });
    source.onerror = () => {
      if (this.source === source) this.lost();
    };
  }

  enter(row) {
    const known = this.live.get(row.flow);
    // The same object, so that a selected row stays selected. Fields that went away must not stay.
    if (known) {
      for (const name of Object.keys(known)) if (!(name in row)) delete known[name];
      Object.assign(known, row);
    } else {
      row.since_ms = Date.parse(row.ts);
      this.live.set(row.flow, row);
      return;
    }
    known.since_ms = Date.parse(row.ts);
  }

  moved([flow, up, down, upRate, downRate, clientRtt, serverRtt]) {
    const row = this.live.get(flow);
    if (!row) return;
    row.bytes_up = up;
    row.bytes_down = down;
    row.up_bytes_per_second = upRate;
    row.down_bytes_per_second = downRate;
    row.client_rtt_us = clientRtt;
    row.server_rtt_us = serverRtt;
  }

  tick(tick) {
    this.lostAt = null;
    this.sums = tick;
    this.offset = Date.parse(tick.now) - Date.now();
    this.missed += tick.ended_missed;
    for (const id of tick.gone) this.live.delete(id);
    for (const row of tick.ended) {
      row.since_ms = Date.parse(row.ts);
      this.past.delete(row.flow);
      this.past.set(row.flow, row);
      this.live.delete(row.flow);
    }
    while (this.past.size > PAST_MAX) this.past.delete(this.past.keys().next().value);
    this.on.state('live');
    this.on.change();
  }

  async lost() {
    this.stop();
    this.lostAt ??= new Date();
    this.on.state('lost', this.lostAt);
    try {
      // The stream does not say why it failed; this request does, and shows the login if the session is over.
      await ask('/v1/filter', { query: { filter: this.filter } });
    } catch (error) {
      if (error.status === 401) return;
    }
    clearTimeout(this.again);
    this.again = setTimeout(() => this.connect(), AGAIN_MS);
  }

  /** A hidden tab leaves after a while, and comes back when it is seen. */
  seen() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => {
        if (!this.source) return;
        this.stop();
        this.isPaused = true;
        this.on.state('paused');
      }, HIDDEN_MS);
    } else if (this.isPaused) {
      this.isPaused = false;
      this.connect();
    }
  }
}
