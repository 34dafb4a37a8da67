// The columns of the flows. `text` is what a cell shows, `key` what it is sorted by.

import { age, bytes, count, micros, rate, time } from './units.js';

/** How old a flow is, or how long it took, seconds. */
export function ageOf(row, now) {
  return row.reason ? row.duration_seconds : Math.max(0, (now - row.since_ms) / 1000);
}

/** Whether a reason says that something went wrong. */
export function isBad(reason) {
  return Boolean(reason) && !['ok', 'idle', 'lifetime', 'shutdown', 'killed', 'client_gone'].includes(reason);
}

const words = (name) => ({ text: (row) => row[name] ?? '', key: (row) => row[name] ?? '' });
const number = (name, text) => ({ right: true, text: (row) => text(row[name]), key: (row) => row[name] ?? -1 });

/** `width`: pixels; `grow`: takes part of the room that is left; `right`: numbers stand at the right. */
export const COLUMNS = [
  { id: 'flow', title: 'Flow', hint: 'number of the flow', width: 74, ...number('flow', count) },
  { id: 'state', title: 'State', hint: 'live, or why it ended', width: 108, text: (row) => row.reason ?? 'live', key: (row) => row.reason ?? '' },
  { id: 'process', title: 'Process', hint: 'local program', width: 110, grow: 1, ...words('process') },
  { id: 'client', title: 'Client', hint: 'address and port of the client', width: 150, grow: 1, ...words('client') },
  { id: 'host', title: 'Host', hint: 'host name, if known', width: 170, grow: 3, text: (row) => row.host ?? row.tls_name ?? '', key: (row) => row.host ?? row.tls_name ?? '' },
  { id: 'to', title: 'To', hint: 'host name, or where the program wanted to go', width: 90, grow: 3, text: (row) => row.host ?? row.orig_dst ?? '', key: (row) => row.host ?? row.orig_dst ?? '' },
  { id: 'destination', title: 'Destination', hint: 'where the program wanted to go', width: 150, grow: 1, ...words('orig_dst') },
  { id: 'rule', title: 'Rule', hint: 'the rule that decided', width: 110, grow: 1, text: (row) => row.rule ?? 'default', key: (row) => row.rule ?? '' },
  { id: 'chain', title: 'Chain', hint: 'functions that it passes', width: 120, grow: 1, chips: (row) => row.chain ?? [], text: (row) => (row.chain ?? []).join(' '), key: (row) => (row.chain ?? []).join(' ') },
  { id: 'carrier', title: 'Carrier', hint: 'how it is carried', width: 150, grow: 2, chips: (row) => (row.carrier ? row.carrier.split(' -> ') : []), text: (row) => row.carrier ?? '', key: (row) => row.carrier ?? '' },
  { id: 'down_rate', title: '↓ rate', hint: 'bytes per second from the server', width: 80, ...number('down_bytes_per_second', rate) },
  { id: 'up_rate', title: '↑ rate', hint: 'bytes per second to the server', width: 80, ...number('up_bytes_per_second', rate) },
  { id: 'down', title: '↓ total', hint: 'bytes from the server', width: 84, ...number('bytes_down', bytes) },
  { id: 'up', title: '↑ total', hint: 'bytes to the server', width: 84, ...number('bytes_up', bytes) },
  { id: 'rtt', title: 'RTT', hint: 'round-trip time to the server or first hop', width: 80, ...number('server_rtt_us', micros) },
  { id: 'client_rtt', title: 'Client RTT', hint: 'round-trip time to the client', width: 86, ...number('client_rtt_us', micros) },
  { id: 'connect', title: 'Connect', hint: 'time until the path to the server stood', width: 82, ...number('connect_seconds', time) },
  { id: 'first_byte', title: 'First byte', hint: 'time until the first byte of the server', width: 86, ...number('first_byte_seconds', time) },
  { id: 'age', title: 'Age', hint: 'age, or duration of an ended flow', width: 92, right: true, text: (row, now) => age(ageOf(row, now)), key: (row, now) => ageOf(row, now) },
  { id: 'protocol', title: 'Protocol', hint: 'tcp or udp', width: 70, ...words('protocol') },
  { id: 'listener', title: 'Listener', hint: 'what caught it', width: 90, ...words('listener') },
  { id: 'user', title: 'User', hint: 'user who opened it', width: 90, ...words('user') },
  { id: 'detail', title: 'Detail', hint: 'more than the reason says', width: 200, grow: 2, ...words('detail') },
];

/** The order in which columns find room. */
const FIRST = ['state', 'host', 'down_rate', 'age', 'process', 'up_rate', 'rule', 'carrier', 'rtt', 'destination', 'flow', 'chain', 'client', 'down', 'up', 'connect', 'first_byte', 'client_rtt', 'detail', 'protocol', 'listener', 'user'];

/** The columns that find room in a table of this width, pixels. On a narrow one the destination stands in for a host. */
export function columnsFor(width) {
  const isNarrow = width < 640;
  const order = isNarrow ? FIRST.map((id) => (id === 'host' ? 'to' : id)) : FIRST;
  const chosen = [];
  let room = width;
  for (const id of order) {
    const { width: need } = COLUMNS.find((column) => column.id === id);
    if (need > room && chosen.length > 2) break;
    room -= need;
    chosen.push(id);
  }
  return chosen;
}
