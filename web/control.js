// The control plane: applications with their eight steps, as the orchestrator tells them, and the agreement of this node.

import { el } from './dom.js';
import { ask } from './ask.js';
import { empty, table } from './panel.js';
import { count, time } from './units.js';

const STEPS = ['submit', 'request access', 'grants', 'request nodes', 'plan', 'ship', 'configure', 'ready'];
/** Movements that are shown. */
const MOVEMENTS_MAX = 200;

/** The eight steps of an application: what is done, what is not, and why it stopped. */
function steps(lines, phase) {
  const done = new Map(lines.filter(({ event }) => event === 'done').map((line) => [line.number, line]));
  const failed = lines.find(({ event }) => event === 'failed');
  const isReady = phase === 'ready';
  const stopped = failed ? STEPS.indexOf(failed.step.replaceAll('-', ' ').replaceAll('_', ' ')) + 1 : 0;
  const next = failed || isReady ? 0 : done.size + 1;
  const chips = STEPS.map((name, at) => {
    const number = at + 1;
    const line = done.get(number);
    const [sign, kind] = line || isReady ? ['✓', 'done'] : number === stopped ? ['✕', 'failed'] : number === next && phase === 'preparing' ? ['…', 'now'] : ['·', 'open'];
    const what = line ? `${time(line.seconds)}: ${line.detail}` : number === stopped ? failed.error : '';
    return el('li', { class: `step8 ${kind}`, title: `${name}${what ? ` — ${what}` : ''}` }, `${sign} ${number} ${name}`);
  });
  return el('div', {}, el('ol', { class: 'steps8' }, chips), failed && el('p', { class: 'wrong' }, `✕ ${failed.domain ? `${failed.domain}: ` : ''}${failed.error}`));
}

const words = { preparing: 'is being set up', ready: 'ready', ending: 'is being taken back' };

function rows({ applications, progress }) {
  const lines = new Map(progress.map((report) => [report.id, report.lines]));
  const known = new Set(applications.map(({ id }) => id));
  const live = applications.map(({ application, id, phase, owner, domains }) => ({
    cells: [application.name, words[phase] ?? phase, steps(lines.get(id) ?? [], phase), application.purpose, domains.join(', '), owner ?? ''],
  }));
  // Set-ups that failed, and applications that have ended since.
  const past = progress.filter(({ id }) => !known.has(id)).reverse().map(({ name, owner, lines: told }) => {
    const hasFailed = told.some(({ event }) => event === 'failed');
    return { kind: hasFailed ? 'bad' : 'dead', cells: [name, hasFailed ? '✕ not set up' : 'has ended', steps(told, 'ended'), '', '', owner ?? ''] };
  });
  return live.concat(past);
}

/** The ways of data that the applications have. */
function movements({ applications }) {
  return applications.flatMap(({ application, movements: all }) => all.map(({ client, data, by, functions_client: near, functions_server: far }) => ({
    cells: [application.name, data, client, near.concat(far).join(' → ') || 'none', by.join(', ')],
  })));
}

async function orchestrated() {
  let told;
  try {
    told = await ask('/v1/control');
  } catch (error) {
    if (error.status === 404) return [];
    return [el('p', { class: 'wrong' }, `${error.message}${error.help ? ` — ${error.help}` : ''}`)];
  }
  const applications = rows(told);
  const ways = movements(told);
  return [
    applications.length > 0
      ? table('Applications and their eight steps', [{ title: 'Application' }, { title: 'State' }, { title: 'Steps' }, { title: 'Purpose' }, { title: 'Domains' }, { title: 'Of' }], applications)
      : el('p', {}, 'The orchestrator has no application. “sidetrack orchestrate submit FILE” submits one.'),
    ways.length > 0 && table('Data that may move for them', [{ title: 'Application' }, { title: 'Data' }, { title: 'Client' }, { title: 'Functions on the way' }, { title: 'Agreements' }], ways),
  ];
}

function agreement({ mode, agreements, next_change: next, movements: all, unfeasibility_ratio: ratio }) {
  if (mode === null) return [];
  const shown = all.slice(0, MOVEMENTS_MAX).map((one) => ({
    kind: one.decision === 'deny' ? 'dead' : null,
    cells: [one.purpose, one.access, one.data, `${one.from} → ${one.to}`, one.decision === 'allow' ? '✓ may move' : '✕ may not',
      one.decision === 'allow' ? one.functions_client.concat(one.functions_server).join(' → ') || 'no function' : one.why],
  }));
  const facts = [['Mode', mode], ['Agreements that hold', agreements.join(', ') || 'none'], ['Next change', next ?? 'none is planned'], ['Unfeasible', `${(100 * ratio).toFixed(0)} % of ${count(all.length)} movements`]];
  return [
    el('dl', { class: 'facts' }, facts.flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)])),
    table(`What the agreement of this node says${all.length > MOVEMENTS_MAX ? `: the first ${MOVEMENTS_MAX} of ${count(all.length)} movements` : ''}`,
      [{ title: 'Purpose' }, { title: 'Access' }, { title: 'Data' }, { title: 'From → to' }, { title: 'Decision' }, { title: 'Functions, or why not' }], shown),
  ];
}

/** The screen. */
export async function control() {
  const [applications, policy] = await Promise.all([orchestrated(), ask('/v1/policy')]);
  const parts = [...applications, ...agreement(policy)];
  if (parts.length > 0) return parts;
  return [empty('This node knows no control plane', el('p', {}, 'To see the applications of an orchestrator here, say where it is: '),
    el('pre', {}, '[admin.orchestrator]\naddress = "orchestrator.example:7000"\nidentity = "operator.pem"\nca = "ca.pem"'),
    el('p', {}, 'An agreement of this node stands here too: “agreement” of [policy].'))];
}
