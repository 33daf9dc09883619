// Elements, with text as text: nothing of a journal is ever taken for HTML.

const COLUMNS = 4; // that a narrow page has room for

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

// columns: {title, value: takes a row, gives text or an element; numeric: to the right; fixed: never broken}.
export function table(caption, columns, rows) {
  // Explicit roles: a narrow page lays out the rows of a wide table as cards, and browsers then drop the table role.
  const kind = ({ numeric, fixed }) => (numeric ? "numeric" : fixed ? "fixed" : "");
  const head = element(
    "tr",
    { role: "row" },
    ...columns.map((column) =>
      element("th", { scope: "col", role: "columnheader", class: kind(column) }, column.title),
    ),
  );
  const body = rows.map((row) =>
    element(
      "tr",
      { role: "row" },
      ...columns.map((column) =>
        element("td", { role: "cell", "data-title": column.title, class: kind(column) }, column.value(row)),
      ),
    ),
  );
  return element(
    "div",
    { class: "scroll" },
    element(
      "table",
      { role: "table", class: columns.length > COLUMNS ? "wide" : "" },
      element("caption", {}, caption),
      element("thead", { role: "rowgroup" }, head),
      element("tbody", { role: "rowgroup" }, ...body),
    ),
  );
}

export function empty(text) {
  return element("p", { class: "empty" }, text);
}

// A legend names only what the plot shows.
export function showSign(name, seen) {
  for (const sign of document.getElementsByClassName(`sign-${name}`)) sign.hidden = !seen;
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
