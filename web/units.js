// Numbers for people: three digits that count, and the unit beside each.

const SIZES = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];

function digits(value) {
  if (value === 0) return '0';
  if (value >= 99.95) return value.toFixed(0);
  return value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

/** Bytes, powers of 1000. */
export function bytes(count) {
  if (count === null || count === undefined) return '';
  let value = count;
  let at = 0;
  while (value >= 999.5 && at < SIZES.length - 1) {
    value /= 1000;
    at += 1;
  }
  return (at === 0 ? String(Math.round(value)) : digits(value)) + ' ' + SIZES[at];
}

/** Bytes per second. Nothing for none: what moves stands out. */
export function rate(perSecond) {
  return perSecond > 0 ? bytes(perSecond) + '/s' : '';
}

/** Seconds. */
export function time(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return '';
  if (seconds < 0.0000005) return '0 ms';
  if (seconds < 0.001) return digits(seconds * 1e6) + ' µs';
  if (seconds < 1) return digits(seconds * 1000) + ' ms';
  if (seconds < 60) return seconds.toFixed(seconds < 10 ? 1 : 0) + ' s';
  if (seconds < 3600) return Math.floor(seconds / 60) + ' min ' + String(Math.floor(seconds % 60)).padStart(2, '0') + ' s';
  if (seconds < 86400) return Math.floor(seconds / 3600) + ' h ' + String(Math.floor((seconds % 3600) / 60)).padStart(2, '0') + ' min';
  return Math.floor(seconds / 86400) + ' d ' + String(Math.floor((seconds % 86400) / 3600)).padStart(2, '0') + ' h';
}

/** Whole seconds of an age. */
export function age(seconds) {
  return seconds < 60 ? Math.floor(seconds) + ' s' : time(seconds);
}

/** Microseconds; nothing for 0, which stands for "not measured". */
export function micros(us) {
  return us > 0 ? time(us / 1e6) : '';
}

/** A number with a thin space at each thousand. */
export function count(value) {
  return String(value ?? '').replace(/\B(?=(\d{3})+$)/g, '\u202f');
}

/** The time of day in this browser's zone. */
export function clock(date) {
  return date.toLocaleTimeString([], { hour12: false });
}
