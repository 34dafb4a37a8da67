// Requests to the admin interface.

/** The interface has refused: what is wrong, what to do, and the status. */
export class Refused extends Error {
  constructor(status, body) {
    super(body.error ?? `status ${status}`);
    this.status = status;
    this.help = body.help ?? '';
  }
}

/** Called when the session is over. */
export const onLoggedOut = { act: () => {} };

/** Asks, and returns the answer's JSON. `query`: parameters; `body`: sent as JSON. */
export async function ask(path, { method = 'GET', query = {}, body, text = false, signal } = {}) {
  const pairs = Object.entries(query).filter(([, value]) => value !== undefined && value !== '');
  const search = pairs.length > 0 ? '?' + new URLSearchParams(pairs) : '';
  const response = await fetch(path + search, {
    method,
    signal,
    headers: body === undefined ? {} : { 'content-type': 'application/json' },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) {
    const answer = await response.json().catch(() => ({}));
    if (response.status === 401 && path !== '/page/session') onLoggedOut.act();
    throw new Refused(response.status, answer);
  }
  if (response.status === 204) return null;
  return text ? response.text() : response.json();
}
