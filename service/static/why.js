// What the plan rests on, and what other rules would do.

import { byId, element, empty, table, update } from "./dom.js";
import { duration, number, percent } from "./format.js";
import { ruleName } from "./rules.js";

const BOUNDS = {
  minimum: "the shortest that the configuration allows",
  maximum: "the longest that the configuration allows",
  persist: "what the disk can take",
  predictor: "how far the predictor can foretell",
  none: "no bound",
};

export function showWhy(store) {
  store.watch(["plan"], ({ plan }) => {
    if (plan === null) return update(byId("why"), empty("No plan has been made yet."));
    const { rule, notes = [] } = plan.explanation;
    const list = element("ul", {}, ...notes.map((note) => element("li", {}, note)));
    update(
      byId("why"),
      element("p", {}, `Chosen by: ${rule ?? "not told"}. Held by: ${BOUNDS[plan.bound] ?? plan.bound ?? "not told"}.`),
      ...(notes.length ? [list] : []),
      element("div", { class: "pair" }, inputTable(plan.inputs), rivalTable(plan.rivals)),
    );
  });
}

function inputTable(inputs) {
  if (!inputs.length) return empty("The plan tells no figures that it was made from.");
  return table(
    "Figures it was made from",
    [
      { title: "Figure", value: (one) => one.name.replaceAll("_", " ") },
      { title: "Value", numeric: true, value: amount },
      {
        title: "From",
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

function rivalTable(rivals) {
  if (!rivals.length) return empty("Nothing is known of what other rules would do: the interval was not planned.");
  return table(
    "Other rules, with the same figures and their own recovery",
    [
      { title: "Rule", value: (one) => ruleName(one.name) },
      { title: "Interval", numeric: true, value: (one) => number(one.interval_iterations, 9) },
      { title: "Expected cost", numeric: true, value: (one) => percent(one.cost_per_second) },
    ],
    rivals,
  );
}
