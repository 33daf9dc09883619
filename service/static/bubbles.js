// How long each rank's training thread has waited in the newest life, and what was done meanwhile.

import { byId, element, empty, table, update } from "./dom.js";
import { bytes, duration, number, percent } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const ROWS = 16; // ranks in the table, those that waited longest
const SUMS = [
  "seconds",
  "bubble_seconds",
  "used_seconds",
  "late_seconds",
  "outside_seconds",
  "slices",
  "late_slices",
  "copied_seconds",
  "copied_bytes",
  "copied_beside_bytes",
];

export function showBubbles(store) {
  store.watch(["bubbles"], ({ bubbles }, { bubbles: problem }) => {
    const ranks = ofNewestLife(bubbles?.bubbles ?? []);
    const none = problem
      ? "Unknown: the journal cannot be read."
      : "No waits are recorded. Ranks wait for each other in a pipeline over gloo, and for a data loader's workers.";
    update(byId("bubbles"), ...(ranks.length ? [sentence(ranks), legend(), rankTable(ranks)] : [empty(none)]));
  });
}

// Sums over the rows of each rank.
function ofNewestLife(rows) {
  const life = rows.reduce((newest, row) => Math.max(newest, row.life), 0);
  const ranks = new Map();
  for (const row of rows.filter((one) => one.life === life)) {
    const none = Object.fromEntries(SUMS.map((name) => [name, 0]));
    const sums = ranks.get(row.rank) ?? { ...none, rank: row.rank, copies: false };
    for (const name of SUMS) sums[name] += row[name] ?? 0;
    sums.copies ||= row.copied_bytes !== null;
    ranks.set(row.rank, sums);
  }
  return [...ranks.values()];
}

function sentence(ranks) {
  const sum = (name) => ranks.reduce((total, one) => total + one[name], 0);
  const waited = percent(sum("bubble_seconds") / sum("seconds"));
  const used = percent(sum("used_seconds") / sum("bubble_seconds"));
  const copied = percent(sum("copied_seconds") / sum("bubble_seconds"));
  return element(
    "p",
    { class: "summary" },
    `Training waited ${waited} of the time; the predictor worked in ${used} of that, and snapshots were copied in ` +
      `${copied}; work ran ${duration(sum("late_seconds"))} past the end of a wait.`,
  );
}

function legend() {
  return element(
    "ul",
    { class: "legend", "aria-hidden": "true" },
    element("li", { class: "sign-used" }, "waited, the predictor worked"),
    element("li", { class: "sign-copied" }, "waited, a snapshot was copied"),
    element("li", { class: "sign-waited" }, "waited, idle"),
    element("li", { class: "sign-worked" }, "training worked"),
  );
}

function rankTable(ranks) {
  const shown = [...ranks]
    .sort((one, other) => other.bubble_seconds - one.bubble_seconds)
    .slice(0, ROWS)
    .sort((one, other) => one.rank - other.rank);
  return table(
    shown.length < ranks.length
      ? `The ${shown.length} of ${number(ranks.length, 9)} ranks that waited longest`
      : "Since the newest life began, within the newest rows",
    [
      { title: "Rank", numeric: true, value: (one) => number(one.rank, 9) },
      { title: "Share of the time", value: bar },
      { title: "Waited", numeric: true, value: (one) => amount(one.bubble_seconds, one.seconds) },
      { title: "Used inside", numeric: true, value: (one) => amount(one.used_seconds, one.bubble_seconds) },
      { title: "Late", numeric: true, value: late },
      { title: "Outside", numeric: true, value: (one) => duration(one.outside_seconds) },
      { title: "Snapshots copied inside", numeric: true, value: copied },
    ],
    shown,
  );
}

function amount(part, whole) {
  return whole > 0 ? `${duration(part)} (${percent(part / whole)})` : duration(part);
}

function late({ late_seconds: seconds, late_slices: slices, slices: all }) {
  return all ? `${duration(seconds)}, ${number(slices, 9)} of ${number(all, 9)}` : number(null);
}

function copied({ copies, copied_seconds: seconds, copied_bytes: inside, copied_beside_bytes: beside }) {
  if (!copies) return number(null);
  return inside + beside > 0
    ? `${duration(seconds)}: ${bytes(inside)}, ${percent(inside / (inside + beside))} of all`
    : bytes(0);
}

// The figures stand beside it; the predictor and a copy may have worked at the same time. Attributes, and no style: the
// page's policy allows none.
function bar({ seconds, bubble_seconds: waited, used_seconds: used, copied_seconds: copying }) {
  const made = document.createElementNS(SVG, "svg");
  const attributes = { class: "bar", viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" };
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  for (const [kind, share] of [
    ["waited", waited / seconds],
    ["copied", Math.min(waited, used + copying) / seconds],
    ["used", used / seconds],
  ]) {
    const part = document.createElementNS(SVG, "rect");
    part.setAttribute("class", kind);
    part.setAttribute("height", "1");
    part.setAttribute("width", String(100 * Math.min(1, share || 0)));
    made.append(part);
  }
  return made;
}
