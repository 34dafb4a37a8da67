// The login: a token of the node's file, sent in the body of a request. It is never part of an address.

import { el, say } from './dom.js';
import { ask } from './ask.js';

/** Shows the form, and calls `done` with the session after a login. */
export function login(host, done) {
  const token = el('input', {
    id: 'token', type: 'password', autocomplete: 'current-password', spellcheck: 'false', required: true,
    'aria-describedby': 'login-help login-error',
  });
  const wrong = el('p', { id: 'login-error', class: 'wrong', role: 'alert' });
  const enter = el('button', { type: 'submit', class: 'main' }, 'Log in');
  const form = el('form', {
    class: 'login',
    on: {
      submit: async (event) => {
        event.preventDefault();
        enter.disabled = true;
        say(wrong, '');
        try {
          done(await ask('/page/session', { method: 'POST', body: { token: token.value.trim() } }));
        } catch (error) {
          say(wrong, `${error.message}${error.help ? ': ' + error.help : ''}`);
          token.select();
        } finally {
          enter.disabled = false;
        }
      },
    },
  },
  el('h1', {}, 'Sidetrack'),
  el('input', { class: 'away', type: 'text', name: 'username', autocomplete: 'username', value: location.host, tabindex: '-1', 'aria-hidden': 'true' }),
  el('label', { for: 'token' }, 'Token'),
  token,
  el('p', { id: 'login-help', class: 'dim' },
    'The node keeps its tokens in a file that its log names at the start. ',
    'A token of the role “read” may only look.'),
  wrong,
  enter);
  host.replaceChildren(form);
  token.focus();
}
