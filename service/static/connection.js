// Whether the page hears of what happens, and whether anything can: told in its head.

import { byId } from "./dom.js";
import { clock } from "./format.js";

// Of the newest life, as /healthz says: the sign and the words.
const LIVES = {
  running: ["live", "Live"],
  silent: ["waiting", "Nothing is heard of the run"],
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
  if (health !== null) say(...(LIVES[health.life] ?? NO_LIFE));
}

// The service answers, but not what was asked for: what is missing is told in the page.
export function showRefused(problem) {
  heard = false;
  lostSince = null;
  if (problem.code === "journal_unavailable") say(...NO_LIFE);
  else say("waiting", problem.message);
}

export function showLost() {
  heard = false;
  lostSince ??= Date.now() / 1000;
  say("lost", `No connection since ${clock(lostSince).slice(-8)}; what is shown is from then. Trying again.`);
}

export function showLocked() {
  say("waiting", "A token is needed");
}

function say(state, text) {
  const place = byId("connection");
  if (place.textContent === text) return; // said once is enough for those who listen
  place.dataset.state = state;
  place.textContent = text;
}
