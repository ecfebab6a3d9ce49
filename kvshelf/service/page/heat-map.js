/** The whole document at a glance: one row per layer and head, from its beginning to its end. */

import { html } from "./dom.js";
import { useLayoutEffect, useRef } from "./vendor/hooks.js";

const GAP_PX = 2; // between layers

/** `kept`: a `Kept` or a `Read`. `layers`: those to draw. `onChoose` gets the token under a click. */
export function HeatMap({ kept, layers, label, onChoose, rowPx = 8 }) {
  const canvas = useRef();
  const rows = layers.reduce((sum, layer) => sum + kept.heads(layer), 0);
  const height = rows * rowPx + (layers.length - 1) * GAP_PX;

  useLayoutEffect(() => {
    const draw = () => paint(canvas.current, kept, layers, height, rowPx);
    draw();
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const observer = new ResizeObserver(draw);
    observer.observe(canvas.current);
    dark.addEventListener("change", draw);
    return () => {
      observer.disconnect();
      dark.removeEventListener("change", draw);
    };
  }, [kept, layers]);

  const choose = (event) => {
    const { left, width } = canvas.current.getBoundingClientRect();
    const token = Math.floor(((event.clientX - left) / width) * kept.size);
    onChoose(Math.max(0, Math.min(kept.size - 1, token)));
  };
  const style = { height: `${height}px` };
  return html`<canvas ref=${canvas} class="map" role="img" aria-label=${label} style=${style} onClick=${choose}></canvas>`;
}

function paint(canvas, kept, layers, height, rowPx) {
  const scale = devicePixelRatio;
  const width = canvas.clientWidth;
  Object.assign(canvas, { width: width * scale, height: height * scale });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = getComputedStyle(canvas).color;
  const bins = Math.max(1, Math.min(kept.size, width));
  let top = 0;
  for (const layer of layers) {
    for (let head = 0; head < kept.heads(layer); head += 1, top += rowPx) {
      kept.density(layer, head, bins).forEach((share, bin) => {
        context.globalAlpha = share;
        context.fillRect((bin * width) / bins, top, width / bins, rowPx - 1);
      });
    }
    top += GAP_PX;
  }
}
