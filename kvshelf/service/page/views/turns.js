/** The turns of a conversation, and where it branches. */

import { listCaches, listTurns } from "../api.js";
import { html } from "../dom.js";
import { count, fromNow, milliseconds, percent } from "../format.js";
import { FailureNote, useLoaded } from "../parts.js";
import { useState } from "../vendor/hooks.js";

const MOST_CHILDREN = 20; // that the service names

/** `turns`: a cache's, from its document on. `answered`: figures by cache id. `children` follow as the last items. */
export const Turns = ({ turns, answered, children }) =>
  html`<ol class="turns">
    ${turns.map(
      (turn, at) => html`<${Turn}
        key=${turn.cache_id} turn=${turn} first=${at === 0} next=${turns[at + 1]?.cache_id} figures=${answered.get(turn.cache_id)}
      />`,
    )}
    ${children}
  </ol>`;

/** `next`: the cache that follows on the way to the last turn. */
function Turn({ turn, first, next, figures }) {
  const { cache_id: id, messages, tokens, children } = turn;
  const others = children.filter((child) => child !== next);
  return html`<li class="turn">
    ${
      messages
        ? messages.map((message, at) => html`<${Bubble} key=${at} ...${message} />`)
        : html`<${DocumentText} turn=${turn} first=${first} />`
    }
    ${messages && html`<p class="hint">${count(tokens)} tokens${figures && html` · <${Figures} ...${figures} />`}</p>`}
    <p class="links">
      ${next && html`<a href=${`#talk/${id}`}>Go back to here</a>`}
      <a href=${`#shelf/${id}`}>Its cache</a>
    </p>
    ${others.length > 0 && html`<${Branches} key=${others.join()} ids=${others} last=${!next} />`}
  </li>`;
}

const PLURALS = { continuation: "continuations", "other branch": "other branches" };
const SPEAKERS = { user: "Question", assistant: "Answer", system: "Instructions" };

/** One message. */
export const Bubble = ({ role, content }) =>
  html`<div class=${`bubble ${role}`}><span class="unseen">${SPEAKERS[role] ?? role}: </span>${content}</div>`;

/** What a question took, as far as this tab has measured it. */
export const Figures = ({ usage, firstMs }) =>
  [
    `${count(usage.cache_read_tokens)} from the shelf`,
    `${count(usage.prefill_tokens)} prefilled`,
    `first token after ${milliseconds(firstMs)}`,
  ].join(", ");

/** The document of a conversation, or more of it that was appended. */
function DocumentText({ turn, first }) {
  const { name, tokens, policy, compression_ratio: ratio, parent_id: parent } = turn;
  const size = `${count(tokens)} tokens, ${policy}, ${percent(ratio)} removed`;
  return html`
    <h2>${name || (first ? "A document without a name" : "An appended text")}</h2>
    <p>${first ? size : `appended ${size}`}</p>
    ${first && parent && html`<p class="hint">The cache that it was appended to is no longer on the shelf.</p>`}
  `;
}

/** The caches that were appended to a turn and are not on the way shown; their texts are loaded when asked for. */
function Branches({ ids, last }) {
  const [open, setOpen] = useState(false);
  const many = ids.length < MOST_CHILDREN - 1 ? count(ids.length) : `${ids.length} or more`;
  const kind = last ? "continuation" : "other branch";
  return html`<details onToggle=${(event) => setOpen(event.target.open)}>
    <summary>${many} ${ids.length === 1 ? kind : PLURALS[kind]}</summary>
    ${open && html`<${BranchList} ids=${ids} />`}
  </details>`;
}

function BranchList({ ids }) {
  const load = (signal) => Promise.all(ids.map(async (id) => (await listTurns(id, { signal })).at(-1)));
  const [turns, failure] = useLoaded(load, []);
  return html`
    <${FailureNote} failure=${failure} />
    <ul class="picker">
      ${(turns ?? []).map(
        (turn) => html`<li key=${turn.cache_id}>
          <a href=${`#talk/${turn.cache_id}`} onClick=${(event) => follow(event, turn.cache_id)}>${nameOf(turn)}</a>
          ${" "}<span class="hint">${fromNow(turn.created_at)}</span>
        </li>`,
      )}
    </ul>
    ${!turns && !failure && html`<p class="hint">Loading …</p>`}
  `;
}

const nameOf = ({ messages, name, tokens }) =>
  messages?.find(({ role }) => role === "user")?.content || name || `${count(tokens)} appended tokens`;

/** Go to the newest end of a branch. */
async function follow(event, id) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return; // it opens the branch's first turn in another tab
  event.preventDefault();
  location.hash = `talk/${await newestEnd(id).catch(() => id)}`;
}

async function newestEnd(id) {
  const { data } = await listCaches({ parent_id: id, limit: 1 });
  return data.length ? newestEnd(data[0].id) : id;
}
