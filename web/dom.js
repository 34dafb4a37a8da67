// Makes elements. Text from flows only ever becomes text: there is no markup in strings anywhere in this page.

/** Makes an element. `props`: `class`, `on` (listeners by event), `hidden`, and attributes. Children: elements and text. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'class') node.className = value;
    else if (name === 'on') for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else node.setAttribute(name, value === true ? '' : String(value));
  }
  put(node, ...children);
  return node;
}

/** Appends elements and text. */
export function put(node, ...children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child);
  }
  return node;
}

/** Replaces what is in an element. */
export function fill(node, ...children) {
  node.replaceChildren();
  return put(node, ...children);
}

/** Sets an element's text, if it is another one. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A button. */
export function button(label, act, props = {}) {
  return el('button', { type: 'button', on: { click: act }, ...props }, label);
}

/** Copies text, also where the page has no secure context. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el('textarea', { class: 'away', readonly: true, 'aria-hidden': 'true' });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand('copy');
    area.remove();
    return done;
  }
}

/** What this browser remembers for this page, such as columns. Works without storage too. */
export const memory = {
  get(name, otherwise) {
    try {
      const text = localStorage.getItem('sidetrack.' + name);
      return text === null ? otherwise : JSON.parse(text);
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem('sidetrack.' + name, JSON.stringify(value));
    } catch { /* A browser without storage forgets it with the tab. */ }
  },
};
