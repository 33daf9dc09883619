// The dashboard: the run, the answers of the service, and the panels that show them.

import { Api, ApiError } from "./api.js";
import { showBubbles } from "./bubbles.js";
import { showCheckpoints } from "./checkpoints.js";
import { showConnection, showHeard, showLost, showRefused } from "./connection.js";
import { byId, element } from "./dom.js";
import { Stream } from "./events.js";
import { showInterval } from "./interval.js";
import { showLoss } from "./loss.js";
import { showNotices } from "./notices.js";
import { showNow } from "./now.js";
import { showPreview } from "./preview.js";
import { showRecoveries } from "./recoveries.js";
import { signIn } from "./sign-in.js";
import { NAMES, Store } from "./store.js";
import { showTime } from "./time.js";
import { showWhy } from "./why.js";

const PANELS = [
  showConnection,
  showNotices,
  showNow,
  showLoss,
  showInterval,
  showTime,
  showRecoveries,
  showWhy,
  showBubbles,
  showCheckpoints,
];
const STANDING_SECONDS = 15; // a run that stands still sends no events, and loses time
const RETRY_SECONDS = 3;
// What may be different after an event of the journal; after `hello` and `reset` much may not have been heard.
const TOUCHED = {
  hello: NAMES,
  reset: NAMES,
  progress: ["losses", "plan"],
  checkpoint: ["checkpoints", "plan", "health"],
  plan: ["plan", "history"],
  failure: ["failures", "plan", "health"],
  recovery: ["recoveries", "plan", "losses", "history"],
  phase: ["phases", "plan"],
  fit: ["fits"],
  bubble: ["bubbles"],
  event: ["plan", "health"],
  unavailable: ["health"],
};

async function start() {
  try {
    const { runs } = await new Api().get("/runs?limit=1000");
    show(chosen(runs.map((run) => run.name)));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) return signIn();
    if (error.status) showRefused(error);
    else showLost();
    setTimeout(start, 1000 * RETRY_SECONDS);
  }
}

function chosen(names) {
  const asked = new URL(location).searchParams.get("run");
  const select = byId("run-select");
  select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  select.value = names.includes(asked) ? asked : names[0];
  select.addEventListener("change", () => location.assign(`?run=${encodeURIComponent(select.value)}`));
  byId("run-choice").hidden = names.length < 2;
  byId("run-name").textContent = names.length < 2 ? select.value : "";
  document.title = `${select.value} \u2013 CPSR`;
  return select.value;
}

function show(run) {
  const api = new Api(run);
  const store = new Store(api);
  PANELS.forEach((panel) => panel(store));
  showPreview(store, api);
  store.want(NAMES);
  setInterval(() => store.want(["health", "plan"]), 1000 * STANDING_SECONDS);
  new Stream(api, {
    heard: (name, data) => {
      if (name === "reset" && Object.values(data.kept).every((row) => row === 0)) store.forget(); // begun anew
      store.want(TOUCHED[name] ?? []);
    },
    live: showHeard,
    lost: showLost,
    refused: (problem) => (problem.status === 401 ? signIn() : showRefused(problem)),
  }).follow();
}

start();
