// A plot over iterations that follows the page's colours and width, and what happened, drawn into it. A drag shows a part
// of the run, a double click all of it; the table below each plot reads it out.

import uPlot from "./vendor/uPlot.esm.js";

const FONT = "12px system-ui, sans-serif";
const SIGN_PIXELS = 5;
const NAME_PIXELS = 56; // a phase that is narrower is not named
const SIZE_PIXELS = 56; // from the upper edge: below the restarts, and above the end of a falling loss

// A colour of style.css, as it is now.
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
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
    const common = { stroke: () => colour("quiet"), font: FONT, labelFont: FONT, labelSize: 18, grid: line, ticks: line };
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
  const { ctx, bbox } = plot;
  const pixel = uPlot.pxRatio;
  within(plot, () => {
    phases.forEach(({ first, last, phase }, index) => {
      const left = plot.valToPos(first, "x", true);
      const right = plot.valToPos(last, "x", true);
      if (index % 2) {
        ctx.fillStyle = colour("phase");
        ctx.fillRect(left, bbox.top, right - left, bbox.height);
      }
      if (right - left < NAME_PIXELS * pixel) return;
      ctx.fillStyle = colour("quiet");
      ctx.font = `${11 * pixel}px system-ui, sans-serif`;
      ctx.textAlign = "center";
      ctx.textBaseline = "bottom";
      ctx.fillText(`phase ${phase}`, (left + right) / 2, bbox.top + bbox.height - 12 * pixel);
    });
  });
}

// Short strokes at the lower edge: there may be hundreds.
export function drawCheckpoints(plot, iterations) {
  const { ctx, bbox } = plot;
  const pixel = uPlot.pxRatio;
  within(plot, () => {
    ctx.fillStyle = colour("checkpoint");
    const bottom = bbox.top + bbox.height;
    for (const iteration of iterations) {
      ctx.fillRect(plot.valToPos(iteration, "x", true) - pixel / 2, bottom - 9 * pixel, pixel, 9 * pixel);
    }
  });
}

export function drawFailures(plot, iterations) {
  const { ctx, bbox } = plot;
  const pixel = uPlot.pxRatio;
  const size = SIGN_PIXELS * pixel;
  within(plot, () => {
    ctx.strokeStyle = colour("failure");
    for (const iteration of iterations) {
      const x = plot.valToPos(iteration, "x", true);
      const y = bbox.top + 2 * size;
      ctx.lineWidth = pixel;
      stroke(ctx, [4 * pixel, 3 * pixel], [x, y + size, x, bbox.top + bbox.height]);
      ctx.lineWidth = 2 * pixel;
      stroke(ctx, [], [x - size, y - size, x + size, y + size], [x - size, y + size, x + size, y - size]);
    }
  });
}

// restarts: {iteration, predicted}. A full diamond where the state was predicted, an empty one where it was exact.
export function drawRestarts(plot, restarts) {
  const { ctx, bbox } = plot;
  const pixel = uPlot.pxRatio;
  const size = (SIGN_PIXELS + 1) * pixel;
  within(plot, () => {
    for (const { iteration, predicted } of restarts) {
      const x = plot.valToPos(iteration, "x", true);
      const y = bbox.top + 5 * size;
      ctx.beginPath();
      ctx.moveTo(x, y - size);
      ctx.lineTo(x + size, y);
      ctx.lineTo(x, y + size);
      ctx.lineTo(x - size, y);
      ctx.closePath();
      ctx.fillStyle = colour(predicted ? "restart" : "surface");
      ctx.fill();
      ctx.strokeStyle = colour("restart");
      ctx.lineWidth = 2 * pixel;
      ctx.setLineDash([]);
      ctx.stroke();
    }
  });
}

// sizes: {since_iteration, before, ranks}. Each line is named to its right, at the edge to its left, where there is room.
export function drawSizes(plot, sizes) {
  const { ctx, bbox } = plot;
  const pixel = uPlot.pxRatio;
  const gap = 4 * pixel;
  within(plot, () => {
    const places = sizes.map((one) => plot.valToPos(one.since_iteration, "x", true));
    let free = bbox.left; // what lies left of this is taken
    sizes.forEach(({ before, ranks }, index) => {
      const x = places[index];
      ctx.strokeStyle = colour("quiet");
      ctx.lineWidth = pixel;
      stroke(ctx, [pixel, 3 * pixel], [x, bbox.top, x, bbox.top + bbox.height]);
      ctx.fillStyle = colour("quiet");
      ctx.font = `${11 * pixel}px system-ui, sans-serif`;
      ctx.textAlign = "left";
      ctx.textBaseline = "bottom";
      const name = `${before} \u2192 ${ranks} ranks`;
      const width = ctx.measureText(name).width;
      const right = x + gap + width <= (places[index + 1] ?? bbox.left + bbox.width);
      const left = right ? x + gap : x - gap - width;
      if (left >= free) ctx.fillText(name, left, bbox.top + SIZE_PIXELS * pixel);
      free = right ? left + width : x;
    });
  });
}

function within({ ctx, bbox }, draw) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  draw();
  ctx.restore();
}

function stroke(ctx, dash, ...lines) {
  ctx.setLineDash(dash);
  ctx.beginPath();
  for (const [fromX, fromY, toX, toY] of lines) {
    ctx.moveTo(fromX, fromY);
    ctx.lineTo(toX, toY);
  }
  ctx.stroke();
}
