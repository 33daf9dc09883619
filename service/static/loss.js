// The loss with its fit, the band and the phases; checkpoints, failures and restarts as marks.

import { byId, clock, element, number, plural, table, update } from "./page.js";
import { Plot, colour, drawMarks, drawPhases, failureMarks } from "./plot.js";

const NEEDS = ["losses", "fits", "phases", "checkpoints", "failures", "recoveries", "plan"];

export function showLoss(store) {
  let phases = [];
  let marks = [];
  let data = [[]];
  const curve = (name, width) => ({ stroke: () => colour(name), width, spanGaps: true, points: { show: false } });
  const plot = new Plot({
    host: byId("loss-plot"),
    readout: byId("loss-readout"),
    readoutOf: (index) => said(data, index),
    axis: { label: "loss" },
    series: [curve("loss", 1), curve("fit", 2), curve("band", 0), curve("band", 0)],
    bands: [{ series: [4, 3], fill: () => colour("band") }],
    under: (drawn) => drawPhases(drawn, phases),
    over: (drawn) => drawMarks(drawn, marks),
  });
  store.watch(NEEDS, (answers) => {
    const fit = lossFit(answers);
    data = columns(answers, fit);
    phases = phasesOf(answers);
    marks = marksOf(answers);
    byId("loss-summary").textContent = summary(answers, fit);
    const known = lossIsKnown(answers);
    byId("loss-figure").hidden = !known;
    plot.show(data);
    if (known) update(byId("loss-tables"), marksTable(answers));
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

// Iterations, losses, fit, lower and upper edge of the band; null where one has nothing.
function columns({ losses }, fit) {
  const [iterations, measured] = losses ? [losses.iterations, losses.losses] : [[], []];
  const curve = fit?.result.curve;
  const drawn = [curve?.loss_nats, curve?.low_nats, curve?.high_nats];
  return [iterations, measured, ...drawn.map((values) => iterations.map((at) => between(curve?.iterations, values, at)))];
}

// A curve's value at a place; null outside of the curve.
function between(places, values, at) {
  const right = places?.findIndex((place) => place >= at) ?? -1;
  if (right < 0 || at < places[0]) return null;
  if (places[right] === at) return values[right];
  const share = (at - places[right - 1]) / (places[right] - places[right - 1]);
  return values[right - 1] + share * (values[right] - values[right - 1]);
}

function phasesOf({ phases, plan }) {
  const ended = [...(phases?.rows ?? [])].reverse();
  const spans = ended.map((one) => ({ first: one.first_iteration, last: one.last_iteration, phase: one.phase }));
  if (plan?.phase && plan.last_iteration !== null) {
    spans.push({ first: plan.phase.first_iteration, last: plan.last_iteration, phase: plan.phase.phase });
  }
  return spans;
}

function marksOf({ checkpoints, failures, recoveries }) {
  return [
    ...committed(checkpoints).map((one) => ({ at: one.iteration, tone: "checkpoint", line: 9 })),
    ...failureMarks(placed(failures).map((one) => one.iteration)),
    ...known(recoveries).map((one) => ({
      at: one.restored_iteration,
      tone: "restart",
      line: 0,
      sign: one.origin === "predicted" ? "\u25c6" : "\u25c7",
      below: 36,
    })),
  ];
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
  const fitted = fit
    ? `Fitted at iteration ${number(fit.iteration, 9)}.`
    : "Not fitted yet: that is done at the end of a phase.";
  return `${count}, ${plural(placed(failures).length, "failure")}. ${fitted}`;
}

// The figures at the cursor; without one those of the newest loss.
function said([iterations, losses, fit, low, high], index) {
  const place = index ?? losses.findLastIndex((loss) => loss !== null);
  if (place < 0) return "";
  const parts = [`Iteration ${number(iterations[place], 9)}`];
  if (losses[place] !== null) parts.push(`loss ${number(losses[place], 4)}`);
  if (fit[place] !== null) {
    parts.push(`fit ${number(fit[place], 4)}`, `95% of losses ${number(low[place])} to ${number(high[place])}`);
  }
  return parts.join(" \u00b7 ");
}

function marksTable({ phases, failures, recoveries, checkpoints }) {
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
  ].sort(([, , when], [, , other]) => other - when);
  const due = plural(checkpoints?.rows.length ?? 0, "checkpoint");
  const count = `Of the newest ${due} due, ${number(committed(checkpoints).length, 9)} were committed and are marked.`;
  return element(
    "div",
    {},
    table(
      "Failures, restarts and phases, newest first",
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
