// What the run has gone through: its recoveries and its newest checkpoints.

import { known } from "./loss.js";
import { byId, bytes, clock, duration, element, empty, number, ranks, signed, table, update } from "./page.js";

const SOURCES = { departure: "emergency dump" };
const WHOLE = new Set(["exact", "departure", "older experts", "scratch"]); // the other methods predict
const OUTCOMES = { kept: "kept", watching: "in probation", vetoed: "vetoed", rolled_back: "rolled back" };
const CHECKPOINTS = 6;

// Recoveries

export function showRecoveries(store) {
  store.watch(["recoveries"], ({ recoveries }, { recoveries: problem }) => {
    const rows = known(recoveries);
    const none = problem ? "Unknown: the journal cannot be read." : "None: the run has not failed so far.";
    byId("recoveries").replaceChildren(rows.length ? recoveryTable(rows) : empty(none));
  });
}

function recoveryTable(rows) {
  return table(
    "Newest first, in iterations. Exact: the run repeats these steps, and ends later. Predicted state: the run repeats none, " +
      "and its last loss differs by the expected cost",
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
  return spent === null ? number(null) : element("div", {}, spent);
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

function onTime(one) {
  const { expected_end_cost_iterations: expected, settings } = one;
  if (expected === null) return null;
  const { expected_deviation_iterations: deviation, move_iterations: move } = settings;
  const known = typeof deviation === "number" ? ` \u00b1 ${number(deviation, 2)}` : "";
  const rest = one.restored_iteration < one.failure_iteration ? "recomputing" : "skipping";
  const parts = move ? `: ${rest} ${number(expected - move, 2)}, move ${signed(move, 2)}` : "";
  return `${one.method === "stale" ? "stale" : "predicted"} state; expected cost ${signed(expected, 2)}${known}${parts}`;
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

// Checkpoints

export function showCheckpoints(store) {
  store.watch(["checkpoints"], ({ checkpoints }, { checkpoints: problem }) => {
    const rows = (checkpoints?.rows ?? []).slice(0, CHECKPOINTS);
    const none = problem ? "Unknown: the journal cannot be read." : "None has been due so far.";
    update(byId("checkpoints"), rows.length ? checkpointTable(rows, checkpoints.total) : empty(none));
  });
}

function checkpointTable(rows, total) {
  const origin = { predicted: "descends from a predicted one, or one restored in part", trained: "trained" };
  const durable = ({ write_seconds: write, commit_seconds: commit }) =>
    write === null || commit === null ? null : write + commit;
  return table(
    `${rows.length} of ${number(total, 9)}, newest first`,
    [
      { title: "Iteration", numeric: true, value: (one) => number(one.iteration, 9) },
      { title: "When", fixed: true, value: (one) => clock(one.created_unix_seconds) },
      { title: "Status", value: (one) => (one.reason ? `${one.status}: ${one.reason}` : one.status) },
      { title: "State", value: (one) => origin[one.origin] },
      { title: "Size", numeric: true, value: (one) => bytes(one.bytes) },
      { title: "Training waited", numeric: true, value: (one) => duration(one.stall_seconds) },
      { title: "Durable after", numeric: true, value: (one) => duration(durable(one)) },
    ],
    rows,
  );
}
