// Whether the page hears of what happens, told in its head.

import { byId } from "./dom.js";
import { clock } from "./format.js";

let lostSince = null;

export function showLive() {
  lostSince = null;
  say("live", "Live");
}

// The service answers, but not what was asked for: what is missing is told in the page.
export function showRefused(problem) {
  lostSince = null;
  say("waiting", problem.code === "journal_unavailable" ? "Waiting for the run" : problem.message);
}

export function showLost() {
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
