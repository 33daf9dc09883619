// Rehearsed recoveries; the section appears with the first one.

import { byId, table } from "./dom.js";
import { clock, duration, number, signed } from "./format.js";

export function showRehearsals(store) {
  store.watch(["rehearsals"], ({ rehearsals }) => {
    const rows = rehearsals?.rehearsals ?? [];
    byId("rehearsals-section").hidden = !rows.length;
    if (rows.length) byId("rehearsals").replaceChildren(rehearsalTable(rows));
  });
}

function rehearsalTable(rows) {
  return table(
    "Newest first. The lag, in iterations, is that of the rehearsal's second half; below zero is ahead there",
    [
      { title: "When", fixed: true, value: (one) => clock(one.created_unix_seconds) },
      { title: "At", numeric: true, value: (one) => number(one.iteration, 9) },
      { title: "As if failed at", numeric: true, value: (one) => number(one.failure_iteration, 9) },
      { title: "Checkpoint", numeric: true, value: (one) => number(one.checkpoint_iteration, 9) },
      { title: "Lag", numeric: true, value: lag },
      { title: "Outcome", value: (one) => (one.reason ? `${one.outcome}: ${one.reason}` : one.outcome) },
      { title: "Training waited", numeric: true, value: (one) => duration(one.cost_seconds) },
    ],
    rows,
  );
}

function lag({ lag_iterations: iterations, lag_standard_error_iterations: deviation }) {
  return iterations === null ? number(null) : `${signed(iterations, 2)} \u00b1 ${number(deviation, 2)}`;
}
