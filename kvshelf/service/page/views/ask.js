/** Ask one cache, or two side by side; answers are shown as they are generated. */

import { ask, getCache, listCaches } from "../api.js";
import { html } from "../dom.js";
import { Choice, Field } from "../fields.js";
import { count, milliseconds, summary } from "../format.js";
import { Announce, Facts, FailureNote, useLoaded } from "../parts.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { Begin } from "./begin.js";

const RECENT = 100;

export function AskView({ ids }) {
  const [prompt, setPrompt] = useState("");
  const [maxTokens, setMaxTokens] = useState("64");
  const [asked, setAsked] = useState(null);
  const [recent, failure] = useLoaded((signal) => choices(ids, signal), [ids.join()]);
  const chosen = ids.length ? ids : (recent?.slice(0, 1).map((cache) => cache.id) ?? []);

  const named = (recent ?? []).map((cache) => [cache.id, summary(cache)]);
  const none = ["", recent === null ? "…" : "none"];

  const choose = (at) => (id) => {
    const next = [...chosen];
    next[at] = id;
    location.hash = `ask/${next.filter(Boolean).join("/")}`;
  };
  const submit = (event) => {
    event.preventDefault();
    setAsked({ number: (asked?.number ?? 0) + 1, ids: chosen, prompt, maxTokens: Number(maxTokens) });
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
        <button class="main" disabled=${chosen.length === 0}>Ask</button>
        <span class="hint">Or press Ctrl+Enter.</span>
      </div>
      <${FailureNote} failure=${failure} />
    </form>
    <div class="answers">
      ${(asked?.ids ?? []).map((id, at) => {
        const cache = recent?.find((each) => each.id === id);
        return html`<${Answer} key=${`${asked.number} ${at}`} asked=${asked} id=${id} name=${cache ? summary(cache) : id} />`;
      })}
    </div>
  `;
}

/** The caches that the address names, then the newest caches. */
async function choices(ids, signal) {
  const [page, ...named] = await Promise.all([
    listCaches({ limit: RECENT }, { signal }),
    ...ids.map((id) => getCache(id, { signal })),
  ]);
  const there = new Set(named.map((cache) => cache.id));
  return [...named, ...page.data.filter((cache) => !there.has(cache.id))];
}

function Answer({ asked, id, name }) {
  const { text, answer, failure, firstMs, stop } = useAnswer(asked, id);
  const state = failure ? "failed" : answer ? `ended: ${answer.finish_reason}` : "answering …";
  return html`<section class="card answer" aria-label=${`Answer of ${name}`} aria-busy=${!answer && !failure}>
    <h2>${name}</h2>
    <p class="text">${text}</p>
    <${FailureNote} failure=${failure} />
    <${Facts} facts=${{
      State: state,
      "First token": firstMs === null ? "…" : milliseconds(firstMs),
      Load: answer ? milliseconds(answer.load_ms) : "…",
      "Tokens read": answer ? count(answer.usage.cache_read_tokens) : "…",
      "Tokens prefilled": answer ? count(answer.usage.prefill_tokens) : "…",
      "Tokens written": answer ? count(answer.usage.completion_tokens) : "…",
    }} />
    <button disabled=${answer || failure} onClick=${stop}>Stop</button>
    <${Announce} text=${answer ? `Answer: ${answer.text}` : ""} />
  </section>`;
}

/** One streamed answer: its text so far, the complete answer at the end, and the browser's time to its first piece. */
function useAnswer(asked, id) {
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
      for await (const event of ask(id, { prompt: asked.prompt, max_tokens: asked.maxTokens }, { signal })) {
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
