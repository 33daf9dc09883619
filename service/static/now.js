// The state of the run and its handling of failures, in a few figures.

import { byId, element, update } from "./dom.js";
import { bytes, duration, number, percent, plural } from "./format.js";
import { modeName } from "./rules.js";

const ORIGINS = { fixed: "fixed by the configuration", override: "by an override", cpsr: "by least expected cost" };

const SIZES = 3; // earlier ones that are named; the plot of the loss has all

export function showNow(store) {
  store.watch(["plan", "health"], ({ plan, health }) => update(byId("now"), ...tiles(plan, health)));
}

function tiles(plan, health) {
  const iteration = plan?.last_iteration ?? health?.last_iteration ?? null;
  if (plan === null) return [tile("Iteration", number(iteration, 9), "no plan yet")];
  const checkpoint = plan.newest_checkpoint;
  return [
    tile("Iteration", number(iteration, 9), phase(plan), written(health)),
    tile("A checkpoint every", interval(plan), chosen(plan)),
    ...(plan.memory_interval_iterations ? [memory(plan)] : []),
    tile("After a failure", modeName(plan.recovery_mode) ?? number(null), `mode ${plan.mode ?? "not known"}`),
    tile("Newest checkpoint", number(checkpoint?.iteration, 9), checkpoint ? bytes(checkpoint.bytes) : "none yet"),
    ...(plan.network ? [network(plan.network)] : []),
    tile("A failure every", duration(mtbf(plan)), source(plan)),
    ...(plan.ettr ? [effective(plan.ettr)] : []),
    tile("Expected cost", percent(plan.explanation.expected?.cost_per_second), "of the time; below zero is a gain"),
    tile("Descends from", state(plan)),
    ...ranks(plan),
  ];
}

function tile(name, value, ...more) {
  const lines = more.filter((text) => text).map((text) => element("dd", { class: "quiet" }, text));
  return element("div", {}, element("dt", {}, name), element("dd", {}, value), ...lines);
}

function memory({ memory_interval_iterations: every, iteration_seconds: seconds }) {
  const took = typeof seconds === "number" ? duration(every * seconds) : "";
  return tile("In memory every", plural(every, "iteration"), took);
}

function network({ checkpoints_taken_in: taken, checkpoints_waiting: waiting, updates }) {
  const learned = `${number(taken, 9)} of ${plural(taken + waiting, "checkpoint")}`;
  return tile("Predictor", `learned from ${learned}`, plural(updates, "gradient step"));
}

function effective({ since_start: whole, last_hour: hour }) {
  const recent = hour.since_unix_seconds === whole.since_unix_seconds ? "" : `${percent(hour.ettr)} in the last hour`;
  return tile("Effective time", percent(whole.ettr), "since the start", recent);
}

function ranks({ sizes, world_size: known }) {
  const now = sizes.at(-1);
  if (!now) return known === null ? [] : [tile("Ranks", number(known, 9))];
  const before = sizes.slice(-1 - SIZES, -1).reverse();
  const lines = before.map((one) => `before: ${number(one.ranks, 9)} since ${number(one.since_iteration, 9)}`);
  return [tile("Ranks", number(now.ranks, 9), `since iteration ${number(now.since_iteration, 9)}`, ...lines)];
}

function written(health) {
  const seconds = health?.journal_age_seconds ?? null;
  return seconds === null ? "" : `journal written ${duration(Math.round(seconds))} ago`;
}

function phase({ phase: now, iteration_seconds: seconds }) {
  const pace = `${duration(seconds)} each`;
  return now ? `phase ${now.phase}, ${pace}` : pace;
}

function interval({ ranks }) {
  const all = ranks.map((rank) => rank.interval_iterations);
  // No spread: there may be more ranks than a call takes arguments.
  const least = all.reduce((one, other) => Math.min(one, other));
  const most = all.reduce((one, other) => Math.max(one, other));
  return least === most ? `${number(least, 9)} iterations` : `${number(least, 9)} to ${number(most, 9)} iterations`;
}

function chosen({ ranks: [rank] }) {
  return `${duration(rank.interval_seconds)}, ${ORIGINS[rank.origin] ?? `by ${rank.origin}`}`;
}

export function mtbf({ inputs }) {
  const hours = inputs.find((one) => one.name === "mtbf_hours")?.value;
  return typeof hours === "number" ? 3600 * hours : null;
}

function source({ inputs }) {
  const rate = inputs.find((one) => one.name === "failures_per_second");
  if (!rate?.source) return "not in the plan";
  return rate.samples ? `${rate.source}, ${number(rate.samples, 9)} seen` : `${rate.source}, none seen`;
}

function state({ descends_from_predicted: predicted }) {
  if (predicted === null) return "not known";
  return predicted ? "a predicted state, or one restored in part" : "trained states";
}
