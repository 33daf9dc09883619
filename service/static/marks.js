// What happened, drawn into a plot over iterations: phases behind the curves, events at the edge and across.

import uPlot from "./vendor/uPlot.esm.js";
import { colour } from "./plot.js";

const NAME_PIXELS = 56; // a phase that is narrower is not named
const SIGN_PIXELS = 5;
const SIZE_PIXELS = 56; // from the upper edge: below the restarts, and above the end of a falling loss

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
