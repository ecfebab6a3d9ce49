/** Ask one cache or several together, or two such choices side by side; answers are shown as they are generated. */

import { ask, getCache, listCaches, listSelectors } from "../api.js";
import { html } from "../dom.js";
import { Choice, Field } from "../fields.js";
import { count, milliseconds, percent, summary, title } from "../format.js";
import { Announce, Facts, FailureNote, useLoaded } from "../parts.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { Begin } from "./begin.js";
import { Passages } from "./passages.js";

const RECENT = 100;

/** In the address, one side names one cache, or several that are asked together. */
const idsOf = (side) => side.split("+");
export const sideOf = (ids) => ids.join("+");

/** `ids`: the sides of the address. */
export function AskView({ ids }) {
  const [prompt, setPrompt] = useState("");
  const [maxTokens, setMaxTokens] = useState("64");
  const [selector, setSelector] = useState("");
  const [readTokens, setReadTokens] = useState("");
  const [selectors] = useLoaded(listSelectors, []);
  const [asked, setAsked] = useState(null);
  const [recent, failure] = useLoaded((signal) => choices(ids, signal), [ids.join()]);
  const chosen = ids.length ? ids : (recent?.slice(0, 1).map((cache) => cache.id) ?? []);

  const known = new Map((recent ?? []).map((cache) => [cache.id, cache]));
  const together = chosen.filter((side) => idsOf(side).length > 1);
  const named = [...new Set([...together, ...known.keys()])].map((side) => [side, nameOf(side, known)]);
  const none = ["", recent === null ? "…" : "none"];

  const choose = (at) => (id) => {
    const next = [...chosen];
    next[at] = id;
    location.hash = `ask/${next.filter(Boolean).join("/")}`;
  };
  const submit = (event) => {
    event.preventDefault();
    const select = selector && { method: selector, tokens: readTokens ? Number(readTokens) : null, passages: true };
    const body = { prompt, max_tokens: Number(maxTokens), ...(select && { select }) };
    setAsked({ number: (asked?.number ?? 0) + 1, ids: chosen, body });
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
  };
  if (recent?.length === 0) return html`<${Begin} />`;
  return html`
    <form class="card" onSubmit=${submit}>
      <div class="choices">
        <${Choice} label="Cache" options=${chosen[0] ? named : [none, ...named]} value=${chosen[0] ?? ""} onValue=${choose(0)} />
        <${Choice} label="Second cache" options=${[none, ...named]} value=${chosen[1] ?? ""} onValue=${choose(1)} />
      </div>
      <${Field} label="Question" as="textarea" rows="3" required value=${prompt} onValue=${setPrompt} onKeyDown=${onKeyDown} />
      <div class="inline">
        <${Field} label="Maximum tokens" type="number" min="1" max="4096" required value=${maxTokens} onValue=${setMaxTokens} />
        <${Choice} label="Read" options=${[["", "all entries"], ...(selectors ?? []).map(({ id }) => [id, id])]} value=${selector} onValue=${setSelector} />
        ${
          selector &&
          html`<${Field} label="Entries at most" type="number" min="1" placeholder="its default" value=${readTokens} onValue=${setReadTokens} />`
        }
        <button class="main" disabled=${chosen.length === 0}>Ask</button>
        <span class="hint">Or press Ctrl+Enter.</span>
      </div>
      <${FailureNote} failure=${failure} />
    </form>
    <div class="answers">
      ${(asked?.ids ?? []).map(
        (side, at) => html`<${Answer} key=${`${asked.number} ${at}`} asked=${asked} side=${side} known=${known} />`,
      )}
    </div>
  `;
}

function nameOf(side, known) {
  const ids = idsOf(side);
  if (ids.length > 1) return `${ids.length} documents together`;
  return known.has(side) ? summary(known.get(side)) : side;
}

/** The caches that the address names, then the newest caches. */
async function choices(sides, signal) {
  const ids = [...new Set(sides.filter(Boolean).flatMap(idsOf))];
  const [page, ...named] = await Promise.all([
    listCaches({ limit: RECENT }, { signal }),
    ...ids.map((id) => getCache(id, { signal })),
  ]);
  const there = new Set(named.map((cache) => cache.id));
  return [...named, ...page.data.filter((cache) => !there.has(cache.id))];
}

function Answer({ asked, side, known }) {
  const { text, answer, failure, firstMs, stop } = useAnswer(asked, idsOf(side));
  const name = nameOf(side, known);
  const state = failure ? "failed" : answer ? `ended: ${answer.finish_reason}` : "answering …";
  return html`<section class="card answer" aria-label=${`Answer of ${name}`} aria-busy=${!answer && !failure}>
    <h2>${name}</h2>
    <p class="text">${text}</p>
    <${FailureNote} failure=${failure} />
    ${answer?.sources && html`<${Sources} sources=${answer.sources} known=${known} />`}
    <${Facts} facts=${{
      State: state,
      "First token": firstMs === null ? "…" : milliseconds(firstMs),
      Load: answer ? milliseconds(answer.load_ms) : "…",
      "Document tokens": answer ? count(answer.usage.cache_read_tokens) : "…",
      "Entries read": answer ? count(answer.usage.read_tokens) : "…",
      "Tokens prefilled": answer ? count(answer.usage.prefill_tokens) : "…",
      "Tokens written": answer ? count(answer.usage.completion_tokens) : "…",
    }} />
    <p class="links">
      <button disabled=${answer || failure} onClick=${stop}>Stop</button>
      ${idsOf(side).length === 1 && html`<a class="button" href=${`#talk/${side}`}>Conversation</a>`}
    </p>
    ${answer?.passages && html`<${Passages} passages=${answer.passages} name=${(id) => nameOf(id, known)} />`}
    <${Announce} text=${answer ? `Answer: ${answer.text}` : ""} />
  </section>`;
}

/** The documents of an answer and the part that each had in it, the largest first. */
function Sources({ sources, known }) {
  return html`<ol class="sources" aria-label="Sources">
    ${sources
      .toSorted((one, two) => two.share - one.share)
      .map(({ cache_id: id, share }) => {
        const name = known.has(id) ? title(known.get(id)) : id;
        return html`<li key=${id}><a href=${`#shelf/${id}`}>${name}</a> <span>${percent(share)}</span></li>`;
      })}
  </ol>`;
}

/** One streamed answer to `asked.body`: its text so far, the complete answer at the end, and the browser's time to its first piece. */
export function useAnswer(asked, ids) {
  const [told, setTold] = useState({ text: "", answer: null, failure: null, firstMs: null });
  const stop = useRef(null);
  useEffect(() => {
    stop.current = new AbortController();
    const { signal } = stop.current;
    const tell = (fields) => setTold((before) => ({ ...before, ...fields }));
    const run = async () => {
      const started = performance.now();
      let text = "";
      let firstMs = null;
      for await (const event of ask(ids, asked.body, { signal })) {
        signal.throwIfAborted(); // events that have arrived before Stop are not shown after it
        firstMs ??= performance.now() - started;
        if (event.object === "answer.delta") text += event.text;
        tell(event.object === "answer.delta" ? { text, firstMs } : { text: event.text, answer: event, firstMs });
      }
    };
    run().catch((failure) =>
      tell({ failure: failure.name === "AbortError" ? { message: "It was stopped.", code: "stopped" } : failure }),
    );
    return () => stop.current.abort();
  }, []);
  return { ...told, stop: () => stop.current.abort() };
}
