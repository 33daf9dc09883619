// Names of the rules that choose an interval, as their authors write them, and of the recovery modes.

const NAMES = { young: "Young", daly: "Daly", checkfreq: "CheckFreq", gemini: "Gemini", pccheck: "PCcheck" };

export const SHOWN = ["young", "checkfreq"]; // beside the job's own, in plots

export function ruleName(name) {
  return NAMES[name] ?? name;
}

// null where the plan did not choose.
export function modeName(mode) {
  return { predict: "prediction", recompute: "recomputing" }[mode] ?? null;
}
