// Asks the service, always for one run and with the token of this tab where there is one.

const TOKEN_KEY = "cpsr-token";

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

export class Api {
  // run: its name; null where it is not known yet.
  constructor(run = null) {
    this.run = run;
  }

  async get(path, signal) {
    return answered(await this.open(path, { signal }));
  }

  async post(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    return answered(await this.open(path, { method: "POST", body: JSON.stringify(body), headers, signal }));
  }

  // The health of a run that is not well is an answer too.
  async health() {
    return answered(await this.open("/healthz", { alsoStatus: 503 }));
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
