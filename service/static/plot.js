// A plot over iterations that follows the page's colours and width, and is walked through with the arrow keys.

import uPlot from "./vendor/uPlot.esm.js";

const FONT = "12px system-ui, sans-serif";
const FAR_STEP = 10; // with Shift, or Page Up and Down

// A colour of style.css, as it is now.
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export class Plot {
  // host: where it is drawn. readout: an element for the figures at the cursor. name: of the plot, for screen readers.
  // say: takes an index into the data, or null where there is no cursor, and gives these figures. scales, series, bands
  // and axis (the upright one): uPlot's. under and over: called with uPlot before and after the curves are drawn.
  constructor({ host, readout, name, say, scales = {}, series, bands = [], axis, under = () => {}, over = () => {} }) {
    this.host = host;
    this.readout = readout;
    this.say = say;
    this.length = 0;
    host.tabIndex = 0;
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
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
        hooks: { drawClear: [under], draw: [over], setCursor: [() => this.#tell()] },
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
    this.plot.setData(data);
    this.host.setAttribute("aria-valuemin", data[0][0] ?? 0);
    this.host.setAttribute("aria-valuemax", data[0].at(-1) ?? 0);
    this.#tell();
  }

  #size() {
    return { width: Math.max(200, this.host.clientWidth), height: Math.max(150, this.host.clientHeight) };
  }

  #tell() {
    const index = this.plot?.cursor.idx ?? null; // uPlot calls this while it is being made
    const text = this.length ? this.say(index) : "";
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
      Escape: null,
    };
    if (!(event.key in places) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.#place(places[event.key]);
  }

  #place(index) {
    if (!this.length) return;
    if (index === null) return this.plot.setCursor({ left: -10, top: -10 });
    const within = Math.min(this.length - 1, Math.max(0, index));
    this.plot.setCursor({
      left: this.plot.valToPos(this.plot.data[0][within], "x"),
      top: this.plot.over.clientHeight / 2,
    });
  }
}

function line() {
  return { stroke: () => colour("line"), width: 1 };
}
