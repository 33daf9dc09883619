// The newest answers of the service, and who wants to know when they change.

const PATHS = {
  plan: "/plan",
  history: "/plan/history?limit=1000",
  losses: "/losses?limit=600",
  fits: "/fits?kind=loss&limit=1",
  phases: "/phases?limit=1000",
  checkpoints: "/checkpoints?limit=1000",
  failures: "/failures?limit=1000",
  recoveries: "/recoveries?limit=100",
  bubbles: "/bubbles?limit=1000",
};
const PAUSE_SECONDS = 2; // between two questions for the same: a busy run must not make the page busy
const LONG_PAUSES_SECONDS = { losses: 10 }; // of what is much to read, and changes little to the eye

export const NAMES = ["health", ...Object.keys(PATHS)];

export class Store {
  constructor(api) {
    this.api = api;
    this.answers = {};
    this.watchers = [];
    this.asked = new Map(); // name -> when it was asked for last
    this.due = new Map(); // name -> timer of the next question
  }

  // show: called when an answer of `names` has changed, with all answers, null where there is none, and all ApiErrors.
  watch(names, show) {
    this.watchers.push({ names, show });
  }

  // Nothing that was answered holds any longer: none of it stays in sight.
  forget() {
    this.answers = {};
    NAMES.forEach((name) => this.#show(name));
  }

  // Ask again, soon.
  want(names) {
    for (const name of names) {
      if (this.due.has(name)) continue;
      const since = (performance.now() - (this.asked.get(name) ?? -Infinity)) / 1000;
      const known = Boolean(this.answers[name]?.answer);
      const pause = (known && LONG_PAUSES_SECONDS[name]) || PAUSE_SECONDS;
      const wait = Math.max(0, pause - since);
      this.due.set(
        name,
        setTimeout(() => this.#ask(name), 1000 * wait),
      );
    }
  }

  async #ask(name) {
    this.due.delete(name);
    this.asked.set(name, performance.now());
    let answer = null;
    let problem = null;
    try {
      answer = name === "health" ? await this.api.health() : await this.api.get(PATHS[name]);
    } catch (error) {
      problem = error;
      if (error.status === 0) answer = this.answers[name]?.answer ?? null; // what was known stays in sight
    }
    const text = JSON.stringify([answer, problem?.code]);
    if (text !== this.answers[name]?.text) {
      this.answers[name] = { answer, problem, text };
      this.#show(name);
    }
  }

  #show(name) {
    const all = Object.fromEntries(NAMES.map((one) => [one, this.answers[one]?.answer ?? null]));
    const problems = Object.fromEntries(NAMES.map((one) => [one, this.answers[one]?.problem ?? null]));
    for (const { names, show } of this.watchers) if (names.includes(name)) show(all, problems);
  }
}
