// The loss with its fit, the band and the phases; checkpoints, failures and restarts as marks.

import { byId, clock, element, number, plural, table, update } from "./page.js";
import { Plot, colour, drawCheckpoints, drawFailures, drawPhases, drawRestarts, drawSizes } from "./plot.js";
import uPlot from "./vendor/uPlot.esm.js";

const NEEDS = ["losses", "fits", "phases", "checkpoints", "failures", "recoveries", "plan"];
const ROWS = 25;

export function showLoss(store) {
  let marks = {};
  let data = [[]];
  const curve = (name, width) => ({ stroke: () => colour(name), width, spanGaps: true, points: { show: false } });
  const plot = new Plot({
    host: byId("loss-plot"),
    readout: byId("loss-readout"),
    readoutOf: (index) => said(data, index),
    axis: { label: "loss" },
    series: [curve("loss", 1), curve("fit", 2), curve("band", 0), curve("band", 0)],
    bands: [{ series: [4, 3], fill: () => colour("band") }],
    under: (drawn) => drawPhases(drawn, marks.phases ?? []),
    over: (drawn) => {
      drawCheckpoints(drawn, marks.checkpoints ?? []);
      drawFailures(drawn, marks.failures ?? []);
      drawRestarts(drawn, marks.restarts ?? []);
      drawSizes(drawn, marks.sizes ?? []);
    },
  });
  store.watch(NEEDS, (answers) => {
    const fit = lossFit(answers);
    data = columns(answers, fit);
    marks = marksOf(answers);
    byId("loss-summary").textContent = summary(answers, fit);
    const known = lossIsKnown(answers);
    byId("loss-figure").hidden = !known;
    plot.show(data);
    if (known) update(byId("loss-tables"), curveTable(data), marksTable(answers));
  });
}

// Recoveries as they are known now, newest first: a row is recorded again when the outcome is known.
export function known(recoveries) {
  return [...new Map([...(recoveries?.rows ?? [])].reverse().map((one) => [one.id, one])).values()].reverse();
}

// Failures of which it is known where; a reported one may have stopped no step.
export function placed(failures) {
  return (failures?.failures ?? []).filter((one) => one.iteration !== null);
}

function lossFit({ fits }) {
  return fits?.rows.find((one) => one.kind === "loss");
}

function committed(checkpoints) {
  return (checkpoints?.rows ?? []).filter((one) => one.status === "committed");
}

// Changes of the number of ranks, oldest first.
function resized(plan) {
  const sizes = plan?.sizes ?? [];
  return sizes.slice(1).map((one, place) => ({ ...one, before: sizes[place].ranks }));
}

// Iterations, losses, fit, lower and upper edge of the band; null where one has nothing.
function columns({ losses }, fit) {
  const measured = losses ? [losses.iterations, losses.losses] : [[], []];
  const curve = fit?.result.curve;
  if (!curve || !measured[0].length) return [...measured, ...[1, 2, 3].map(() => measured[0].map(() => null))];
  const joined = uPlot.join([measured, [curve.iterations, curve.loss_nats, curve.low_nats, curve.high_nats]]);
  return joined.map((column) => Array.from(column, (value) => value ?? null));
}

function marksOf({ phases, checkpoints, failures, recoveries, plan }) {
  const ended = [...(phases?.rows ?? [])].reverse();
  const spans = ended.map((one) => ({ first: one.first_iteration, last: one.last_iteration, phase: one.phase }));
  if (plan?.phase && plan.last_iteration !== null) {
    spans.push({ first: plan.phase.first_iteration, last: plan.last_iteration, phase: plan.phase.phase });
  }
  return {
    phases: spans,
    checkpoints: committed(checkpoints).map((one) => one.iteration),
    failures: placed(failures).map((one) => one.iteration),
    restarts: known(recoveries).map((one) => ({
      iteration: one.restored_iteration,
      predicted: one.origin === "predicted",
    })),
    sizes: resized(plan),
  };
}

function lossIsKnown({ losses }) {
  return losses?.losses.some((loss) => loss !== null) ?? false;
}

function summary({ losses, failures }, fit) {
  if (!losses?.iterations.length) return "No step has been recorded yet. The curve begins with the first one.";
  const count = plural(losses.iterations.at(-1), "iteration");
  if (!lossIsKnown({ losses })) {
    return `${count}, but no loss: the model does not return one. Call recovery.log_loss(loss) in the training loop.`;
  }
  const error = `${number(fit?.result.held_out_rmse_nats)} nats off on losses that it had not seen`;
  const fitted = fit
    ? `Fitted at iteration ${number(fit.iteration, 9)} (${fit.result.family.replace("_", " ")}), ${error}.`
    : "Not fitted yet: that is done at the end of a phase.";
  return `${count}, ${plural(placed(failures).length, "failure")}. ${fitted}`;
}

// The figures at the cursor; without one those of the newest loss.
function said([iterations, losses, fit, low, high], index) {
  const place = index ?? losses.findLastIndex((loss) => loss !== null);
  if (place < 0) return "";
  const parts = [`Iteration ${number(iterations[place], 9)}`];
  if (losses[place] !== null) parts.push(`loss ${number(losses[place], 4)}`);
  const fitted = between(iterations, fit, place);
  if (fitted !== null) parts.push(`fit ${number(fitted, 4)}`);
  const band = bandAt(iterations, low, high, place);
  if (band !== null) parts.push(`95% of losses ${band}`);
  return parts.join(" \u00b7 ");
}

// A curve's value at a place between two of its points, as it is drawn; null outside of the curve.
function between(iterations, column, place) {
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
function bandAt(iterations, low, high, place) {
  const least = between(iterations, low, place);
  const most = between(iterations, high, place);
  return least === null || most === null ? null : `${number(least)} to ${number(most)}`;
}

function curveTable([iterations, losses, fit, low, high]) {
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

function marksTable({ phases, failures, recoveries, checkpoints, plan }) {
  const rows = [
    ...placed(failures).map((one) => [one.iteration, `failure: ${one.description}`, one.failed_unix_seconds]),
    ...known(recoveries).map((one) => [
      one.restored_iteration,
      `restart, ${one.method}, ${one.outcome.replace("_", " ")}`,
      one.created_unix_seconds,
    ]),
    ...(phases?.rows ?? []).map((one) => [
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
  const due = plural(checkpoints?.rows.length ?? 0, "checkpoint");
  const count = `Of the newest ${due} due, ${number(committed(checkpoints).length, 9)} were committed and are marked.`;
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
    element("p", { class: "summary" }, count),
  );
}
