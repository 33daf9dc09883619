// The plan: in a few figures, over time, at another failure rate, and why it is so.

import { placed } from "./loss.js";
import { byId, bytes, duration, element, empty, number, percent, plural, table, update } from "./page.js";
import { Plot, colour, drawMarks, failureMarks } from "./plot.js";
import uPlot from "./vendor/uPlot.esm.js";

const ORIGINS = { fixed: "fixed by the configuration", override: "by an override", cpsr: "by least expected cost" };
const RULES = { young: "Young", daly: "Daly" };
const SHOWN = ["young", "daly"]; // beside the job's own, in plots
const MODES = { predict: "prediction", recompute: "recomputing" };
const MARGIN = 1.4; // of the scale, above and below
const PAUSE_MILLISECONDS = 150; // between a move of the slider and the question
const DECADES = 3; // to either side of the job's own rate
const HOUR = 3600;
const ROUND = [...Array(10).keys()].flatMap((decade) => [1, 2, 5].map((digit) => digit * 10 ** decade)); // of an axis

// Now

export function showNow(store) {
  store.watch(["plan", "health"], ({ plan, health }) => update(byId("now"), ...tiles(plan, health)));
}

function tiles(plan, health) {
  if (plan === null) return [tile("Iteration", number(health?.last_iteration, 9), "no plan yet")];
  const { newest_checkpoint: checkpoint, memory_interval_iterations: memory, iteration_seconds: seconds } = plan;
  const pace = `${duration(seconds)} each`;
  const written = health?.journal_age_seconds ?? null;
  const seen = Object.values(plan.explanation.classes ?? {}).reduce((sum, one) => sum + one.seen, 0);
  return [
    tile(
      "Iteration",
      number(plan.last_iteration, 9),
      plan.phase ? `phase ${plan.phase.phase}, ${pace}` : pace,
      written === null ? "" : `journal written ${duration(Math.round(written))} ago`,
    ),
    tile(
      "A checkpoint every",
      plural(plan.interval_iterations, "iteration"),
      `${duration(plan.interval_seconds)}, ${ORIGINS[plan.origin] ?? `by ${plan.origin}`}`,
    ),
    ...(memory ? [tile("In memory every", plural(memory, "iteration"), duration(memory * seconds))] : []),
    tile("After a failure", MODES[plan.recovery_mode] ?? number(null), `mode ${plan.mode ?? "not known"}`),
    tile("Newest checkpoint", number(checkpoint?.iteration, 9), checkpoint ? bytes(checkpoint.bytes) : "none yet"),
    tile("A failure every", duration(mtbf(plan)), `expected; ${number(seen, 9)} seen`),
    tile("Expected cost", percent(plan.explanation.expected?.cost_per_second), "of the time"),
    plan.descends_from_predicted
      ? tile("Descends from", "predicted state", "or one that was restored in part")
      : tile("Descends from", "trained states"),
    ...(plan.ranks ? [tile("Ranks", number(plan.ranks, 9))] : []),
  ];
}

function tile(name, value, ...more) {
  const lines = more.filter((text) => text).map((text) => element("dd", { class: "quiet" }, text));
  return element("div", {}, element("dt", {}, name), element("dd", {}, value), ...lines);
}

// Mean time between failures in seconds; null where the plan has none.
function mtbf({ explanation }) {
  const rate = explanation.inputs?.failures_per_second;
  return rate > 0 ? 1 / rate : null;
}

// The interval over time

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
    readoutOf: (index) => readout(data, index ?? data[0].length - 1),
    // Logarithmic: other rules may choose a hundredth of it.
    scales: { y: { distr: 3, range: (_, least, most) => [(least ?? 1) / MARGIN, (most ?? 1) * MARGIN] } },
    axis: {
      label: "iterations",
      splits: (_, axis, least, most) => ROUND.filter((one) => one >= least && one <= most),
      filter: (_, splits) => splits,
    },
    series: [steps("held", 2.5), steps("young", 1.5, [6, 3]), steps("daly", 1.5, [2, 3])],
    over: (drawn) => drawMarks(drawn, failureMarks(failures)),
  });
  store.watch(["plans", "failures", "plan"], (answers) => {
    const plans = present(answers.plans?.rows ?? []);
    failures = placed(answers.failures).map((one) => one.iteration);
    data = columns(plans, answers.plan?.last_iteration ?? 0);
    byId("interval-figure").hidden = !plans.length;
    plot.show(data);
    byId("interval-summary").textContent = summary(plans.at(-1));
  });
}

// Plans of the present course, oldest first: what a restart has done again is left out. rows: newest first.
function present(rows) {
  const kept = [];
  for (const row of rows) if (!kept.length || row.from_iteration < kept.at(-1).from_iteration) kept.push(row);
  return kept.reverse();
}

const rival = (plan, name) => plan.explanation.rivals?.[name]?.interval_iterations ?? null;

// Iterations, the interval from there on, and the rivals'; the last plan extends to the newest iteration.
function columns(plans, lastIteration) {
  const more = plans.length && lastIteration > plans.at(-1).from_iteration;
  const shown = more ? [...plans, { ...plans.at(-1), from_iteration: lastIteration }] : plans;
  return [
    shown.map((one) => one.from_iteration),
    shown.map((one) => one.interval_iterations),
    ...SHOWN.map((name) => shown.map((one) => rival(one, name))),
  ];
}

function summary(plan) {
  if (!plan) return "No plan yet: the planner makes the first one when training starts.";
  const known = SHOWN.filter((name) => rival(plan, name) !== null);
  const others = known.map((name) => `${RULES[name]} every ${number(rival(plan, name), 9)}`);
  const memory = plan.memory_interval_iterations;
  const inMemory = memory ? ` In host memory every ${number(memory, 9)}.` : "";
  const said = others.length ? others.join(", ") : `no figures of other rules (${plan.origin})`;
  return `Every ${number(plan.interval_iterations, 9)} iterations now; ${said}.${inMemory}`;
}

function readout([iterations, interval, ...rivals], place) {
  if (place < 0) return "";
  const parts = [`From iteration ${number(iterations[place], 9)}`, `every ${number(interval[place], 9)}`];
  rivals.forEach((column, index) => {
    if (column[place] !== null) parts.push(`${RULES[SHOWN[index]]} ${number(column[place], 9)}`);
  });
  return parts.join(" \u00b7 ");
}

// At another failure rate: POST /plan/preview, which changes nothing

export function showPreview(store, api) {
  const slider = element("input", { type: "range", id: "mtbf", min: -DECADES, max: DECADES, step: 0.05, value: 0 });
  const shown = element("output", { for: "mtbf" });
  const reset = element("button", { type: "button" }, "The job's own rate");
  const answer = element("div", { "aria-live": "polite" });
  let asking = new AbortController();
  let timer = 0;
  let plan = null;

  async function ask(hours) {
    asking.abort();
    asking = new AbortController();
    try {
      update(answer, answerTable(plan, await api.post("/plan/preview", { mtbf_hours: hours }, asking.signal)));
    } catch (error) {
      if (error.name !== "AbortError") update(answer, empty(`No answer: ${error.message}; ${error.hint}.`));
    }
  }

  function moved() {
    const seconds = mtbf(plan) * 10 ** Number(slider.value);
    shown.textContent = duration(seconds) + (Number(slider.value) === 0 ? ", the job's own" : "");
    slider.setAttribute("aria-valuetext", shown.textContent);
    clearTimeout(timer);
    timer = setTimeout(() => ask(seconds / HOUR), PAUSE_MILLISECONDS);
  }

  slider.addEventListener("input", moved);
  reset.addEventListener("click", () => {
    slider.value = 0;
    moved();
  });
  store.watch(["plan"], ({ plan: newest }) => {
    const host = byId("preview");
    if (newest === null || mtbf(newest) === null) {
      plan = null;
      return host.replaceChildren(empty("Available once a run with a planned interval has measured a checkpoint."));
    }
    // The same plan, only older: nothing is different, and a screen reader need not read it out again.
    if (newest.planned_unix_seconds === plan?.planned_unix_seconds) return;
    plan = newest;
    if (!slider.isConnected) {
      const label = element("label", { for: "mtbf" }, "Mean time between failures of the job");
      host.replaceChildren(label, element("div", { class: "slider" }, slider, shown), reset, answer);
    }
    moved();
  });
}

function answerTable(plan, reply) {
  const { rivals = {}, bound, expected } = reply.explanation;
  const rows = [
    ["This job", plan.interval_iterations, reply.interval_iterations, expected?.cost_per_second],
    ...SHOWN.filter((name) => name in rivals).map((name) => [
      RULES[name],
      rival(plan, name),
      rivals[name].interval_iterations,
      rivals[name].cost_per_second,
    ]),
  ];
  const memory = reply.memory_interval_iterations;
  const inMemory = memory ? `, in host memory every ${number(memory, 9)} iterations` : "";
  const mode = MODES[reply.recovery_mode] ?? "not chosen";
  return element(
    "div",
    {},
    table(
      "Iterations between checkpoints",
      [
        { title: "Rule", value: ([name]) => name },
        { title: "Now", numeric: true, value: ([, now]) => number(now, 9) },
        { title: "Then", numeric: true, value: ([, , then]) => number(then, 9) },
        { title: "Expected cost then", numeric: true, value: ([, , , cost]) => percent(cost) },
      ],
      rows,
    ),
    element(
      "p",
      { class: "summary" },
      `A checkpoint every ${duration(reply.interval_seconds)}${inMemory}; after a failure: ${mode}; bound: ${bound}.`,
    ),
  );
}

// Why

const BOUNDS = {
  minimum: "the shortest interval of the configuration",
  maximum: "the longest interval of the configuration",
  persist: "the bandwidth of the disk",
  predictor: "the range of the predictor",
};
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

export function showWhy(store) {
  store.watch(["plan"], ({ plan }) => {
    if (plan === null) return update(byId("why"), empty("No plan has been made yet."));
    const { rule, bound, notes = [], classes = {}, inputs = {} } = plan.explanation;
    const ways = Object.values(plan.explanation.modes ?? {}).filter((one) => one.failure);
    const costs = ways.map((one) => `${one.failure.replace("+-", "\u00b1")}, at a checkpoint every ${number(one.interval_iterations, 9)} iterations`);
    const listed = [...costs, ...notes].map((line) => element("li", {}, line));
    const said = `Chosen by: ${rule ?? "not recorded"}. Bound: ${BOUNDS[bound] ?? bound ?? "not recorded"}.`;
    update(
      byId("why"),
      element("p", {}, said),
      ...(listed.length ? [element("ul", {}, ...listed)] : []),
      ...(Object.keys(classes).length ? [classTable(Object.entries(classes))] : []),
      inputTable(inputs),
    );
  });
}

function classTable(classes) {
  const every = (rate) => (typeof rate === "number" && rate > 0 ? duration(1 / rate) : number(null));
  return table(
    "Failures by what they leave",
    [
      { title: "Leave", value: ([scope]) => LEFT[scope] ?? scope },
      { title: "One every", numeric: true, value: ([, one]) => every(one.failures_per_second) },
      { title: "Seen", numeric: true, value: ([, one]) => number(one.seen, 9) },
      { title: "Go back to", value: ([, one]) => WAYS[one.back_to] ?? one.back_to },
      { title: "Iterations lost", numeric: true, value: ([, one]) => number(one.loss_iterations) },
    ],
    classes,
  );
}

function inputTable(inputs) {
  const rows = Object.entries(inputs).filter(([, value]) => typeof value !== "object"); // curves have several figures
  if (!rows.length) return empty("The plan records no inputs.");
  const amount = ([name, value]) => {
    if (name.endsWith("_per_second")) return `${number(value)} 1/s`;
    return name.endsWith("_seconds") ? duration(value) : number(value);
  };
  return table(
    "Inputs of the plan",
    [
      { title: "Input", value: ([name]) => name.replaceAll("_", " ") },
      { title: "Value", numeric: true, value: amount },
    ],
    rows,
  );
}
