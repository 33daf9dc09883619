// The plan at another failure rate: POST /plan/preview, which changes nothing.

import { byId, element, empty, table, update } from "./dom.js";
import { duration, number, percent } from "./format.js";
import { mtbf } from "./now.js";
import { SHOWN, modeName, ruleName } from "./rules.js";

const PAUSE_MILLISECONDS = 150; // between a move of the slider and the question
const DECADES = 3; // to either side of the job's own rate
const HOUR = 3600;

export function showPreview(store, api) {
  const panel = new Preview(byId("preview"), api);
  store.watch(["plan"], ({ plan }) => panel.show(plan));
}

class Preview {
  constructor(host, api) {
    this.host = host;
    this.api = api;
    this.asking = new AbortController();
    this.timer = 0;
    this.plan = null;
    this.slider = element("input", { type: "range", id: "mtbf", min: -DECADES, max: DECADES, step: 0.05, value: 0 });
    this.shown = element("output", { for: "mtbf" });
    this.reset = element("button", { type: "button" }, "The job's own rate");
    this.answer = element("div", { "aria-live": "polite" });
    this.slider.addEventListener("input", () => this.#moved());
    this.reset.addEventListener("click", () => {
      this.slider.value = 0;
      this.#moved();
    });
  }

  show(plan) {
    const seconds = plan === null ? null : mtbf(plan);
    if (seconds === null) {
      this.plan = null;
      this.host.replaceChildren(
        empty("Available once a run with a planned interval has measured a checkpoint."),
      );
      return;
    }
    // The same plan, only older: nothing is different, and a screen reader need not read it out again.
    if (plan.planned_unix_seconds === this.plan?.planned_unix_seconds) return;
    this.own = seconds;
    this.plan = plan;
    if (!this.slider.isConnected) {
      const label = element("label", { for: "mtbf" }, "Mean time between failures of the job");
      this.host.replaceChildren(
        label,
        element("div", { class: "slider" }, this.slider, this.shown),
        this.reset,
        this.answer,
      );
    }
    this.#moved();
  }

  #moved() {
    const seconds = this.own * 10 ** Number(this.slider.value);
    const text = duration(seconds) + (Number(this.slider.value) === 0 ? ", the job's own" : "");
    this.shown.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#ask(seconds / HOUR), PAUSE_MILLISECONDS);
  }

  async #ask(hours) {
    this.asking.abort();
    this.asking = new AbortController();
    try {
      const reply = await this.api.post("/plan/preview", { mtbf_hours: hours }, this.asking.signal);
      update(this.answer, answerTable(this.plan, reply));
    } catch (error) {
      if (error.name !== "AbortError") update(this.answer, empty(`No answer: ${error.message}; ${error.hint}.`));
    }
  }
}

function answerTable(plan, reply) {
  const baselines = reply.explanation.rivals ?? {};
  const now = Object.fromEntries(plan.rivals.map((one) => [one.name, one]));
  const rows = [
    ["This job", reply.interval_iterations, reply.cost_per_second, plan.ranks[0].interval_iterations],
    ...SHOWN.filter((name) => name in baselines).map((name) => [
      ruleName(name),
      baselines[name].interval_iterations,
      baselines[name].cost_per_second,
      now[name]?.interval_iterations,
    ]),
  ];
  const mode = modeName(reply.recovery_mode) ?? "not chosen";
  return element(
    "div",
    {},
    table(
      "Iterations between checkpoints",
      [
        { title: "Rule", value: ([name]) => name },
        { title: "Now", numeric: true, value: ([, , , now]) => number(now, 9) },
        { title: "Then", numeric: true, value: ([, interval]) => number(interval, 9) },
        { title: "Expected cost then", numeric: true, value: ([, , cost]) => percent(cost) },
      ],
      rows,
    ),
    element(
      "p",
      { class: "summary" },
      `A checkpoint every ${duration(reply.interval_seconds)}${inMemory(reply)}; after a failure: ${mode}; bound: ${reply.bound}.`,
    ),
  );
}

function inMemory({ memory_interval_iterations: every }) {
  return every ? `, in host memory every ${number(every, 9)} iterations` : "";
}
