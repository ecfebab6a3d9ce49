/** The shelf: a table of its caches, and the chosen one beside it. */

import { getCache, listModels, listPolicies } from "../api.js";
import { html } from "../dom.js";
import { Choice, Field, LateField } from "../fields.js";
import { agreement, count, expiry, fromNow, labelLines, megabytes, percent, title } from "../format.js";
import { useCaches } from "../pages.js";
import { Announce, FailureNote, useLoaded } from "../parts.js";
import { Rows } from "../rows.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import { sideOf } from "./ask.js";
import { Begin } from "./begin.js";
import { CacheCard } from "./cache.js";

const COLUMNS = (ticked, onTick) => [
  {
    name: "tick",
    title: "",
    cell: (cache) =>
      html`<input
        type="checkbox" tabindex="-1" aria-label=${`Ask ${title(cache)}`} checked=${ticked.includes(cache.id)}
        onClick=${(event) => event.stopPropagation()} onChange=${() => onTick(cache.id)}
      />`,
  },
  { name: "document", title: "Document", cell: title },
  { name: "policy", title: "Policy", cell: (cache) => cache.policy },
  { name: "removed", title: "Removed", cell: (cache) => percent(cache.compression_ratio) },
  { name: "codec", title: "Codec", cell: (cache) => cache.codec.split(":")[0] },
  { name: "size", title: "Size", cell: (cache) => megabytes(cache.bytes.stored) },
  { name: "quality", title: "Quality", cell: agreement },
  { name: "hits", title: "Hits", cell: (cache) => count(cache.uses) },
  { name: "age", title: "Created", cell: (cache) => fromNow(cache.created_at) },
  { name: "expiry", title: "Expires", cell: expiry },
  { name: "pinned", title: "Pinned", cell: (cache) => (cache.pinned ? "pinned" : "") },
];
const ANY = { policy: "", model: "", label: "" };

/** Each order: its title, and the number that rises from row to row; null comes last. The service has the newest first. */
const ORDERS = {
  newest: ["Newest first", null],
  oldest: ["Oldest first", (cache) => cache.created_at],
  largest: ["Largest first", (cache) => -cache.bytes.stored],
  smallest: ["Smallest first", (cache) => cache.bytes.stored],
  best: ["Best quality first", ({ quality }) => (Number.isFinite(quality?.agreement) ? -quality.agreement : null)],
  worst: ["Worst quality first", ({ quality }) => quality?.agreement ?? null],
};
const NARROW = matchMedia("(max-width: 52rem)"); // as in the style sheets

export function ShelfView({ ids: [opened] }) {
  const [filters, setFilters] = useState(ANY);
  const [search, setSearch] = useState("");
  const [order, setOrder] = useState("newest");
  const [current, setCurrent] = useState(null); // an id, because rows move
  const [said, setSaid] = useState("");
  const [pointed, setPointed] = useState(0); // choices by pointer
  const [ticked, setTicked] = useState([]); // ids of caches to ask together
  const whole = search !== "" || order !== "newest"; // what is not fetched is neither found nor in order
  const caches = useCaches(queryOf(filters), whole);
  const rows = useMemo(() => sorted(matching(caches.rows, search), ORDERS[order][1]), [caches.rows, search, order]);
  const card = useRef();
  const index = rows.findIndex((cache) => cache.id === current);
  const [linked, linkFailure] = useLoaded(async (signal) => (opened ? getCache(opened, { signal }) : null), [opened]);
  useEffect(() => setCurrent(opened ?? null), [opened]);

  const shown = rows[index] ?? (linked?.id === current ? linked : null);
  useLayoutEffect(() => {
    if (shown && NARROW.matches) card.current.scrollIntoView(); // it is below the list there
  }, [pointed, linked]);
  const changed = (cache, what) => {
    caches.replace(cache);
    setSaid(what);
  };
  const without = (id) => ticked.filter((each) => each !== id);
  const tick = (id) => setTicked(ticked.includes(id) ? without(id) : [...ticked, id]);
  const removed = (cache, others) => {
    setTicked(others ? [] : without(cache.id));
    const next = others ? null : (rows[index + 1] ?? rows[index - 1]);
    if (others) caches.refresh(); // which they were, only the service knows
    else caches.remove(cache.id);
    setCurrent(next?.id ?? null);
    setSaid(`${title(cache)} is deleted${others ? ` with ${count(others)} appended to it` : ""}`);
  };
  const open = () => card.current.querySelector("a, button")?.focus();
  const choose = (at, byPointer) => {
    setCurrent(rows[at].id);
    if (byPointer) setPointed(pointed + 1);
  };
  const unfiltered = search === "" && Object.values(filters).every((value) => value === "");
  const empty = unfiltered ? html`<${Begin} />` : "No cache matches. Change the search or a filter.";
  return html`
    <form class="filters" aria-label="Filters" onSubmit=${(event) => event.preventDefault()}>
      <${Field} label="Search" type="search" placeholder="name, label, id …" value=${search} onValue=${setSearch} />
      <${Filters} filters=${filters} onChange=${setFilters} />
      <${Choice} label="Sort by" options=${Object.entries(ORDERS).map(([id, [told]]) => [id, told])} value=${order} onValue=${setOrder} />
      <button type="button" onClick=${caches.refresh}>Refresh</button>
      ${ticked.length > 0 && html`<a class="button main" href=${`#ask/${sideOf(ticked)}`}>Ask the ticked (${count(ticked.length)})</a>`}
      <output>${told(caches, whole, search && rows.length)}</output>
    </form>
    <${FailureNote} failure=${caches.failure ?? linkFailure} />
    <div class="split">
      <${Rows}
        label="Caches on the shelf" rows=${rows} columns=${COLUMNS(ticked, tick)} current=${index} onCurrent=${choose} onOpen=${open}
        onTick=${(at) => tick(rows[at].id)}
        more=${caches.more} onEnd=${caches.loadMore} empty=${caches.failure ? "" : empty}
      />
      <aside class="card" aria-label="The chosen cache" ref=${card}>
        ${
          shown
            ? html`<${CacheCard} key=${shown.id} cache=${shown} onChanged=${changed} onRemoved=${removed} onShow=${setCurrent} />`
            : html`<p class="hint">Choose a cache to see its details, ask it a question or change it. The arrow keys move
              through the list, Enter moves here. Tick several to ask them one question together, with the mouse or the
              space bar.</p>`
        }
      </aside>
    </div>
    <${Announce} text=${said} />
  `;
}

/** The caches of which a text has `search` in it, in any case. */
function matching(caches, search) {
  const wanted = search.trim().toLowerCase();
  const texts = ({ name, id, document_id, policy, codec, model, labels }) =>
    [name, id, document_id, policy, codec, model, labelLines(labels)].join("\n").toLowerCase();
  return wanted ? caches.filter((cache) => texts(cache).includes(wanted)) : caches;
}

const sorted = (caches, number) =>
  number ? caches.toSorted((one, two) => (number(one) ?? Infinity) - (number(two) ?? Infinity) || 0) : caches;

/** How many caches are known. `found`: those that match a search, or an empty text. */
function told({ rows, more, loading }, whole, found) {
  if (whole && more) return `${count(rows.length)}, loading …`;
  if (loading) return "loading …";
  if (found !== "") return `${count(found)} of ${count(rows.length)}`;
  return more ? `the newest ${count(rows.length)}, more below` : `${count(rows.length)} in all`;
}

/** The filters as the API takes them. A label counts once it has a value. */
function queryOf({ label, ...rest }) {
  const at = label.indexOf("=");
  return at > 0 ? { ...rest, [`label.${label.slice(0, at).trim()}`]: label.slice(at + 1).trim() } : rest;
}

function Filters({ filters, onChange }) {
  const [policies] = useLoaded(listPolicies, []);
  const [models] = useLoaded(listModels, []);
  const of = (name) => ({ value: filters[name], onValue: (value) => onChange({ ...filters, [name]: value.trim() }) });
  const any = (options) => [["", "any"], ...(options ?? []).map(({ id }) => [id, id])];
  return html`
    <${Choice} label="Policy" options=${any(policies)} ...${of("policy")} />
    <${Choice} label="Model" options=${any(models)} ...${of("model")} />
    <${LateField} label="Label" placeholder="name=value" ...${of("label")} />
  `;
}
