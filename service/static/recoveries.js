// Recoveries of the run: sources, guard, outcome and cost.

import { byId, element, empty, table } from "./dom.js";
import { clock, duration, number, ranks, signed } from "./format.js";

const SOURCES = { departure: "emergency dump" };
const WHOLE = new Set(["exact", "departure", "stale", "scratch"]); // the other methods predict
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
    "Newest first, in iterations. Exact: the run repeats these steps, and ends later. Predicted state: the run repeats none, " +
      "and its last loss differs by the expected cost; the lag in the first 160 iterations hints at it",
    [
      { title: "When", fixed: true, value: (one) => clock(one.created_unix_seconds) },
      { title: "Failed at", numeric: true, value: (one) => number(one.failure_iteration, 9) },
      { title: "Checkpoint", numeric: true, value: (one) => number(one.checkpoint_iteration, 9) },
      { title: "Continued at", numeric: true, value: (one) => number(one.restored_iteration, 9) },
      { title: "State of each rank", value: sources },
      { title: "Cost", value: cost },
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

function cost(one) {
  const spent = WHOLE.has(state(one)) ? later(one) : onTime(one);
  const lag = one.guard.lag?.lag_iterations;
  const lines = spent === null ? [] : [element("div", {}, spent)];
  if (typeof lag === "number") {
    const measured = `${signed(lag, 2)} \u00b1 ${number(one.guard.lag.standard_error_iterations, 2)}`;
    lines.push(element("div", { class: "quiet" }, `lag after 60\u2013160: ${measured}`));
  }
  return lines.length ? element("div", {}, ...lines) : number(null);
}

// The state that training went on from: of a given-up prediction, that of the checkpoint.
function state({ method, outcome: end, guard: { rolled_back_to: instead } }) {
  const givenUp = !WHOLE.has(method) && (end === "vetoed" || end === "rolled_back");
  return givenUp ? (instead ?? "exact") : method;
}

function later(one) {
  const { failure_iteration: failed, checkpoint_iteration: checkpoint, restored_iteration: restored } = one;
  const lost = failed === null ? 0 : failed - (state(one) === one.method ? restored : checkpoint);
  if (!(lost > 0)) return null;
  return state(one) === "exact" ? `exact: ${number(lost, 9)} later` : `${number(lost, 9)} later`;
}

function onTime({ expected_end_cost_iterations: expected, settings: { expected_deviation_iterations: deviation } }) {
  if (expected === null) return null;
  const known = typeof deviation === "number" ? ` \u00b1 ${number(deviation, 2)}` : "";
  return `predicted state; expected cost ${signed(expected, 2)}${known}`;
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
