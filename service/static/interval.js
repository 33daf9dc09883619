// The interval in use, and the choices of Young and CheckFreq from the same inputs.

import { placed, present } from "./course.js";
import { byId, showSign, table, update } from "./dom.js";
import { number, percent } from "./format.js";
import { drawFailures } from "./marks.js";
import { Plot, colour } from "./plot.js";
import { SHOWN, ruleName } from "./rules.js";
import uPlot from "./vendor/uPlot.esm.js";

const TABLE_ROWS = 50;
const MARGIN = 1.4; // of the scale, above and below

export function showInterval(store) {
  let failures = [];
  let data = [[]];
  const steps = (name, width, dash) => ({
    stroke: () => colour(name),
    width,
    dash,
    paths: uPlot.paths.stepped({ align: 1 }),
    points: { show: false },
  });
  const plot = new Plot({
    host: byId("interval-plot"),
    readout: byId("interval-readout"),
    name: "Interval between checkpoints",
    readoutOf: (index) => readout(data, index ?? data[0].length - 1),
    // Logarithmic: other rules may choose a hundredth of it.
    scales: { y: { distr: 3, range: (_, least, most) => [(least ?? 1) / MARGIN, (most ?? 1) * MARGIN] } },
    axis: { label: "iterations", splits: (_, axis, least, most) => rounds(least, most), filter: (_, splits) => splits },
    series: [steps("held", 2.5), steps("young", 1.5, [6, 3]), steps("checkfreq", 1.5, [2, 3])],
    over: (drawn) => drawFailures(drawn, failures),
  });
  store.watch(["history", "failures", "plan"], (answers) => {
    const plans = present(answers.history?.plans ?? [], (one) => one.from_iteration);
    failures = placed(answers.failures).map((one) => one.iteration);
    data = columns(plans, answers.plan?.last_iteration ?? 0);
    plot.show(data);
    byId("interval-summary").textContent = summary(plans);
    showSign(
      "young",
      data[2].some((one) => one !== null),
    );
    showSign(
      "checkfreq",
      data[3].some((one) => one !== null),
    );
    byId("interval-figure").hidden = !plans.length;
    update(byId("interval-table"), planTable(plans));
  });
}

// Iterations, the interval from there on, and the baselines'; the last plan extends to the newest iteration.
function columns(plans, lastIteration) {
  const shown =
    plans.length && lastIteration > plans.at(-1).from_iteration
      ? [...plans, { ...plans.at(-1), from_iteration: lastIteration }]
      : plans;
  const baseline = (name) => shown.map((one) => one.rival_interval_iterations[name] ?? null);
  return [shown.map((one) => one.from_iteration), shown.map((one) => one.interval_iterations), ...SHOWN.map(baseline)];
}

function summary(plans) {
  if (!plans.length) return "No plan yet: the planner makes the first one when training starts.";
  const { interval_iterations: interval, origin, rival_interval_iterations: baselines } = plans.at(-1);
  const memory = plans.at(-1).memory_interval_iterations;
  const inMemory = memory ? ` In host memory every ${number(memory, 9)}.` : "";
  if (!Object.keys(baselines).length)
    return `Every ${number(interval, 9)} iterations (${origin}); no figures of other rules.${inMemory}`;
  const others = SHOWN.filter((name) => name in baselines).map(
    (name) => `${ruleName(name)} every ${number(baselines[name], 9)}`,
  );
  return `Every ${number(interval, 9)} iterations now; ${others.join(", ")}.${inMemory}`;
}

// Round figures of a logarithmic axis.
function rounds(least, most) {
  const found = [];
  for (let decade = 10 ** Math.floor(Math.log10(least)); decade <= most; decade *= 10) {
    found.push(...[1, 2, 5].map((digit) => digit * decade).filter((value) => value >= least && value <= most));
  }
  return found;
}

function readout([iterations, interval, young, checkfreq], place) {
  if (place < 0) return "";
  const parts = [`From iteration ${number(iterations[place], 9)}`, `every ${number(interval[place], 9)}`];
  if (young[place] !== null) parts.push(`Young ${number(young[place], 9)}`);
  if (checkfreq[place] !== null) parts.push(`CheckFreq ${number(checkfreq[place], 9)}`);
  return parts.join(" \u00b7 ");
}

function planTable(plans) {
  const newest = plans.slice(-TABLE_ROWS).reverse();
  return table(
    `The newest ${newest.length} plans, with their expected cost`,
    [
      { title: "From", numeric: true, value: (one) => number(one.from_iteration, 9) },
      { title: "Interval", numeric: true, value: (one) => number(one.interval_iterations, 9) },
      { title: "In memory", numeric: true, value: (one) => number(one.memory_interval_iterations, 9) },
      { title: "Chosen by", value: (one) => one.origin },
      { title: "Young", numeric: true, value: (one) => number(one.rival_interval_iterations.young, 9) },
      { title: "CheckFreq", numeric: true, value: (one) => number(one.rival_interval_iterations.checkfreq, 9) },
      { title: "Bound", value: (one) => one.bound ?? number(null) },
      { title: "Cost", numeric: true, value: (one) => percent(one.cost_per_second) },
    ],
    newest,
  );
}
