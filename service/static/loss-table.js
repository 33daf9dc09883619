// What the plot of the loss shows, as tables.

import { committed, placed, resized } from "./course.js";
import { element, table } from "./dom.js";
import { clock, number, plural } from "./format.js";

const ROWS = 25;

// A curve's value at a place between two of its points, as it is drawn; null outside of the curve.
export function between(iterations, column, place) {
  let left = place;
  let right = place;
  while (left >= 0 && column[left] === null) left -= 1;
  while (right < column.length && column[right] === null) right += 1;
  if (left < 0 || right === column.length) return null;
  if (left === right) return column[left];
  const share = (iterations[place] - iterations[left]) / (iterations[right] - iterations[left]);
  return column[left] + share * (column[right] - column[left]);
}

// The band at a place, in words; null where there is none.
export function bandAt(iterations, low, high, place) {
  const least = between(iterations, low, place);
  const most = between(iterations, high, place);
  return least === null || most === null ? null : `${number(least)} to ${number(most)}`;
}

export function curveTable([iterations, losses, fit, low, high]) {
  const places = [...iterations.keys()].filter((place) => losses[place] !== null);
  const every = Math.max(1, Math.ceil(places.length / ROWS));
  const shown = places.filter((_, count) => (places.length - 1 - count) % every === 0);
  return table(
    `The loss at ${shown.length} iterations`,
    [
      { title: "Iteration", numeric: true, value: (place) => number(iterations[place], 9) },
      { title: "Loss", numeric: true, value: (place) => number(losses[place], 4) },
      { title: "Fit", numeric: true, value: (place) => number(between(iterations, fit, place), 4) },
      { title: "95% of losses", numeric: true, value: (place) => bandAt(iterations, low, high, place) ?? number(null) },
    ],
    shown,
  );
}

export function marksTable({ phases, failures, recoveries, checkpoints, plan }) {
  const rows = [
    ...placed(failures).map((one) => [one.iteration, `failure: ${one.description}`, one.failed_unix_seconds]),
    ...(recoveries?.recoveries ?? []).map((one) => [
      one.restored_iteration,
      `restart, ${one.method}, ${one.outcome.replace("_", " ")}`,
      one.created_unix_seconds,
    ]),
    ...(phases?.phases ?? []).map((one) => [
      one.last_iteration,
      `phase ${one.phase} ended (${one.ended_by})`,
      one.created_unix_seconds,
    ]),
    ...resized(plan).map((one) => [
      one.since_iteration,
      `${plural(one.ranks, "rank")}, before ${number(one.before, 9)}`,
      one.since_unix_seconds,
    ]),
  ].sort(([, , when], [, , other]) => other - when);
  const due = checkpoints?.checkpoints.length ?? 0;
  const marked = number(committed(checkpoints).length, 9);
  const count = `Of the newest ${plural(due, "checkpoint")} due, ${marked} were committed and are marked.`;
  const summary = element("p", { class: "summary" }, count);
  if (!rows.length) return summary;
  return element(
    "div",
    {},
    table(
      "Failures, restarts, phases and numbers of ranks, newest first",
      [
        { title: "Iteration", numeric: true, value: ([iteration]) => number(iteration, 9) },
        { title: "What", value: ([, what]) => what },
        { title: "When", fixed: true, value: ([, , when]) => clock(when) },
      ],
      rows,
    ),
    summary,
  );
}
