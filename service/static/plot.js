// A plot over iterations that follows the page's colours and width, is walked through with the arrow keys, and shows a
// part of the run: a drag, the keys plus and minus or the buttons choose it; Escape, a double
// click or a button ends that.

import { element } from "./dom.js";
import { number } from "./format.js";
import uPlot from "./vendor/uPlot.esm.js";

const FONT = "12px system-ui, sans-serif";
const FAR_STEP = 10; // with Shift, or Page Up and Down
const ZOOM = 2;
const LEAST_ITERATIONS = 4; // shown
const LEAST_PIXELS = 6; // of a drag: less is a click that has slipped

// A colour of style.css, as it is now.
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export class Plot {
  // host: where it is drawn. readout: an element for the figures at the cursor. name: of the plot, for screen readers.
  // readoutOf: takes an index into the data, or null where there is no cursor, and gives these figures. scales, series, bands
  // and axis (the upright one): uPlot's. under and over: called with uPlot before and after the curves are drawn. part:
  // called with the first and the last iteration that are shown, or null for the whole run, when that changes.
  constructor({
    host,
    readout,
    name,
    readoutOf,
    scales = {},
    series,
    bands = [],
    axis,
    under = () => {},
    over = () => {},
    part = () => {},
  }) {
    this.host = host;
    this.tellPart = part;
    this.readout = readout;
    this.readoutOf = readoutOf;
    this.length = 0;
    this.part = null; // first and last iteration that are shown; null: the whole run
    this.#addButtons();
    host.tabIndex = 0;
    host.setAttribute("aria-describedby", "plot-keys");
    host.setAttribute("role", "slider");
    host.setAttribute("aria-label", `${name}: place in the plot`);
    const common = {
      stroke: () => colour("quiet"),
      font: FONT,
      labelFont: FONT,
      labelSize: 18,
      grid: line(),
      ticks: line(),
    };
    this.plot = new uPlot(
      {
        ...this.#size(),
        scales: { x: { time: false }, ...scales },
        axes: [
          { ...common, label: "iteration", size: 34 },
          { ...common, size: 46, ...axis },
        ],
        series: [{}, ...series],
        bands,
        legend: { show: false },
        cursor: {
          y: false,
          drag: { x: true, y: false, setScale: false },
          bind: { dblclick: () => () => this.#show(null) },
          points: { size: 7 },
        },
        hooks: {
          drawClear: [under],
          draw: [over],
          setCursor: [() => this.#showReadout()],
          setSelect: [(drawn) => this.#showSelected(drawn)],
        },
      },
      series.reduce((data) => [...data, []], [[]]),
      host,
    );
    new ResizeObserver(() => this.plot.setSize(this.#size())).observe(host);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot.redraw());
    host.addEventListener("keydown", (event) => this.#walk(event));
    host.addEventListener("blur", () => this.#place(null));
  }

  // data: uPlot's, iterations first.
  show(data) {
    this.length = data[0].length;
    this.plot.setData(data, false);
    this.#show(this.part);
    this.host.setAttribute("aria-valuemin", data[0][0] ?? 0);
    this.host.setAttribute("aria-valuemax", data[0].at(-1) ?? 0);
    this.#showReadout();
  }

  #size() {
    return { width: Math.max(200, this.host.clientWidth), height: Math.max(150, this.host.clientHeight) };
  }

  #showReadout() {
    const index = this.plot?.cursor.idx ?? null; // uPlot calls this while it is being made
    const text = this.length ? this.readoutOf(index) : "";
    this.readout.textContent = text;
    const place = index ?? this.length - 1;
    this.host.setAttribute("aria-valuenow", this.plot?.data[0][place] ?? 0);
    this.host.setAttribute("aria-valuetext", text);
  }

  #walk(event) {
    const step = event.shiftKey ? FAR_STEP : 1;
    const here = this.plot.cursor.idx ?? this.length - 1;
    const places = {
      ArrowLeft: here - step,
      ArrowRight: here + step,
      PageDown: here - FAR_STEP,
      PageUp: here + FAR_STEP,
      Home: 0,
      End: this.length - 1,
    };
    const actions = {
      "+": () => this.#zoom(ZOOM),
      "=": () => this.#zoom(ZOOM), // the same key, without Shift
      "-": () => this.#zoom(1 / ZOOM),
      Escape: () => (this.part ? this.#show(null) : this.#place(null)),
    };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key in actions) actions[event.key]();
    else if (event.key in places) this.#place(places[event.key]);
    else return;
    event.preventDefault();
  }

  #addButtons() {
    const button = (text, name, act) => {
      const made = element("button", { type: "button", "aria-label": name, title: name }, text);
      made.addEventListener("click", act);
      return made;
    };
    this.shown = element("span", { role: "status" });
    this.whole = button("Whole run", "Show the whole run", () => this.#show(null));
    const buttons = element(
      "div",
      { class: "zoom" },
      this.shown,
      this.whole,
      button("\u2212", "Zoom out", () => this.#zoom(1 / ZOOM)),
      button("+", "Zoom in", () => this.#zoom(ZOOM)),
    );
    const row = element("div", { class: "beneath" });
    this.readout.replaceWith(row);
    row.append(this.readout, buttons);
  }

  #zoom(factor) {
    if (!this.length) return;
    const iterations = this.plot.data[0];
    const [first, last] = this.part ?? [iterations[0], iterations.at(-1)];
    const cursor = this.plot.cursor.idx;
    const middle = cursor === null || cursor === undefined ? (first + last) / 2 : iterations[cursor];
    this.#show([middle - (middle - first) / factor, middle + (last - middle) / factor]);
  }

  #showSelected(drawn) {
    const { left, width } = drawn.select;
    if (width < LEAST_PIXELS) return;
    drawn.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.#show([drawn.posToVal(left, "x"), drawn.posToVal(left + width, "x")]);
  }

  // Moves what is shown as far as is needed to have an iteration in it.
  #moveTo(iteration) {
    if (!this.part) return;
    const [first, last] = this.part;
    const shift = Math.min(0, iteration - first) + Math.max(0, iteration - last);
    if (shift) this.#show([first + shift, last + shift]);
  }

  // part: first and last iteration; null, or as much as there is: the whole run, however it grows.
  #show(part) {
    const before = this.part;
    const iterations = this.plot.data[0];
    const ends = [iterations[0] ?? 0, iterations.at(-1) ?? 0];
    const wide = part === null ? 0 : Math.max(LEAST_ITERATIONS, part[1] - part[0]);
    if (part === null || wide >= ends[1] - ends[0]) this.part = null;
    else {
      const first = Math.min(Math.max((part[0] + part[1] - wide) / 2, ends[0]), ends[1] - wide);
      this.part = [first, first + wide];
    }
    this.whole.hidden = this.part === null;
    this.shown.textContent = this.part
      ? `iterations ${this.part.map((end) => number(Math.round(end), 9)).join(" to ")}`
      : "";
    if (this.part) this.plot.setScale("x", { min: this.part[0], max: this.part[1] });
    else this.plot.setData(this.plot.data); // sets the scales anew
    if (String(before) !== String(this.part)) this.tellPart(this.part);
  }

  #place(index) {
    if (!this.length) return;
    if (index === null) return this.plot.setCursor({ left: -10, top: -10 });
    const within = Math.min(this.length - 1, Math.max(0, index));
    this.#moveTo(this.plot.data[0][within]);
    this.plot.setCursor({
      left: this.plot.valToPos(this.plot.data[0][within], "x"),
      top: this.plot.over.clientHeight / 2,
    });
  }
}

function line() {
  return { stroke: () => colour("line"), width: 1 };
}
