// The newest due checkpoints, and their state.

import { byId, element, empty, table, update } from "./dom.js";
import { bytes, clock, duration, number, ranks } from "./format.js";

const ROWS = 6;
const TIERS = { disk: "disk", target: "target", memory: "host memory", peer: "replica" };
const PARTS = { whole: "", weights: "weights only", small: "small state only" };

export function showCheckpoints(store) {
  store.watch(["checkpoints"], ({ checkpoints }, { checkpoints: problem }) => {
    const rows = (checkpoints?.checkpoints ?? []).slice(0, ROWS);
    const none = problem ? "Unknown: the journal cannot be read." : "None has been due so far.";
    update(byId("checkpoints"), rows.length ? checkpointTable(rows, checkpoints.total) : empty(none));
  });
}

function checkpointTable(rows, total) {
  return table(
    `${rows.length} of ${number(total, 9)}, newest first`,
    [
      { title: "Iteration", numeric: true, value: (one) => number(one.iteration, 9) },
      { title: "When", fixed: true, value: (one) => clock(one.created_unix_seconds) },
      { title: "Status", value: (one) => (one.reason ? `${one.status}: ${one.reason}` : one.status) },
      { title: "State", value: (one) => (one.origin === "predicted" ? "descends from a predicted one, or one restored in part" : "trained") },
      { title: "Size", numeric: true, value: (one) => bytes(one.bytes) },
      { title: "Training waited", numeric: true, value: (one) => duration(one.stall_seconds) },
      { title: "Durable after", numeric: true, value: (one) => duration(durable(one)) },
      { title: "Places", value: places },
    ],
    rows,
  );
}

function places({ copies }) {
  if (!copies.length) return number(null);
  return element("ul", { class: "plain" }, ...copies.map((copy) => element("li", {}, place(copy))));
}

function place({ tier, holds, bytes: size, verified, ranks: owners, copied_unix_seconds: copied }) {
  const parts = [owners === null ? TIERS[tier] : `${TIERS[tier]} of ${ranks(owners)}`];
  if (PARTS[holds]) parts.push(PARTS[holds]);
  if (size !== null) parts.push(bytes(size));
  parts.push(verified ? "verified" : "not verified");
  if (copied !== null) parts.push(clock(copied));
  return parts.join(", ");
}

function durable({ write_seconds: write, commit_seconds: commit }) {
  return write === null || commit === null ? null : write + commit;
}
