/** Which tokens of a document an answer read: a strip of the whole document, and its text if the shelf stores it. */

import { keptTokens } from "../api.js";
import { html } from "../dom.js";
import { count, percent } from "../format.js";
import { HeatMap } from "../heat-map.js";
import { HeatText } from "../heat-text.js";
import { Kept, Read } from "../heat.js";
import { FailureNote, useLoaded } from "../parts.js";
import { useMemo, useState } from "../vendor/hooks.js";

const ROW = [0]; // the strip's one row

/** `passages`: of an answer. `name` gives a document's name. The texts of several are loaded when asked for. */
export const Passages = ({ passages, name }) =>
  passages.map(
    (read) => html`<${PassagesOf}
      key=${read.cache_id} id=${read.cache_id} base64=${read.shares} name=${name(read.cache_id)} open=${passages.length === 1}
    />`,
  );

function PassagesOf({ id, base64, name, open }) {
  const read = useMemo(() => new Read(base64), [base64]);
  const [token, setToken] = useState(read.most);
  const [shown, setShown] = useState(open);
  const label = `What the answer read of ${name}`;
  const text = { id, read, token, label: `${label}, as text`, onChoose: setToken };
  return html`<section class="passages" aria-label=${label}>
    <h3>${label}</h3>
    <${HeatMap} kept=${read} layers=${ROW} rowPx=${16} label=${`${label}, along the document`} onChoose=${setToken} />
    <p class="hint">
      ${`Token ${count(token)} of ${count(read.size)}: ${percent(read.shares.kept[token])} of the heads read it, in the mean over the answer.`}
    </p>
    ${shown ? html`<${Text} ...${text} />` : html`<button onClick=${() => setShown(true)}>Show its text</button>`}
  </section>`;
}

function Text({ id, read, token, label, onChoose }) {
  const [kept, failure] = useLoaded(async (signal) => new Kept(await keptTokens(id, null, 0, { signal })), [id]);
  if (failure?.code === "source_not_kept") {
    return html`<p class="hint">The shelf does not store the text of this document.</p>`;
  }
  if (!kept) return failure ? html`<${FailureNote} failure=${failure} />` : html`<p class="hint">Loading …</p>`;
  return html`<${HeatText} kept=${kept} shares=${read.shares} label=${label} chosen=${token} onChoose=${onChoose} />`;
}
