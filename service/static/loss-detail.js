// Losses of the part of a plot that is shown: of the whole of a long run there are too few in it.

import { ApiError } from "./api.js";

const PAUSE_MILLISECONDS = 200; // keys and live steps move the part that is shown often
const LOSSES = 600; // more than a plot has pixels for are of no use

export class LossDetail {
  // changed: called after a change of this.found, which is null if no detail is requested.
  constructor(api, changed) {
    this.api = api;
    this.changed = changed;
    this.found = null;
    this.timer = null;
  }

  // part: first and last iteration that are shown; null: the whole run.
  look(part) {
    clearTimeout(this.timer);
    this.timer = part && setTimeout(() => this.#ask(part.map(Math.round)), PAUSE_MILLISECONDS);
    if (part !== null || this.found === null) return;
    this.found = null;
    this.changed();
  }

  async #ask([first, last]) {
    const timer = this.timer;
    try {
      const path = `/losses?limit=${LOSSES}&first_iteration=${first}&last_iteration=${last}`;
      const found = await this.api.get(path);
      if (timer !== this.timer || !found.iterations.length) return; // another part is shown meanwhile
      this.found = found;
      this.changed();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error; // what is known of the whole run stays in sight
    }
  }
}

// Iterations and losses of the whole run, with those of the detail in their part of it; null where there is none.
export function joinDetail(losses, detail) {
  if (!losses) return [[], []];
  if (detail === null) return [losses.iterations, losses.losses];
  const [first, last] = [detail.iterations[0], detail.iterations.at(-1)];
  const places = [...losses.iterations.keys()];
  const before = places.filter((place) => losses.iterations[place] < first);
  const after = places.filter((place) => losses.iterations[place] > last);
  return ["iterations", "losses"].map((name) => [
    ...before.map((place) => losses[name][place]),
    ...detail[name],
    ...after.map((place) => losses[name][place]),
  ]);
}
