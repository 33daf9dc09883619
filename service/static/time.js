// The effective training time ratio, and where the rest of the time went.

import { byId, element, empty, table, update } from "./dom.js";
import { duration, number, percent, plural } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const PARTS = [
  ["useful", "useful"],
  ["checkpoint_stall", "checkpoint stalls"],
  ["memory_stall", "memory stalls"],
  ["recompute", "recomputed"],
  ["restart", "restarts"],
  ["other", "other"],
];
const STATES = {
  training: "up to the newest reported step",
  starting: "up to now: no step yet in this life",
  down: "up to now: the job is down",
  ended: "up to the end of the run",
};

export function showTime(store) {
  store.watch(["plan"], ({ plan }) => {
    byId("time-section").hidden = plan === null;
    if (plan === null) return;
    const { ettr } = plan;
    const none = "Not recorded: the journal is of an older version.";
    update(byId("time"), ...(ettr ? [sentence(ettr), legend(), spans(ettr)] : [empty(none)]));
  });
}

function sentence({ state, since_start: whole, lost_iterations: lost }) {
  const parts = [`Effective training time is ${percent(whole.ettr)} since the start, ${STATES[state] ?? state}.`];
  if (lost) parts.push(`${plural(lost, "iteration")} lost and not trained again yet.`);
  if (whole.predicted_recoveries) {
    const count = `${number(whole.predicted_recoveries, 9)} predicted ${whole.predicted_recoveries === 1 ? "recovery" : "recoveries"}`;
    parts.push(`Beside this time, ${count} cost ${number(whole.end_cost_iterations)} iterations at the end, as expected then.`);
  }
  parts.push("The overhead on steps without a checkpoint is not measured: it is in the useful time.");
  return element("p", { class: "summary" }, parts.join(" "));
}

function legend() {
  const signs = PARTS.map(([part, name]) => element("li", { class: `sign-time ${part}` }, name));
  return element("ul", { class: "legend", "aria-hidden": "true" }, ...signs);
}

function spans({ since_start: whole, last_hour: hour }) {
  const short = whole.since_unix_seconds === hour.since_unix_seconds;
  const rows = [{ name: "Since the start", ...whole }, ...(short ? [] : [{ name: "Last hour", ...hour }])];
  return table(
    "Shares of the wall time",
    [
      { title: "Span", fixed: true, value: (one) => one.name },
      { title: "Wall time", numeric: true, value: (one) => duration(one.wall_seconds) },
      { title: "Shares", value: bar },
      ...PARTS.map(([part, name]) => ({
        title: name[0].toUpperCase() + name.slice(1),
        numeric: true,
        value: (one) => share(one, part),
      })),
      { title: "Failures", numeric: true, value: (one) => number(one.failures, 9) },
    ],
    rows,
  );
}

function share(one, part) {
  return one.wall_seconds > 0 ? percent(one[`${part}_seconds`] / one.wall_seconds) : number(null);
}

// The figures stand beside it. Attributes, and no style: the page's policy allows none.
function bar(one) {
  const made = document.createElementNS(SVG, "svg");
  const attributes = { class: "bar", viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" };
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  let from = 0;
  for (const [part] of PARTS) {
    const width = one.wall_seconds > 0 ? (100 * one[`${part}_seconds`]) / one.wall_seconds : 0;
    const rectangle = document.createElementNS(SVG, "rect");
    rectangle.setAttribute("class", `time-${part}`);
    rectangle.setAttribute("x", String(from));
    rectangle.setAttribute("height", "1");
    rectangle.setAttribute("width", String(width));
    made.append(rectangle);
    from += width;
  }
  return made;
}
