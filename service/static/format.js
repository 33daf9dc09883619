// Figures as people read them.

const UNKNOWN = "\u2013";
const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;
const BYTE_UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export function number(value, digits = 3) {
  if (value === null || value === undefined) return UNKNOWN;
  if (typeof value !== "number") return named(value);
  if (!Number.isFinite(value)) return named(String(value));
  const large = Math.abs(value) >= 10 ** digits;
  return value.toLocaleString("en", large ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
}

// The service sends numbers that are not finite by their names.
function named(text) {
  return { inf: "\u221e", Infinity: "\u221e", "-inf": "\u2212\u221e", nan: UNKNOWN, NaN: UNKNOWN }[text] ?? text;
}

export function signed(value, digits = 3) {
  if (typeof value !== "number") return number(value);
  return value > 0 ? `+${number(value, digits)}` : number(value, digits).replace("-", "\u2212");
}

export function percent(ratio) {
  return typeof ratio === "number" ? `${signed(100 * ratio, 3).replace("+", "")}%` : number(ratio);
}

export function duration(seconds) {
  if (typeof seconds !== "number") return number(seconds);
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${number(seconds * 1e6)} \u00b5s`;
  if (size < 1) return `${number(seconds * 1000)} ms`;
  if (size < 2 * MINUTE) return `${number(seconds)} s`;
  if (size < 2 * HOUR) return `${number(seconds / MINUTE)} min`;
  if (size < 3 * DAY) return `${number(seconds / HOUR)} h`;
  return `${number(seconds / DAY)} days`;
}

export function bytes(count) {
  if (typeof count !== "number") return UNKNOWN;
  let unit = 0;
  while (count >= 1000 && unit < BYTE_UNITS.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${number(count)} ${BYTE_UNITS[unit]}`;
}

// Year to second, in this machine's time.
export function clock(unixSeconds) {
  const date = new Date(1000 * unixSeconds);
  const two = (part) => String(part).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function plural(count, noun) {
  return `${number(count, 9)} ${noun}${count === 1 ? "" : "s"}`;
}

// Numbers of ranks in increasing order, as "ranks 0-3, 5".
export function ranks(numbers) {
  const spans = [];
  for (const one of numbers) {
    if (spans.length && spans.at(-1).last === one - 1) spans.at(-1).last = one;
    else spans.push({ first: one, last: one });
  }
  const listed = spans.map(({ first, last }) => (first === last ? `${first}` : `${first}\u2013${last}`)).join(", ");
  return `${numbers.length > 1 ? "ranks" : "rank"} ${listed}`;
}
