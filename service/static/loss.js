// The loss with its fit, the band and the phases; checkpoints, failures and restarts as marks.

import { committed, placed, resized } from "./course.js";
import { byId, showSign, update } from "./dom.js";
import { number, plural } from "./format.js";
import { LossDetail, joinDetail } from "./loss-detail.js";
import { bandAt, between, curveTable, marksTable } from "./loss-table.js";
import { drawCheckpoints, drawFailures, drawPhases, drawRestarts, drawSizes } from "./marks.js";
import { Plot, colour } from "./plot.js";
import uPlot from "./vendor/uPlot.esm.js";

const NEEDS = ["losses", "fits", "phases", "checkpoints", "failures", "recoveries", "plan"];

export function showLoss(store) {
  let marks = { phases: [], checkpoints: [], failures: [], restarts: [], sizes: [] };
  let data = [[]];
  let answers = null; // the newest
  const detail = new LossDetail(store.api, () => draw());
  const curve = (name, width) => ({ stroke: () => colour(name), width, spanGaps: true, points: { show: false } });
  const plot = new Plot({
    host: byId("loss-plot"),
    readout: byId("loss-readout"),
    name: "Training loss",
    readoutOf: (index) => said(data, index),
    axis: { label: "loss" },
    series: [curve("loss", 1), curve("fit", 2), curve("band", 0), curve("band", 0)],
    bands: [{ series: [4, 3], fill: () => colour("band") }],
    under: (drawn) => drawPhases(drawn, marks.phases),
    over: (drawn) => {
      drawCheckpoints(drawn, marks.checkpoints);
      drawFailures(drawn, marks.failures);
      drawRestarts(drawn, marks.restarts);
      drawSizes(drawn, marks.sizes);
    },
    part: (shown) => detail.look(shown),
  });
  const draw = () => {
    data = columns(answers, detail.found);
    plot.show(data);
  };
  store.watch(NEEDS, (newest) => {
    if (newest.losses !== answers?.losses) detail.look(plot.part);
    answers = newest;
    marks = marksOf(answers);
    draw();
    byId("loss-summary").textContent = summary(answers);
    showSign(
      "fit",
      data[2].some((one) => one !== null),
    );
    showSign(
      "band",
      data[3].some((one) => one !== null),
    );
    showSign("phase", marks.phases.length > 0);
    showSign("size", marks.sizes.length > 0);
    const known = lossIsKnown(answers);
    byId("loss-figure").hidden = !known;
    if (known) update(byId("loss-tables"), curveTable(data), marksTable(answers));
  });
}

// Iterations, losses, fit, lower and upper edge of the band; null where one has nothing.
function columns({ losses, fits }, detail) {
  const curve = fits?.fits[0]?.result.curve;
  const measured = joinDetail(losses, detail);
  if (!curve || !measured[0].length) return [...measured, ...[1, 2, 3].map(() => measured[0].map(() => null))];
  const joined = uPlot.join([measured, [curve.iterations, curve.loss_nats, curve.low_nats, curve.high_nats]]);
  return joined.map((column) => Array.from(column, (value) => value ?? null));
}

function marksOf({ phases, checkpoints, failures, recoveries, plan }) {
  const ended = [...(phases?.phases ?? [])].reverse();
  const spans = ended.map((one) => [one.first_iteration, one.last_iteration, one.phase]);
  if (plan?.phase && plan.last_iteration !== null) {
    spans.push([plan.phase.first_iteration, plan.last_iteration, plan.phase.phase]);
  }
  return {
    phases: spans.map(([first, last, phase]) => ({ first, last, phase })),
    checkpoints: committed(checkpoints).map((one) => one.iteration),
    failures: placed(failures).map((one) => one.iteration),
    restarts: (recoveries?.recoveries ?? []).map((one) => ({
      iteration: one.restored_iteration,
      predicted: one.labelled,
    })),
    sizes: resized(plan),
  };
}

function lossIsKnown({ losses }) {
  return losses?.losses.some((loss) => loss !== null) ?? false;
}

function summary({ losses, fits, failures }) {
  if (!losses?.iterations.length) return "No step has been recorded yet. The curve begins with the first one.";
  if (!lossIsKnown({ losses })) {
    const count = plural(losses.iterations.at(-1), "iteration");
    return `${count}, but no loss: the model does not return one. Call recovery.log_loss(loss) in the training loop.`;
  }
  const fit = fits?.fits[0];
  const error = `${number(fit?.result.held_out_rmse_nats)} nats off on losses that it had not seen`;
  return [
    `${plural(losses.iterations.at(-1), "iteration")}, ${plural(placed(failures).length, "failure")}.`,
    fit
      ? `Fitted at iteration ${number(fit.iteration, 9)} (${fit.result.family.replace("_", " ")}), ${error}.`
      : "Not fitted yet: that is done at the end of a phase.",
  ].join(" ");
}

// The figures at the cursor; without one those of the newest loss.
function said([iterations, losses, fit, low, high], index) {
  const place = index ?? losses.findLastIndex((loss) => loss !== null);
  if (place < 0) return "";
  const parts = [`Iteration ${number(iterations[place], 9)}`];
  if (losses[place] !== null) parts.push(`loss ${number(losses[place], 4)}`);
  const fitted = between(iterations, fit, place);
  const band = bandAt(iterations, low, high, place);
  if (fitted !== null) parts.push(`fit ${number(fitted, 4)}`);
  if (band !== null) parts.push(`95% of losses ${band}`);
  return parts.join(" \u00b7 ");
}
