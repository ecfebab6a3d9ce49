/** The shelf: a table of its caches, and the chosen one beside it. */

import { getCache, listModels, listPolicies } from "../api.js";
import { html } from "../dom.js";
import { Choice, LateField } from "../fields.js";
import { bytes, count, expiry, percent, quality, title } from "../format.js";
import { useCaches } from "../pages.js";
import { Announce, FailureNote, useLoaded } from "../parts.js";
import { Rows } from "../rows.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { CacheCard } from "./cache.js";

const COLUMNS = [
  { name: "document", title: "Document", cell: title },
  { name: "policy", title: "Policy", cell: (cache) => cache.policy },
  { name: "removed", title: "Removed", cell: (cache) => percent(cache.compression_ratio) },
  { name: "size", title: "Size", cell: (cache) => bytes(cache.bytes.stored) },
  { name: "quality", title: "Quality", cell: quality },
  { name: "hits", title: "Hits", cell: (cache) => count(cache.uses) },
  { name: "expiry", title: "Expires", cell: expiry },
  { name: "pinned", title: "Pinned", cell: (cache) => (cache.pinned ? "pinned" : "") },
];
const ANY = { policy: "", model: "", document_id: "", label: "" };

export function ShelfView({ ids: [opened] }) {
  const [filters, setFilters] = useState(ANY);
  const [current, setCurrent] = useState(null); // an id, because rows move
  const [said, setSaid] = useState("");
  const caches = useCaches(queryOf(filters));
  const card = useRef();
  const index = caches.rows.findIndex((cache) => cache.id === current);
  const [linked, linkFailure] = useLoaded(async (signal) => (opened ? getCache(opened, { signal }) : null), [opened]);
  useEffect(() => setCurrent(opened ?? null), [opened]);

  const shown = caches.rows[index] ?? (linked?.id === current ? linked : null);
  const changed = (cache, what) => {
    caches.replace(cache);
    setSaid(what);
  };
  const removed = (cache) => {
    const next = caches.rows[index + 1] ?? caches.rows[index - 1];
    caches.remove(cache.id);
    setCurrent(next?.id ?? null);
    setSaid(`${title(cache)} is deleted`);
  };
  const open = () => card.current.querySelector("a, button")?.focus();
  const shownRows = count(caches.rows.length);
  const known = caches.more ? `the newest ${shownRows}, more below` : `${shownRows} in all`;
  return html`
    <${Filters} filters=${filters} onChange=${setFilters} onRefresh=${caches.refresh} told=${caches.loading ? "loading …" : known} />
    <${FailureNote} failure=${caches.failure ?? linkFailure} />
    <div class="split">
      <${Rows}
        label="Caches on the shelf" rows=${caches.rows} columns=${COLUMNS} current=${index}
        onCurrent=${(at) => setCurrent(caches.rows[at].id)} onOpen=${open}
        more=${caches.more} onEnd=${caches.loadMore}
        empty="No cache matches. Put a document on the shelf, or remove a filter."
      />
      <aside class="card" aria-label="The chosen cache" ref=${card}>
        ${
          shown
            ? html`<${CacheCard} key=${shown.id} cache=${shown} onChanged=${changed} onRemoved=${removed} />`
            : html`<p class="hint">Choose a cache to see its details, ask it a question or change it. The arrow keys move
              through the list, Enter moves here.</p>`
        }
      </aside>
    </div>
    <${Announce} text=${said} />
  `;
}

/** The filters as the API takes them. A label counts once it has a value. */
function queryOf({ label, ...rest }) {
  const at = label.indexOf("=");
  return at > 0 ? { ...rest, [`label.${label.slice(0, at).trim()}`]: label.slice(at + 1).trim() } : rest;
}

function Filters({ filters, onChange, onRefresh, told }) {
  const [policies] = useLoaded(listPolicies, []);
  const [models] = useLoaded(listModels, []);
  const of = (name) => ({ value: filters[name], onValue: (value) => onChange({ ...filters, [name]: value.trim() }) });
  const any = (options) => [["", "any"], ...(options ?? []).map(({ id }) => [id, id])];
  return html`<form class="filters" aria-label="Filters" onSubmit=${(event) => event.preventDefault()}>
    <${Choice} label="Policy" options=${any(policies)} ...${of("policy")} />
    <${Choice} label="Model" options=${any(models)} ...${of("model")} />
    <${LateField} label="Document" placeholder="doc_…" ...${of("document_id")} />
    <${LateField} label="Label" placeholder="name=value" ...${of("label")} />
    <button type="button" onClick=${onRefresh}>Refresh</button>
    <output>${told}</output>
  </form>`;
}
