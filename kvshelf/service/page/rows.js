/** A table that draws only the visible rows. Arrow keys move the current row. */

import { html } from "./dom.js";
import { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";

const BEYOND = 8; // rows drawn above and below the visible ones
const AHEAD = 60; // the next page is requested this many rows before the end

/**
 * `columns`: [{name, title, cell(row), className}]. `current` is the index of the current row, or -1; `onCurrent`
 * gets a newly chosen one, and whether a pointer chose it; `onOpen` gets it after Enter, `onTick` after Space. `more`:
 * there are rows beyond the last one, which `onEnd` fetches.
 */
export function Rows({ label, rows, columns, current, onCurrent, onOpen, onTick, more, onEnd, empty }) {
  const box = useRef();
  const [sight, setSight] = useState({ top: 0, height: 600, row: 44 });
  const [moved, setMoved] = useState(0);

  useLayoutEffect(() => {
    const measure = () => {
      const row = parseFloat(getComputedStyle(box.current).getPropertyValue("--row")) * rootSize();
      setSight((before) => ({ ...before, height: box.current.clientHeight, row }));
    };
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);

  const first = Math.max(0, Math.floor(sight.top / sight.row) - BEYOND);
  const last = Math.min(rows.length, Math.ceil((sight.top + sight.height) / sight.row) + BEYOND);
  useEffect(() => {
    if (more && last + AHEAD > rows.length) onEnd();
  });

  // Only after a key: a clicked row stays where it is.
  useLayoutEffect(() => {
    if (moved === 0 || current < 0) return;
    const above = current * sight.row;
    const room = box.current.clientHeight - headHeight(box.current);
    const top = Math.min(above, Math.max(box.current.scrollTop, above + sight.row - room));
    box.current.scrollTop = top;
    box.current.querySelector(`[aria-rowindex="${current + 2}"]`)?.focus({ preventScroll: true });
  }, [moved, current]);

  const onKeyDown = (event) => {
    const page = Math.max(1, Math.floor(sight.height / sight.row) - 1);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[
      event.key
    ];
    if (event.key === "Enter" && current >= 0) onOpen(current);
    if (event.key === " " && current >= 0 && event.target.matches("[role=row]")) {
      event.preventDefault(); // the list would scroll
      onTick(current);
    }
    if (step === undefined || rows.length === 0) return;
    event.preventDefault();
    onCurrent(Math.max(0, Math.min(rows.length - 1, current < 0 ? 0 : current + step)));
    setMoved(moved + 1);
  };

  const drawn = Array.from({ length: last - first }, (_, at) => first + at);
  if (current >= 0 && current < rows.length && (current < first || current >= last)) drawn.push(current);
  const stop = current >= 0 ? current : first; // the one row that Tab reaches
  return html`<div class="rows"><div
    ref=${box} class="grid" role="grid" aria-label=${label} aria-rowcount=${more ? -1 : rows.length + 1}
    aria-colcount=${columns.length} tabindex=${rows.length ? undefined : 0}
    onScroll=${() => setSight((before) => ({ ...before, top: box.current.scrollTop }))} onKeyDown=${onKeyDown}
  >
    <div class="row head" role="row" aria-rowindex="1">
      ${columns.map(({ name, title }) => html`<span key=${name} role="columnheader" class=${name}>${title}</span>`)}
    </div>
    <div class="all" role="rowgroup" style=${{ height: `${rows.length * sight.row}px` }}>
      ${drawn.map(
        (index) => html`<${Row}
        key=${rows[index].id} row=${rows[index]} index=${index} columns=${columns} top=${index * sight.row}
        selected=${index === current} reachable=${index === stop} onCurrent=${onCurrent} onOpen=${onOpen}
      />`,
      )}
    </div>
  </div>
  ${rows.length === 0 && html`<div class="empty">${more ? "Loading …" : empty}</div>`}
  </div>`;
}

function Row({ row, index, columns, top, selected, reachable, onCurrent, onOpen }) {
  return html`<div
    class="row" role="row" aria-rowindex=${index + 2} aria-selected=${selected} tabindex=${reachable ? 0 : -1}
    style=${{ transform: `translateY(${top}px)` }}
    onClick=${() => onCurrent(index, true)} onDblClick=${() => onOpen(index)} onFocus=${() => selected || onCurrent(index)}
  >
    ${columns.map(({ name, cell }) => html`<span key=${name} role="gridcell" class=${name}>${cell(row)}</span>`)}
  </div>`;
}

const rootSize = () => parseFloat(getComputedStyle(document.documentElement).fontSize);

const headHeight = (box) => box.firstElementChild.offsetHeight;
