/** The newest caches, as links to a view. */

import { listCaches } from "../api.js";
import { html } from "../dom.js";
import { summary } from "../format.js";
import { FailureNote, useLoaded } from "../parts.js";
import { Begin } from "./begin.js";

export function CachePicker({ view }) {
  const [page, failure] = useLoaded((signal) => listCaches({ limit: 50 }, { signal }), []);
  return html`
    <${FailureNote} failure=${failure} />
    <ul class="picker">
      ${(page?.data ?? []).map(
        (cache) => html`<li key=${cache.id}><a href=${`#${view}/${cache.id}`}>${summary(cache)}</a></li>`,
      )}
    </ul>
    ${page?.data.length === 0 && html`<${Begin} />`}
  `;
}
