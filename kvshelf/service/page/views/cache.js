/** One cache: its metadata, and forms to change it. */

import { deleteCache, listCaches, updateCache } from "../api.js";
import { html } from "../dom.js";
import { Choice, Field } from "../fields.js";
import {
  count,
  expiry,
  fromNow,
  kept,
  labelLines,
  moment,
  parseLabels,
  percent,
  quality,
  summary,
  title,
} from "../format.js";
import { Confirm, Facts, FailureNote, useLoaded } from "../parts.js";
import { useState } from "../vendor/hooks.js";

const CHILDREN = 20;
const SPANS = { minutes: 60, hours: 3600, days: 86_400 };

/**
 * `onChanged(cache, what)` and `onRemoved(cache, others)` are called after the service has changed or deleted the cache;
 * `others`: how many appended to it are deleted, too. `onShow` gets the id of another cache.
 */
export function CacheCard({ cache, onChanged, onRemoved, onShow }) {
  const [failure, setFailure] = useState(null);
  const [asking, setAsking] = useState(false);
  const [others, setOthers] = useState(0); // appended to it: whether to delete these, too, is being asked
  const [busy, setBusy] = useState(false);

  const carryOut = async (work) => {
    setBusy(true);
    setFailure(null);
    try {
      await work();
    } catch (error) {
      setFailure(error);
    }
    setBusy(false);
  };
  const change = (json, what) => carryOut(async () => onChanged(await updateCache(cache.id, json), what));
  const pin = () => change({ pinned: !cache.pinned }, cache.pinned ? "no longer pinned" : "pinned");
  const remove = () =>
    carryOut(async () => {
      setAsking(false);
      try {
        await deleteCache(cache.id);
      } catch (error) {
        if (error.code !== "cache_has_children") throw error;
        return setOthers(error.details.children);
      }
      return onRemoved(cache, 0);
    });
  const removeAll = () =>
    carryOut(async () => {
      setOthers(0);
      await deleteCache(cache.id, { cascade: true });
      onRemoved(cache, others);
    });

  return html`
    <h2>${title(cache)}</h2>
    <p class="links">
      <a class="button main" href=${`#ask/${cache.id}`}>Ask</a>
      <a class="button" href=${`#talk/${cache.id}`}>Conversation</a>
      <a class="button" href=${`#kept/${cache.id}`}>Kept tokens</a>
      <button aria-pressed=${cache.pinned} disabled=${busy} onClick=${pin}>
        ${cache.pinned ? "Unpin" : "Pin"}
      </button>
      <button class="danger" disabled=${busy} onClick=${() => setAsking(true)}>Delete</button>
    </p>
    <${FailureNote} failure=${failure} />
    <${CacheFacts} cache=${cache} onShow=${onShow} />
    <${Changes} cache=${cache} busy=${busy} onChange=${change} onWrong=${setFailure} />
    ${
      asking &&
      html`<${Confirm}
      question=${`Delete this cache (${summary(cache)})? Its document would have to be compressed again.`}
      action="Delete it" onYes=${remove} onNo=${() => setAsking(false)}
    />`
    }
    ${
      others > 0 &&
      html`<${Confirm}
      question=${`To this cache ${others === 1 ? "another was" : `${count(others)} others were`} appended. Delete all of them?`}
      action=${`Delete all ${count(others + 1)}`} onYes=${removeAll} onNo=${() => setOthers(0)}
    />`
    }
  `;
}

function CacheFacts({ cache, onShow }) {
  const { quality: measured, timings, tokens, parent_id: parent } = cache;
  return html`<${Facts} facts=${{
    Cache: html`<code>${cache.id}</code>`,
    Document: html`<code>${cache.document_id}</code>`,
    "Appended to": parent && html`<${CacheLink} id=${parent} onShow=${onShow} />`,
    "Grown into": html`<${Children} id=${cache.id} onShow=${onShow} />`,
    Model: cache.model,
    Policy: `${cache.policy}, ${percent(cache.compression_ratio)} removed`,
    Codec: cache.codec,
    Tokens: `${count(tokens.kept)} of ${count(tokens.document)} per head`
      + (tokens.protected ? `, ${count(tokens.protected)} protected` : ""),
    Size: kept(cache),
    Quality: measured && quality(measured),
    Certificate: cache.certificate
      && `${cache.certificate.name}: at most ${percent(cache.certificate.alpha)} of the answers lost`,
    Warning: cache.warnings.length ? cache.warnings.join(" ") : null,
    Hits: `${count(cache.uses)}${cache.last_used_at ? `, last ${fromNow(cache.last_used_at)}` : ""}`,
    Created: `${moment(cache.created_at)}, ${(timings.prefill_s + timings.compress_s).toFixed(2)} s of work`,
    Expires: cache.expires_at === null ? "never" : `${moment(cache.expires_at)}, ${expiry(cache)}`,
    Guaranteed: cache.guaranteed_until && `until ${moment(cache.guaranteed_until)}`,
    Source: remade(cache.source),
    Labels: Object.keys(cache.labels).length ? html`<span class="labels">${labelLines(cache.labels)}</span>` : null,
  }} />`;
}

/** What a cache can be made again from, and until when. */
function remade(source) {
  if (!source) return "not stored";
  const what = `${source.form === "text" ? "text" : "token ids"} stored with the cache`;
  return source.expires_at === null ? what : `${what}, until ${moment(source.expires_at)}`;
}

/** The newest caches that were appended to one. */
function Children({ id, onShow }) {
  const [page, failure] = useLoaded((signal) => listCaches({ parent_id: id, limit: CHILDREN }, { signal }), [id]);
  if (failure) return failure.message;
  if (!page?.data.length) return page ? "none" : "…";
  return html`${count(page.data.length)}${page.has_more && " or more"}: ${page.data.map(
    (child) => html`<${CacheLink} key=${child.id} id=${child.id} name=${child.name} onShow=${onShow} /> `,
  )}`;
}

/** Without a name, the id begins as the command line shows it. `onShow`: the address may name this cache already. */
const CacheLink = ({ id, name, onShow }) =>
  html`<a href=${`#shelf/${id}`} onClick=${() => onShow(id)}>${name || id.slice(0, 12)}</a>`;

function Changes({ cache, busy, onChange, onWrong }) {
  const [name, setName] = useState(cache.name);
  const [labels, setLabels] = useState(labelLines(cache.labels));
  const [amount, setAmount] = useState("");
  const [unit, setUnit] = useState("days");

  const describe = (event) => {
    event.preventDefault();
    try {
      onChange({ name, labels: parseLabels(labels) }, "its name and labels are saved");
    } catch (error) {
      onWrong(error);
    }
  };
  const extend = (event) => {
    event.preventDefault();
    onChange({ ttl_s: Number(amount) * SPANS[unit] }, `kept for ${amount} ${unit} from now`);
  };
  const keep = () => onChange({ ttl_s: null }, "it never expires");
  return html`
    <form class="inline" onSubmit=${extend} aria-label="Lifetime">
      <${Field} label="Keep for" type="number" min="0.01" step="any" required value=${amount} onValue=${setAmount} />
      <${Choice} label="Unit" options=${Object.keys(SPANS).map((span) => [span, span])} value=${unit} onValue=${setUnit} />
      <button disabled=${busy}>Set</button>
      <button type="button" disabled=${busy || cache.expires_at === null} onClick=${keep}>For ever</button>
    </form>
    <form onSubmit=${describe} aria-label="Name and labels">
      <${Field} label="Name" maxlength="256" value=${name} onValue=${setName} />
      <${Field} label="Labels, one name=value per line" as="textarea" rows="2" value=${labels} onValue=${setLabels} />
      <button disabled=${busy}>Save name and labels</button>
    </form>
  `;
}
