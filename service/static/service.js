// Talks to the service: single questions, and their newest answers, which it asks for again and again.

const TOKEN_KEY = "cpsr-token";
const PATHS = {
  health: "/healthz",
  plan: "/plan",
  plans: "/history?kind=plan&limit=500",
  losses: "/losses?limit=600",
  fits: "/history?kind=fit&limit=12", // of three kinds
  phases: "/history?kind=phase&limit=1000",
  checkpoints: "/history?kind=checkpoint&limit=1000",
  failures: "/failures?limit=1000",
  recoveries: "/history?kind=recovery&limit=200",
};
const NAMES = Object.keys(PATHS);
const OFTEN = ["health", "plan"];
const PAUSE_SECONDS = 2; // between two questions for health and plan
const ROUNDS = 5; // of these, before the rest is asked for again: it is more to read, and changes less to the eye

export class ApiError extends Error {
  // status: of HTTP; 0 if nothing answered. code, message and hint: from the service.
  constructor(status, code, message, hint) {
    super(message);
    Object.assign(this, { status, code, hint });
  }
}

export function keepToken(token) {
  sessionStorage.setItem(TOKEN_KEY, token);
}

export function hasToken() {
  return sessionStorage.getItem(TOKEN_KEY) !== null;
}

// Asks with the token of this tab where there is one.
export class Api {
  get(path) {
    return this.#ask(path, {});
  }

  post(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    return this.#ask(path, { method: "POST", body: JSON.stringify(body), headers, signal });
  }

  async #ask(path, { headers = {}, ...options }) {
    const token = sessionStorage.getItem(TOKEN_KEY);
    if (token) headers = { ...headers, Authorization: `Bearer ${token}` };
    let response;
    let answer;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
      answer = await response.json();
    } catch (error) {
      if (error.name === "AbortError") throw error; // this page did not want it any longer
      throw new ApiError(0, "unreachable", "the service does not answer", "start it with cpsr serve");
    }
    // The health of a run that is not well is an answer too.
    if (response.ok || "status" in answer) return answer;
    throw new ApiError(response.status, answer.code, answer.message, answer.hint);
  }
}

// The newest answers of the service, and who wants to know when they change.
export class Store {
  constructor(api) {
    this.api = api;
    this.answers = {};
    this.watchers = [];
  }

  // show: called when an answer of `names` has changed, with all answers, null where there is none, and all ApiErrors.
  watch(names, show) {
    this.watchers.push({ names, show });
  }

  // Asks for ever. asked: called after each round, with the ApiError of the health where it has one.
  async follow(asked) {
    for (let round = 0; ; round += 1) {
      await Promise.all((round % ROUNDS ? OFTEN : NAMES).map((name) => this.#ask(name)));
      asked(this.answers.health.problem);
      await new Promise((resume) => setTimeout(resume, 1000 * PAUSE_SECONDS));
    }
  }

  async #ask(name) {
    let answer = null;
    let problem = null;
    try {
      answer = await this.api.get(PATHS[name]);
    } catch (error) {
      problem = error;
      if (error.status === 0) answer = this.answers[name]?.answer ?? null; // what was known stays in sight
    }
    const text = JSON.stringify([answer, problem?.code]);
    if (text === this.answers[name]?.text) return;
    this.answers[name] = { answer, problem, text };
    const all = (part) => Object.fromEntries(NAMES.map((one) => [one, this.answers[one]?.[part] ?? null]));
    for (const { names, show } of this.watchers) if (names.includes(name)) show(all("answer"), all("problem"));
  }
}
