// What a reader should know first: no journal, an unhealthy run, an override.

import { byId, element, update } from "./dom.js";
import { clock, number } from "./format.js";

export function showNotices(store) {
  store.watch(["health", "plan", "losses"], ({ health, plan, losses }, { plan: problem, losses: unread }) => {
    const nothing = unread !== null && unread.status !== 0 && plan === null && losses === null;
    byId("panels").hidden = nothing;
    const shown = nothing
      ? [notice("", `${sentence(unread.message)} This page shows the run as soon as it can be read.`)]
      : [];
    if (health?.reason && !nothing) shown.push(notice("bad", `Not healthy: ${health.reason}.`));
    if (problem !== null && problem.status !== 0 && !nothing)
      shown.push(notice("", sentence(`${problem.message}; ${problem.hint}`)));
    if (plan?.override) shown.push(notice("", override(plan.override)));
    for (const warning of plan?.warnings ?? []) shown.push(notice("bad", `${warning}.`));
    update(byId("notices"), ...shown);
  });
}

function notice(kind, text) {
  return element("p", { class: `notice ${kind}` }, text);
}

function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

function override({
  interval_min_iterations: low,
  interval_max_iterations: high,
  reason,
  expires_unix_seconds: ends,
  taken_up: taken,
}) {
  const what =
    low === high
      ? `pinned to ${number(low, 9)} iterations`
      : `bounded (at least ${number(low, 9)}, at most ${number(high, 9)} iterations)`;
  return `The interval is ${what} until ${clock(ends)}: ${reason}${taken ? "." : "; the job has not applied it yet."}`;
}
