// A plot over iterations that follows the page's colours and width, and what happened, drawn into it. A drag shows a part
// of the run, a double click all of it.

import { element } from "./page.js";
import uPlot from "./vendor/uPlot.esm.js";

const FONT = "px system-ui, sans-serif";
const NAME_PIXELS = 56; // a phase that is narrower is not named

const probe = document.body.appendChild(element("i", { hidden: "" }));

// A colour of style.css, as it is now.
export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

export class Plot {
  // host: where it is drawn. readout: an element for the figures at the cursor. readoutOf: takes an index into the data,
  // or null where there is no cursor, and gives these figures. scales, series, bands and axis (the upright one): uPlot's.
  // under and over: called with uPlot before and after the curves are drawn.
  constructor({ host, readout, readoutOf, scales = {}, series, bands = [], axis, under = () => {}, over = () => {} }) {
    const show = (drawn) => (readout.textContent = drawn?.data[0].length ? readoutOf(drawn.cursor.idx ?? null) : "");
    this.show = (data) => {
      this.plot.setData(data);
      show(this.plot);
    };
    const line = { stroke: () => colour("line"), width: 1 };
    const font = `12${FONT}`;
    const common = { stroke: () => colour("quiet"), font, labelFont: font, labelSize: 18, grid: line, ticks: line };
    const size = () => ({ width: Math.max(200, host.clientWidth), height: Math.max(150, host.clientHeight) });
    this.plot = new uPlot(
      {
        ...size(),
        scales: { x: { time: false }, ...scales },
        axes: [
          { ...common, label: "iteration", size: 34 },
          { ...common, size: 46, ...axis },
        ],
        series: [{}, ...series],
        bands,
        legend: { show: false },
        cursor: { y: false, points: { size: 7 } },
        hooks: { drawClear: [under], draw: [over], setCursor: [show] },
      },
      [[], ...series.map(() => [])],
      host,
    );
    new ResizeObserver(() => this.plot.setSize(size())).observe(host);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot.redraw());
  }
}

// phases: {first, last, phase}.
export function drawPhases(plot, phases) {
  within(plot, (ctx, { top, height }, pixel) => {
    ctx.textAlign = "center";
    phases.forEach(({ first, last, phase }, index) => {
      const [left, right] = [first, last].map((iteration) => plot.valToPos(iteration, "x", true));
      ctx.fillStyle = colour("phase");
      if (index % 2) ctx.fillRect(left, top, right - left, height);
      ctx.fillStyle = colour("quiet");
      if (right - left >= NAME_PIXELS * pixel) ctx.fillText(`phase ${phase}`, (left + right) / 2, top + height - 12 * pixel);
    });
  });
}

// marks: {at: an iteration, tone: a colour of style.css; line: pixels from the lower edge, or null for the whole height;
// dash, sign: a character near the upper edge, so many pixels below it}.
export function drawMarks(plot, marks) {
  within(plot, (ctx, { top, height }, pixel) => {
    for (const { at, tone, line = null, dash = [], sign = "", below = 0 } of marks) {
      const x = plot.valToPos(at, "x", true);
      ctx.fillStyle = ctx.strokeStyle = colour(tone);
      ctx.lineWidth = pixel;
      ctx.setLineDash(dash.map((length) => length * pixel));
      ctx.beginPath();
      ctx.moveTo(x, top + height);
      ctx.lineTo(x, line === null ? top : top + height - line * pixel);
      ctx.stroke();
      ctx.textAlign = "center";
      ctx.font = `bold ${18 * pixel}${FONT}`;
      ctx.fillText(sign, x, top + below * pixel);
      ctx.font = `${11 * pixel}${FONT}`;
    }
  });
}

export const failureMarks = (iterations) =>
  iterations.map((at) => ({ at, tone: "failure", dash: [4, 3], sign: "\u00d7", below: 16 }));

function within({ ctx, bbox }, draw) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.font = `${11 * uPlot.pxRatio}${FONT}`;
  draw(ctx, bbox, uPlot.pxRatio);
  ctx.restore();
}
