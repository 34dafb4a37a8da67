// The caches: how full they are, how often they answer, what is large in them, and emptying them.

import { button, el } from './dom.js';
import { ask } from './ask.js';
import { empty, share, table } from './panel.js';
import { bytes, count } from './units.js';

/** The largest resources that are shown, and how long they are shown before the node is asked again, milliseconds. */
const LARGEST = 20;
const LARGEST_MS = 10000;

/** What was last told of the largest ones. */
const latest = { at: -Infinity, resources: [] };

async function largest() {
  if (performance.now() - latest.at > LARGEST_MS) {
    const { resources } = await ask('/v1/cache/resources', { query: { order: 'bytes', limit: String(LARGEST) } });
    Object.assign(latest, { at: performance.now(), resources });
  }
  return latest.resources.slice(0, LARGEST);
}

/** A button that asks once more before it removes. */
function purging(label, query, again) {
  const start = button('Purge…', () => {
    const yes = button(label, async () => {
      try {
        await ask('/v1/cache', { method: 'DELETE', query });
        latest.at = -Infinity;
        yes.blur();
        again();
      } catch (error) {
        yes.replaceWith(el('span', { class: 'wrong' }, error.message));
      }
    }, { class: 'danger' });
    start.replaceWith(yes);
    yes.focus();
  });
  return start;
}

/** The screen. */
export async function cache({ mayChange, again }) {
  const { caches } = await ask('/v1/cache');
  if (caches.length === 0) return [empty('This node has no cache', el('p', {}, 'A listener of kind “http” has one with '), el('pre', {}, 'cache_bytes = 268435456'))];
  const rows = caches.map(({ listener, memory, disk, requests }) => {
    const asked = requests.hits + requests.misses;
    return {
      cells: [listener, asked > 0 ? share(requests.hits, asked, `${((100 * requests.hits) / asked).toFixed(1)} %`, true) : 'no request yet', count(requests.hits), count(requests.misses), count(requests.passed),
        count(memory.resources), share(memory.bytes, memory.capacity_bytes, `${bytes(memory.bytes)} of ${bytes(memory.capacity_bytes)}`),
        disk ? count(disk.resources) : '', disk ? share(disk.bytes, disk.capacity_bytes, `${bytes(disk.bytes)} of ${bytes(disk.capacity_bytes)}`) : 'none',
        disk?.trouble ? `✕ ${disk.trouble}` : '', mayChange ? purging('Remove all resources', { listener, all: 'true' }, again) : ''],
    };
  });
  const large = (await largest()).map(({ listener, key, memory_bytes: memory, disk_bytes: disk }) => ({
    cells: [bytes(Math.max(memory, disk)), listener, key, memory > 0 ? bytes(memory) : '', disk > 0 ? bytes(disk) : '', mayChange ? purging('Remove it', { listener, url: key }, again) : ''],
  }));
  return [
    table('Caches', [{ title: 'Listener' }, { title: 'Hit rate' }, { title: 'Hits', right: true }, { title: 'Misses', right: true }, { title: 'Not for it', right: true }, { title: 'In memory', right: true }, { title: 'Memory' }, { title: 'On disk', right: true }, { title: 'Disk' }, { title: '' }, { title: '' }], rows),
    large.length > 0 && table('Largest resources', [{ title: 'Size', right: true }, { title: 'Listener' }, { title: 'URL' }, { title: 'In memory', right: true }, { title: 'On disk', right: true }, { title: '' }], large),
    el('p', { class: 'dim' }, 'A miss asks the server or a sibling, also to validate what is stored. Counts are since the start. The largest are those of the first 10 000 of each cache.'),
  ];
}
