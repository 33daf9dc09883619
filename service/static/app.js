// The dashboard: the run, its connection, what a reader should know first, and the panels.

import { showLoss } from "./loss.js";
import { byId, clock, element, number, update } from "./page.js";
import { showCheckpoints, showRecoveries, showTime } from "./past.js";
import { showInterval, showNow, showPreview, showWhy } from "./plan.js";
import { Api, ApiError, NAMES, Store, Stream, hasToken, keepToken } from "./service.js";

const PANELS = [showNow, showLoss, showInterval, showTime, showRecoveries, showWhy, showCheckpoints, showPreview];
const STANDING_SECONDS = 15; // a run that stands still sends no events, and loses time
const RETRY_SECONDS = 3;
// What may be different after an event of the journal; after `hello` and `reset` much may not have been heard.
const TOUCHED = {
  hello: NAMES,
  reset: NAMES,
  progress: ["losses", "plan"],
  life: ["plan", "health"],
  checkpoint: ["checkpoints", "plan", "health"],
  plan: ["plan", "plans"],
  failure: ["failures", "plan", "health"],
  recovery: ["recoveries", "plan", "losses", "plans"],
  phase: ["phases", "plan"],
  fit: ["fits"],
  event: ["plan", "health"],
  unavailable: ["health"],
};
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

let heard = false;
let health = null; // null: not asked yet
let lostSince = null;

async function start() {
  try {
    const { runs } = await new Api().get("/runs");
    show(chosen(runs.map((run) => run.name)));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) return signIn();
    if (error.status) showRefused(error);
    else showLost();
    setTimeout(start, 1000 * RETRY_SECONDS);
  }
}

function chosen(names) {
  const asked = new URL(location).searchParams.get("run");
  const select = byId("run-select");
  select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  select.value = names.includes(asked) ? asked : names[0];
  select.addEventListener("change", () => location.assign(`?run=${encodeURIComponent(select.value)}`));
  byId("run-choice").hidden = names.length < 2;
  byId("run-name").textContent = names.length < 2 ? select.value : "";
  document.title = `${select.value} \u2013 CPSR`;
  return select.value;
}

function show(run) {
  const api = new Api(run);
  const store = new Store(api);
  store.watch(["health"], (answers) => {
    health = answers.health;
    if (heard) showHeard();
  });
  showNotices(store);
  PANELS.forEach((panel) => panel(store, api));
  store.want(NAMES);
  setInterval(() => store.want(["health", "plan"]), 1000 * STANDING_SECONDS);
  new Stream(api, {
    heard: (name) => {
      if (name === "reset") store.forget();
      store.want(TOUCHED[name] ?? []);
    },
    live: showHeard,
    lost: showLost,
    refused: (problem) => (problem.status === 401 ? signIn() : showRefused(problem)),
  }).follow();
}

// The head of the page: whether events arrive, and whether the run is alive

function showHeard() {
  heard = true;
  lostSince = null;
  if (health !== null) announce(...(LIVES[health.life] ?? NO_LIFE));
}

// The service answers with a refusal: the page shows what is missing.
function showRefused(problem) {
  heard = false;
  lostSince = null;
  if (problem.code === "journal_unavailable") announce(...NO_LIFE);
  else announce("waiting", problem.message);
}

function showLost() {
  heard = false;
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

// What a reader should know first: no journal, an unhealthy run, an override.
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

function override({
  interval_min_iterations: low,
  interval_max_iterations: high,
  reason,
  expires_unix_seconds: ends,
  taken_up: taken,
}) {
  const what =
    low === high
      ? `pinned to ${number(low, 9)} iterations`
      : `bounded (at least ${number(low, 9)}, at most ${number(high, 9)} iterations)`;
  return `The interval is ${what} until ${clock(ends)}: ${reason}${taken ? "." : "; the job has not applied it yet."}`;
}

start();
