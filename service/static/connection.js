// The head of the page: whether events arrive, and whether the run is alive.

import { byId } from "./dom.js";
import { clock } from "./format.js";

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

export function showConnection(store) {
  store.watch(["health"], (answers) => {
    health = answers.health;
    if (heard) showHeard();
  });
}

export function showHeard() {
  heard = true;
  lostSince = null;
  if (health !== null) announce(...(LIVES[health.life] ?? NO_LIFE));
}

// The service answers with a refusal: the page shows what is missing.
export function showRefused(problem) {
  heard = false;
  lostSince = null;
  if (problem.code === "journal_unavailable") announce(...NO_LIFE);
  else announce("waiting", problem.message);
}

export function showLost() {
  heard = false;
  lostSince ??= Date.now() / 1000;
  announce("lost", `No connection since ${clock(lostSince).slice(-8)}; the page shows that state. Trying again.`);
}

export function showLocked() {
  announce("waiting", "A token is needed");
}

function announce(state, text) {
  const place = byId("connection");
  if (place.textContent === text) return; // a screen reader needs it once
  place.dataset.state = state;
  place.textContent = text;
}
