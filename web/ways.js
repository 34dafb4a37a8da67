// The ways of flows through the node, added up: columns of what they pass, and the lines between.

/** Most entries of a column; the others are one entry. */
const NODES_MAX = 30;
/** Most lines. */
const LINES_MAX = 400;

/** A value in the filter language. */
export const quoted = (text) => `"${text.replace(/[\\"]/g, '\\$&')}"`;

/** The address of `1.2.3.4:5`, `[2001:db8::1%eth0]:5` or `name:5`. */
export function host(address) {
  return address.slice(0, address.lastIndexOf(':')).replace(/^\[|\]$/g, '').replace(/%.*$/, '').replace(/^::ffff:(?=\d+\.)/i, '');
}

/** The network of a client: /24 of IPv4, /64 of IPv6. */
export function network(address) {
  const ip = host(address);
  if (!ip.includes(':')) return ip.replace(/\.\d+$/, '.0/24');
  const [head, tail] = ip.split('::');
  const first = head === '' ? [] : head.split(':');
  if (tail !== undefined) {
    const last = tail === '' ? [] : tail.split(':');
    while (first.length + last.length < 8) first.push('0');
    first.push(...last);
  }
  const four = first.slice(0, 4);
  while (four.at(-1) === '0') four.pop();
  return `${four.join(':')}::/64`;
}

/** The columns. `of`: the text of a flow, `null` if it passes nothing there; `filter`: selects the flows of an entry; `label`: how it
    is shown. */
const COLUMNS = [
  {
    id: 'source', title: 'Sources', of: (row) => row.process ?? (row.client ? network(row.client) : null),
    filter: (name, row) => (row.process ? `proc == ${quoted(name)}` : `src in ${name} and not proc ~ "*"`),
  },
  { id: 'listener', title: 'Listeners', of: (row) => row.listener ?? null, filter: (name) => `listener == ${quoted(name)}` },
  { id: 'chain', title: 'Functions', of: (row) => (row.chain?.length > 0 ? row.chain.join(',') : null), label: (name) => name.replaceAll(',', ' → '), filter: (name) => `chain == ${quoted(name)}` },
  { id: 'carrier', title: 'Carriers', of: (row) => (row.carrier?.startsWith('overlay:') ? null : row.carrier ?? null), filter: (name) => `carrier == ${quoted(name)}` },
  { id: 'overlay', title: 'Overlay nodes', of: (row) => (row.carrier?.startsWith('overlay:') ? row.carrier : null), label: (name) => name.slice(8), filter: (name) => `carrier == ${quoted(name)}` },
  {
    id: 'destination', title: 'Destinations', of: (row) => row.host ?? (row.orig_dst ? host(row.orig_dst) : null),
    filter: (name) => (/^[\d.]+$|:/.test(name) ? `dst == ${quoted(name)}` : `host == ${quoted(name)}`),
  },
];

class Sum {
  constructor() {
    this.flows = 0;
    this.rate = 0;
    this.bytes = 0;
    this.late = 0;
    this.timed = 0;
    this.isLit = false;
  }

  add(row, isLit) {
    this.flows += 1;
    this.rate += (row.up_bytes_per_second ?? 0) + (row.down_bytes_per_second ?? 0);
    this.bytes += (row.bytes_up ?? 0) + (row.bytes_down ?? 0);
    const us = row.server_rtt_us > 0 ? row.server_rtt_us : (row.connect_seconds ?? 0) * 1e6;
    if (us > 0) {
      this.late += us;
      this.timed += 1;
    }
    this.isLit ||= isLit;
  }

  /** Mean latency, microseconds; 0: not measured. */
  get latency() {
    return this.timed > 0 ? this.late / this.timed : 0;
  }
}

const larger = (one, other) => other.bytes - one.bytes || other.flows - one.flows || (one.name < other.name ? -1 : 1);

/**
 * Adds up. `picked`: the key of an entry; what its flows pass is lit. Returns the columns that have entries, and the lines. Entries
 * are ordered by the bytes of their flows, which change their order more rarely than rates do.
 */
export function ways(rows, picked) {
  const columns = COLUMNS.map(({ id, title }) => ({ id, title, byName: new Map(), nodes: [] }));
  const all = [];
  for (const row of rows) {
    const names = COLUMNS.map(({ of }) => of(row));
    all.push({ row, names });
    names.forEach((name, at) => {
      if (name === null) return;
      let node = columns[at].byName.get(name);
      if (!node) {
        node = Object.assign(new Sum(), { key: `${at} ${name}`, name, row });
        columns[at].byName.set(name, node);
      }
      node.add(row, false);
    });
  }
  columns.forEach((column, at) => {
    const sorted = [...column.byName.values()].sort(larger);
    const rest = sorted.length > NODES_MAX ? sorted.splice(NODES_MAX - 1) : [];
    column.nodes = sorted;
    for (const node of sorted) {
      node.filter = COLUMNS[at].filter(node.name, node.row);
      node.label = COLUMNS[at].label?.(node.name) ?? node.name;
    }
    if (rest.length === 0) return;
    const others = Object.assign(new Sum(), { key: `${at}others`, name: '', label: `${rest.length} others`, filter: null });
    for (const { name, flows, rate, bytes, late, timed } of rest) {
      others.flows += flows;
      others.rate += rate;
      others.bytes += bytes;
      others.late += late;
      others.timed += timed;
      column.byName.set(name, others);
    }
    column.nodes.push(others);
  });
  return { columns: columns.filter(({ nodes }) => nodes.length > 0), lines: lines(all, columns, picked), flows: all.length };
}

function lines(all, columns, picked) {
  const found = new Map();
  for (const { row, names } of all) {
    const passed = names.map((name, at) => (name === null ? null : columns[at].byName.get(name))).filter((node) => node !== null);
    const isLit = picked !== null && passed.some(({ key }) => key === picked);
    passed.forEach((node, at) => {
      node.isLit ||= isLit;
      const next = passed[at + 1];
      if (!next) return;
      const key = `${node.key}\n${next.key}`;
      let line = found.get(key);
      if (!line) {
        line = Object.assign(new Sum(), { key, from: node, to: next, name: key });
        found.set(key, line);
      }
      line.add(row, isLit);
    });
  }
  return [...found.values()].sort(larger).slice(0, LINES_MAX);
}
