// The inputs of the plan, and the choices of other rules.

import { byId, element, empty, table, update } from "./dom.js";
import { duration, number, percent } from "./format.js";
import { ruleName } from "./rules.js";

const BOUNDS = {
  minimum: "the shortest interval of the configuration",
  maximum: "the longest interval of the configuration",
  persist: "the bandwidth of the disk",
  predictor: "the range of the predictor",
  none: "none",
};

export function showWhy(store) {
  store.watch(["plan"], ({ plan }) => {
    if (plan === null) return update(byId("why"), empty("No plan has been made yet."));
    const { rule, notes = [] } = plan.explanation;
    const list = element("ul", {}, ...notes.map((note) => element("li", {}, note)));
    const ways = Object.values(plan.explanation.modes ?? {}).filter((one) => one.failure); // not in older plans
    update(
      byId("why"),
      element("p", {}, `Chosen by: ${rule ?? "not recorded"}. Bound: ${BOUNDS[plan.bound] ?? plan.bound ?? "not recorded"}.`),
      ...(ways.length ? [element("p", {}, "A failure that goes back to the disk costs, on average:"), element("ul", {}, ...ways.map(way))] : []),
      ...(notes.length ? [list] : []),
      ...(plan.classes?.length ? [classTable(plan.classes)] : []),
      element("div", { class: "pair" }, inputTable(plan.inputs), baselineTable(plan.rivals)),
    );
  });
}

function way({ failure, interval_iterations: every }) {
  return element("li", {}, `${failure.replace("+-", "\u00b1")}, at a checkpoint every ${number(every, 9)} iterations`);
}

const LEFT = {
  process: "every machine and its memory",
  machine: "replicas of what a machine held",
  everything: "the disk alone",
};
const WAYS = {
  memory: "host memory",
  replica: "a replica",
  window: "replay of a window",
  predicted: "prediction",
  disk: "the disk",
};

function classTable(classes) {
  return table(
    "Failures by what they leave",
    [
      { title: "Leave", value: (one) => LEFT[one.scope] ?? one.scope },
      { title: "One every", numeric: true, value: (one) => every(one.failures_per_second) },
      { title: "Share", numeric: true, value: (one) => percent(one.share) },
      { title: "Prior", numeric: true, value: (one) => percent(one.prior_share) },
      { title: "Seen", numeric: true, value: (one) => number(one.seen, 9) },
      { title: "Go back to", value: (one) => WAYS[one.ways?.[0]?.way ?? one.back_to] ?? one.back_to },
      { title: "Iterations lost", numeric: true, value: (one) => number(one.loss_iterations) },
      { title: "Other ways, iterations", value: (one) => others(one.ways) },
    ],
    classes,
  );
}

function others(ways) {
  const rest = (ways ?? []).slice(1).map((one) => `${WAYS[one.way] ?? one.way} ${number(one.loss_iterations)}`);
  return rest.length ? rest.join(", ") : "none";
}

function every(rate) {
  return typeof rate === "number" && rate > 0 ? duration(1 / rate) : number(null);
}

function inputTable(inputs) {
  if (!inputs.length) return empty("The plan records no inputs.");
  return table(
    "Inputs of the plan",
    [
      { title: "Input", value: (one) => one.name.replaceAll("_", " ") },
      { title: "Value", numeric: true, value: amount },
      {
        title: "Source",
        value: (one) => (one.samples ? `${one.source}, ${number(one.samples, 9)} times` : (one.source ?? number(null))),
      },
      {
        title: "Age",
        numeric: true,
        value: (one) => (one.age_iterations === null ? number(null) : `${number(one.age_iterations, 9)} iterations`),
      },
    ],
    inputs,
  );
}

function amount({ value, unit }) {
  if (unit === "s") return duration(value);
  if (unit === "h") return duration(typeof value === "number" ? 3600 * value : value);
  return unit === null ? number(value) : `${number(value)} ${unit}`;
}

function baselineTable(baselines) {
  if (!baselines.length) return empty("No figures of other rules: the interval was not planned.");
  return table(
    "Other rules, with the same inputs and their own recovery",
    [
      { title: "Rule", value: (one) => ruleName(one.name) },
      { title: "Interval", numeric: true, value: (one) => number(one.interval_iterations, 9) },
      { title: "Expected cost", numeric: true, value: (one) => percent(one.cost_per_second) },
    ],
    baselines,
  );
}
