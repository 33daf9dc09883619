// Elements, and figures as people read them. Text stays text: nothing of a journal is ever taken for HTML.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

// columns: {title, value: takes a row, gives text or an element; numeric: to the right; fixed: never broken}.
export function table(caption, columns, rows) {
  const kind = ({ numeric, fixed }) => (numeric ? "numeric" : fixed ? "fixed" : "");
  const head = columns.map((column) => element("th", { scope: "col", class: kind(column) }, column.title));
  const body = rows.map((row) =>
    element("tr", {}, ...columns.map((column) => element("td", { class: kind(column) }, column.value(row)))),
  );
  const parts = [element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)];
  return element("div", { class: "scroll" }, element("table", {}, element("caption", {}, caption), ...parts));
}

export function empty(text) {
  return element("p", { class: "empty" }, text);
}

// Makes what is in a host the same as `children`, and leaves alone what is so already: what somebody has marked, or
// has read out, does not go away because another figure has changed.
export function update(host, ...children) {
  const wanted = host.cloneNode(false);
  wanted.append(...children);
  patch(host, wanted);
}

function patch(host, wanted) {
  const present = [...host.childNodes];
  const next = [...wanted.childNodes];
  next.forEach((child, place) => {
    const known = present[place];
    if (known === undefined) host.append(child);
    else if (!alike(known, child)) known.replaceWith(child);
    else if (known.nodeType !== Node.TEXT_NODE) patch(known, child);
    else if (known.data !== child.data) known.data = child.data;
  });
  present.slice(next.length).forEach((child) => child.remove());
}

function alike(known, child) {
  if (known.nodeType !== child.nodeType) return false;
  return known.nodeType === Node.TEXT_NODE || known.cloneNode(false).isEqualNode(child.cloneNode(false));
}

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
