// Talks to the service: single questions, their newest answers, and the stream of events.

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
const PAUSE_SECONDS = 2; // between two questions for the same: a busy run must not make the page busy
const LONG_PAUSES_SECONDS = { losses: 10 }; // of what is much to read, and changes little to the eye
const FIRST_WAIT_SECONDS = 1;
const LONGEST_WAIT_SECONDS = 5;
const SILENCE_SECONDS = 45; // the service shows every 15 s that it is there

export const NAMES = Object.keys(PATHS);

export class ApiError extends Error {
  // status: of HTTP; 0 if nothing answered. code, message and hint: from the service.
  constructor(status, code, message, hint) {
    super(message);
    this.status = status;
    this.code = code;
    this.hint = hint;
  }
}

export function keepToken(token) {
  sessionStorage.setItem(TOKEN_KEY, token);
}

export function hasToken() {
  return sessionStorage.getItem(TOKEN_KEY) !== null;
}

// Asks always for one run, and with the token of this tab where there is one.
export class Api {
  // run: its name; null where it is not known yet.
  constructor(run = null) {
    this.run = run;
  }

  async get(path) {
    // The health of a run that is not well is an answer too.
    return answered(await this.open(path, { alsoStatus: path === PATHS.health ? 503 : 0 }));
  }

  async post(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    return answered(await this.open(path, { method: "POST", body: JSON.stringify(body), headers, signal }));
  }
  async open(path, { alsoStatus = 0, headers = {}, ...options } = {}) {
    const url = new URL(path, location.origin);
    if (this.run !== null) url.searchParams.set("run", this.run);
    const token = sessionStorage.getItem(TOKEN_KEY);
    if (token) headers = { ...headers, Authorization: `Bearer ${token}` };
    let response;
    try {
      response = await fetch(url, { ...options, headers, cache: "no-store" });
    } catch (error) {
      throw unanswered(error);
    }
    if (response.ok || response.status === alsoStatus) return response;
    throw await problemOf(response);
  }
}

async function answered(response) {
  try {
    return await response.json();
  } catch (error) {
    throw unanswered(error); // it broke off
  }
}

function unanswered(error) {
  if (error.name === "AbortError") return error; // this page did not want it any longer
  return new ApiError(0, "unreachable", "the service does not answer", "start it with cpsr serve");
}

async function problemOf(response) {
  try {
    const { code, message, hint } = await response.json();
    return new ApiError(response.status, code, message, hint);
  } catch {
    return new ApiError(response.status, "not_understood", `the service answered ${response.status}`, "");
  }
}

// The newest answers of the service, and who wants to know when they change.
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
      const timer = setTimeout(() => this.#ask(name), 1000 * Math.max(0, pause - since));
      this.due.set(name, timer);
    }
  }

  async #ask(name) {
    this.due.delete(name);
    this.asked.set(name, performance.now());
    let answer = null;
    let problem = null;
    try {
      answer = await this.api.get(PATHS[name]);
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

// Follows GET /events. Not by an EventSource, which cannot send a token.
export class Stream {
  // heard: takes the name of an event and its data. live, lost, refused (takes the service's ApiError): called when it becomes so;
  // after the latter two the next try follows by itself.
  constructor(api, { heard, live, lost, refused }) {
    this.api = api;
    this.on = { heard, live, lost, refused };
    this.lastId = null;
  }
  async follow() {
    let wait = FIRST_WAIT_SECONDS;
    for (;;) {
      try {
        await this.#once(() => {
          wait = FIRST_WAIT_SECONDS;
        });
      } catch (error) {
        if (error.status) this.on.refused(error);
        else this.on.lost();
        if (error.status === 401) return;
      }
      await new Promise((resume) => setTimeout(resume, 1000 * wait));
      wait = Math.min(2 * wait, LONGEST_WAIT_SECONDS);
    }
  }

  async #once(opened) {
    const silent = new AbortController();
    const headers = this.lastId === null ? {} : { "Last-Event-ID": this.lastId };
    const response = await this.api.open("/events", { headers, signal: silent.signal });
    opened();
    this.on.live();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const timer = setTimeout(() => silent.abort(), 1000 * SILENCE_SECONDS);
      const { value, done } = await reader.read().finally(() => clearTimeout(timer));
      if (done) throw new Error("the service ended the stream");
      const messages = (text + value).split("\n\n");
      text = messages.pop();
      messages.forEach((message) => this.#take(message));
    }
  }

  #take(message) {
    const fields = new Map();
    for (const line of message.split("\n")) {
      const colon = line.indexOf(": ");
      if (colon > 0) fields.set(line.slice(0, colon), line.slice(colon + 2));
    }
    if (fields.has("id")) this.lastId = fields.get("id");
    if (fields.has("event")) this.on.heard(fields.get("event"), JSON.parse(fields.get("data")));
  }
}
