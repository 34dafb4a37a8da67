// Makes SVG elements, and saves a drawing as a file of its own.

const NS = 'http://www.w3.org/2000/svg';
/** What a style sheet may have set, and a file of its own needs as attributes. */
const STYLES = ['fill', 'fill-opacity', 'stroke', 'stroke-width', 'stroke-dasharray', 'opacity', 'font-family', 'font-size', 'font-weight', 'text-anchor'];
/** Width of a character of the larger text, pixels. */
const CHARACTER = 7.3;

/** Makes an element of SVG. Children: elements and text. */
export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS(NS, tag);
  set(node, props);
  node.append(...children.flat().filter((child) => child !== null && child !== false));
  return node;
}

/** Sets attributes that have changed; `null` removes one. */
export function set(node, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
  }
}

/** A text that fits into this width, pixels: cut at its end if it is too long. */
export function fitted(text, width) {
  const room = Math.max(3, Math.floor(width / CHARACTER));
  let used = 0;
  let out = '';
  for (const c of text) {
    used += c.codePointAt(0) >= 0x1100 ? 2 : 1;
    if (used > room) return out.slice(0, -1) + '…';
    out += c;
  }
  return out;
}

/** The text of a file that shows the drawing as it stands here. XML cannot express some characters, even escaped. */
export function fileOf(drawing) {
  const copy = drawing.cloneNode(true);
  const from = [drawing, ...drawing.querySelectorAll('*')];
  const to = [copy, ...copy.querySelectorAll('*')];
  from.forEach((node, at) => {
    const style = getComputedStyle(node);
    if (style.display === 'none') to[at].remove();
    for (const name of STYLES) to[at].setAttribute(name, style.getPropertyValue(name));
    for (const name of ['class', 'tabindex', 'role', 'aria-label']) to[at].removeAttribute(name);
  });
  const { width, height } = drawing.getBoundingClientRect();
  set(copy, { width, height, viewBox: `0 0 ${width} ${height}` });
  const back = getComputedStyle(document.body).backgroundColor;
  copy.prepend(svg('rect', { width: '100%', height: '100%', fill: back }));
  return new XMLSerializer().serializeToString(copy).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, '\ufffd');
}

/** Offers a text as a file to save. */
export function save(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement('a');
  link.href = address;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
