/** The heat map of a document: which of its tokens each layer and head of a cache kept. */

import { getCache, keptTokens } from "../api.js";
import { html } from "../dom.js";
import { Choice, Field, Files } from "../fields.js";
import { count, percent, summary } from "../format.js";
import { HeatMap } from "../heat-map.js";
import { HeatText } from "../heat-text.js";
import { Kept, LEVELS } from "../heat.js";
import { Announce, FailureNote, useLoaded } from "../parts.js";
import { useMemo, useState } from "../vendor/hooks.js";
import { CachePicker } from "./picker.js";

const MAP_LAYERS = 16; // drawn together: more rows could not be read at a glance

export function KeptView({ ids: [id] }) {
  if (!id) return html`<p>Choose a cache to see which tokens of its document it kept.</p><${CachePicker} view="kept" />`;
  return html`<${KeptOf} key=${id} id=${id} />`;
}

function KeptOf({ id }) {
  const [text, setText] = useState(null);
  const [cache, cacheFailure] = useLoaded((signal) => getCache(id, { signal }), [id]);
  const [kept, failure] = useLoaded(async (signal) => new Kept(await keptTokens(id, text, 0, { signal })), [id, text]);
  const wantsText =
    failure && ["source_not_kept", "state_conflict", "document_too_short", "body_too_large"].includes(failure.code);
  return html`
    <p class="subject">${cache ? summary(cache) : "…"}</p>
    <${FailureNote} failure=${cacheFailure ?? (failure?.code === "source_not_kept" ? null : failure)} />
    ${(wantsText || (text !== null && !kept)) && html`<${OwnText} onText=${setText} />`}
    ${kept ? html`<${Heat} id=${id} text=${text} kept=${kept} />` : !failure && html`<p class="hint">Loading …</p>`}
  `;
}

function OwnText({ onText }) {
  const [text, setText] = useState("");
  const submit = (event) => {
    event.preventDefault();
    onText(text);
  };
  const read = async ([file]) => onText(await file.text());
  return html`<form class="card narrow" onSubmit=${submit}>
    <p>
      The shelf does not store the text of this document. Give exactly the same text here: the service compares its
      tokens with the cache, and does not store it.
    </p>
    <${Files} label="Choose its file" onFiles=${read} />
    <${Field} label="Or paste its text" as="textarea" rows="6" required value=${text} onValue=${setText} />
    <button class="main">Show the kept tokens</button>
  </form>`;
}

function Heat({ id, text, kept }) {
  const [layer, setLayer] = useState(null);
  const [head, setHead] = useState(null);
  const [token, setToken] = useState(kept.about.template_tokens);
  const [loaded, failure] = useLayer(kept, id, text, layer);
  const shares = useMemo(() => (loaded ? kept.shares(layer, head) : null), [kept, loaded, layer, head]);
  const layers = useMemo(() => mapLayers(kept, layer), [kept, loaded, layer]);

  const chooseLayer = (number) => {
    setLayer(number);
    setHead(null);
  };
  const heads = layer !== null && loaded ? kept.heads(layer) : 0;
  const mapLabel = `Kept entries along the document, layers ${layers.join(", ")}`;
  return html`
    <form class="filters" aria-label="Layers and heads" onSubmit=${(event) => event.preventDefault()}>
      <${OneOf} label="Layer" count=${kept.numLayers} value=${layer} onValue=${chooseLayer} />
      <${OneOf} label="Head" count=${heads} value=${head} onValue=${setHead} disabled=${layer === null} />
      <${Legend} merges=${kept.about.merged_counts !== null} />
    </form>
    <${FailureNote} failure=${failure} />
    <${HeatMap} kept=${kept} layers=${layers} label=${mapLabel} onChoose=${setToken} />
    <div class="split">
      ${
        shares
          ? html`<${HeatText} kept=${kept} shares=${shares} chosen=${token} onChoose=${setToken} />`
          : html`<p class="heat hint">Loading …</p>`
      }
      <aside class="card" aria-label="The chosen token">
        <${TokenCard} kept=${kept} token=${token} onToken=${setToken} />
        <p class="hint">${kept.about.meaning}</p>
      </aside>
    </div>
  `;
}

/** A choice among numbers from 0, or all of them (null). */
function OneOf({ count: many, value, onValue, ...rest }) {
  const options = [["", `all ${many || ""}`], ...upTo(many).map((number) => [number, number])];
  const hear = (text) => onValue(text === "" ? null : Number(text));
  return html`<${Choice} options=${options} value=${value ?? ""} onValue=${hear} ...${rest} />`;
}

/** Fetch the bitmaps of a layer unless they are loaded; a large cache comes in pages. */
function useLayer(kept, id, text, layer) {
  const there = layer === null || kept.hasLayer(layer);
  const load = async (signal) => there || kept.addLayers(await keptTokens(id, text, layer, { signal }));
  const [, failure] = useLoaded(load, [kept, layer]);
  return [there, failure];
}

/** The layers of the map: the first loaded ones, or the chosen one. */
function mapLayers(kept, layer) {
  if (layer !== null && kept.hasLayer(layer)) return [layer];
  return fetched(kept).slice(0, MAP_LAYERS);
}

function Legend({ merges }) {
  return html`<span class="legend">
    <span class="none">evicted</span>
    ${upTo(LEVELS).map((at) => html`<span key=${at} style=${{ "--level": at + 1 }} aria-hidden="true"> </span>`)}
    <span>kept by all heads</span>
    ${merges && html`<span class="merged">merged into another</span>`}
  </span>`;
}

function TokenCard({ kept, token, onToken }) {
  const { counts, merged_counts: merged, num_heads: heads, template_tokens: template } = kept.about;
  const layers = fetched(kept);
  const told = `${count(counts[token])} of ${count(heads)} heads kept it (${percent(counts[token] / heads)})`;
  const set = (event) => {
    const number = Math.round(Number(event.target.value));
    if (number >= 0 && number < kept.tokens.length) onToken(number);
  };
  return html`
    <h2>
      Token${" "}
      <input
        type="number" aria-label="Number of the token" min="0" max=${kept.tokens.length - 1} value=${token} onInput=${set}
      />${" "}
      of ${count(kept.tokens.length)}
    </h2>
    <p class="token">
      <code>${JSON.stringify(kept.tokens[token])}</code>${token < template && " (of the chat template)"}
    </p>
    <p>${told}${merged?.[token] ? `, ${count(merged[token])} merged it into another` : ""}.</p>
    <div class="heads" tabindex="0" role="region" aria-label="By layer and head">
      <table>
        <thead><tr><th scope="col">Layer</th><th scope="col">Heads</th></tr></thead>
        <tbody>
          ${layers.map(
            (layer) => html`<tr key=${layer}>
              <th scope="row">${layer}</th>
              <td>${kept.states(layer, token).map((state, head) => html`<${Head} key=${head} head=${head} state=${state} />`)}</td>
            </tr>`,
          )}
        </tbody>
      </table>
      ${layers.length < kept.numLayers && html`<p class="hint">Choose another layer above to load it.</p>`}
    </div>
    <${Announce} text=${`Token ${token}: ${told}`} />
  `;
}

const Head = ({ head, state }) =>
  html`<span class=${`head ${state}`} title=${`head ${head}: ${state}`}>
    <span class="unseen">head ${head} ${state}</span>
  </span>`;

const upTo = (number) => [...Array(number).keys()];

/** The layers whose bitmaps are loaded. */
const fetched = (kept) => upTo(kept.numLayers).filter((layer) => kept.hasLayer(layer));
