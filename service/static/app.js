// The dashboard: the run, its connection, what a reader should know first, and the panels.

import { showLoss } from "./loss.js";
import { byId, clock, element, number, update } from "./page.js";
import { showCheckpoints, showRecoveries } from "./past.js";
import { showInterval, showNow, showPreview, showWhy } from "./plan.js";
import { Api, Store, hasToken, keepToken } from "./service.js";

const PANELS = [showNow, showLoss, showInterval, showRecoveries, showWhy, showCheckpoints, showPreview];
// Of the newest life, from /healthz: the sign and the words.
const LIVES = {
  running: ["live", "Live"],
  silent: ["waiting", "The run is silent"],
  killed: ["ended", "The run was killed"],
  clean: ["ended", "The run has ended"],
  sigterm: ["ended", "The run has left after SIGTERM"],
  error: ["ended", "The run ended with an error"],
};
const NO_LIFE = ["waiting", "Waiting for the run"];

let lostSince = null;

function start() {
  const api = new Api();
  const store = new Store(api);
  store.watch(["plan"], ({ plan }) => (byId("run-name").textContent = plan?.run_id ?? ""));
  showNotices(store);
  PANELS.forEach((panel) => panel(store, api));
  store.follow((problem) => {
    if (problem !== null) return showProblem(problem);
    lostSince = null;
    announce(...(LIVES[store.answers.health.answer.life] ?? NO_LIFE));
  });
}

// The head of the page: whether the service answers, and whether the run is alive

function showProblem(problem) {
  if (problem.status === 401) return signIn();
  if (problem.status) return announce("waiting", problem.message);
  lostSince ??= Date.now() / 1000;
  announce("lost", `No connection since ${clock(lostSince).slice(-8)}; the page shows that state. Trying again.`);
}

function announce(state, text) {
  const place = byId("connection");
  if (place.textContent === text) return; // a screen reader needs it once
  place.dataset.state = state;
  place.textContent = text;
}

// Asks for the token of the service; the page is loaded anew with it.
function signIn() {
  const form = byId("sign-in");
  const field = byId("token");
  if (!form.hidden) return;
  form.hidden = false;
  byId("panels").hidden = byId("notices").hidden = true;
  announce("waiting", "A token is needed");
  if (hasToken()) byId("token-problem").textContent = "That is not the token of this service.";
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    keepToken(field.value.trim());
    location.reload();
  });
  field.focus();
}

// What a reader should know first: no journal, an unhealthy run, an override, slow ranks.
function showNotices(store) {
  store.watch(["health", "plan", "losses"], ({ health, plan, losses }, { plan: problem, losses: unread }) => {
    const nothing = unread !== null && unread.status !== 0 && plan === null && losses === null;
    byId("panels").hidden = nothing;
    const shown = nothing
      ? [notice("", `${sentence(unread.message)} This page shows the run as soon as it can be read.`)]
      : [];
    if (health?.reason && !nothing) shown.push(notice("bad", `Not healthy: ${health.reason}.`));
    if (problem !== null && problem.status !== 0 && !nothing)
      shown.push(notice("", sentence(`${problem.message}; ${problem.hint}`)));
    if (plan?.override) shown.push(notice("", override(plan.override)));
    for (const { message } of plan?.slow_ranks ?? []) shown.push(notice("bad", sentence(message)));
    for (const warning of plan?.warnings ?? []) shown.push(notice("bad", `${warning}.`));
    update(byId("notices"), ...shown);
  });
}

function notice(kind, text) {
  return element("p", { class: `notice ${kind}` }, text);
}

function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

function override({ interval_iterations: every, expires_unix_seconds: until, reason, taken_up: taken }) {
  const ending = taken ? "." : "; the job has not applied it yet.";
  return `The interval is pinned to ${number(every, 9)} iterations until ${clock(until)}: ${reason}${ending}`;
}

start();
