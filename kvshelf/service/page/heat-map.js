/** The whole document at a glance: one row per layer and head, from its beginning to its end. */

import { html } from "./dom.js";
import { useLayoutEffect, useRef } from "./vendor/hooks.js";

const ROW_PX = 8;
const GAP_PX = 2; // between layers

/** `layers`: the layers to draw. `onChoose` gets the token under a click. */
export function HeatMap({ kept, layers, label, onChoose }) {
  const canvas = useRef();
  const rows = layers.reduce((sum, layer) => sum + kept.heads(layer), 0);
  const height = rows * ROW_PX + (layers.length - 1) * GAP_PX;

  useLayoutEffect(() => {
    const draw = () => paint(canvas.current, kept, layers, height);
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
    const token = Math.floor(((event.clientX - left) / width) * kept.tokens.length);
    onChoose(Math.max(0, Math.min(kept.tokens.length - 1, token)));
  };
  const style = { height: `${height}px` };
  return html`<canvas ref=${canvas} class="map" role="img" aria-label=${label} style=${style} onClick=${choose}></canvas>`;
}

function paint(canvas, kept, layers, height) {
  const scale = devicePixelRatio;
  const width = canvas.clientWidth;
  Object.assign(canvas, { width: width * scale, height: height * scale });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = getComputedStyle(canvas).color;
  const bins = Math.max(1, Math.min(kept.tokens.length, width));
  let top = 0;
  for (const layer of layers) {
    for (let head = 0; head < kept.heads(layer); head += 1, top += ROW_PX) {
      kept.density(layer, head, bins).forEach((share, bin) => {
        context.globalAlpha = share;
        context.fillRect((bin * width) / bins, top, width / bins, ROW_PX - 1);
      });
    }
    top += GAP_PX;
  }
}
