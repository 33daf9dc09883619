// Recoveries of the run: sources, guard, outcome and cost.

import { byId, element, empty, table } from "./dom.js";
import { clock, duration, number, ranks, signed } from "./format.js";

const SOURCES = { departure: "emergency dump" };
const OUTCOMES = { kept: "kept", watching: "in probation", vetoed: "vetoed", rolled_back: "rolled back" };

export function showRecoveries(store) {
  store.watch(["recoveries"], ({ recoveries }, { recoveries: problem }) => {
    const rows = recoveries?.recoveries ?? [];
    const none = problem ? "Unknown: the journal cannot be read." : "None: the run has not failed so far.";
    byId("recoveries").replaceChildren(rows.length ? recoveryTable(rows) : empty(none));
  });
}

function recoveryTable(rows) {
  return table(
    "Newest first; the lag is in iterations, below zero is ahead in the measured window",
    [
      { title: "When", fixed: true, value: (one) => clock(one.created_unix_seconds) },
      { title: "Failed at", numeric: true, value: (one) => number(one.failure_iteration, 9) },
      { title: "Checkpoint", numeric: true, value: (one) => number(one.checkpoint_iteration, 9) },
      { title: "Continued at", numeric: true, value: (one) => number(one.restored_iteration, 9) },
      { title: "State of each rank", value: sources },
      { title: "Lag", numeric: true, value: lag },
      { title: "Guard", value: guard },
      { title: "Outcome", value: outcome },
      { title: "Took", numeric: true, value: took },
    ],
    rows,
  );
}

function sources({ method, sources: known }) {
  if (!known.length) return method;
  const owners = new Map(); // of each source: there may be thousands of ranks, and few sources
  for (const { rank, source, iteration } of known) {
    const name = `${SOURCES[source] ?? source}, of ${number(iteration, 9)}`;
    owners.set(name, [...(owners.get(name) ?? []), rank]);
  }
  const lines = [...owners].map(([name, own]) => element("li", {}, `${ranks(own)}: ${name}`));
  return element("ul", { class: "plain" }, ...lines);
}

function lag({ guard: { lag: measured }, expected_lag_iterations: expected }) {
  const lines = [];
  if (typeof measured?.lag_iterations === "number") {
    const deviation = number(measured.standard_error_iterations, 2);
    lines.push(element("div", {}, `${signed(measured.lag_iterations, 2)} \u00b1 ${deviation}`));
  }
  if (expected !== null) lines.push(element("div", { class: "quiet" }, `expected ${signed(expected, 2)}`));
  return lines.length ? element("div", {}, ...lines) : number(null);
}

function guard({ guard: { loss, watch, shortened } }) {
  const lines = [];
  if (loss && "accepted" in loss) {
    const word = loss.accepted ? "accepted" : "refused";
    lines.push(`${word}: ${signed(loss.excess_nats, 2)} of ${number(loss.tolerance_nats, 2)} nats`);
  }
  if (shortened) lines.push(`${shortened} operators shortened`);
  if (watch?.status) lines.push(`watched: ${watch.status.replaceAll("_", " ")}`);
  return lines.length
    ? element("ul", { class: "plain" }, ...lines.map((line) => element("li", {}, line)))
    : number(null);
}

function outcome({ method, outcome: end, reason }) {
  return element(
    "details",
    {},
    element("summary", {}, `${method}, ${OUTCOMES[end] ?? end}`),
    element("p", {}, reason || "No reason is recorded."),
  );
}

function took({ load_seconds: load, predict_seconds: predict, inject_seconds: inject }) {
  const known = [load, predict, inject].filter((seconds) => seconds !== null);
  return known.length ? duration(known.reduce((sum, seconds) => sum + seconds)) : number(null);
}
