/** A conversation: the caches that one grew from, the next question behind it, and files that are appended to it. */

import { getCache, listTurns } from "../api.js";
import { html } from "../dom.js";
import { Field } from "../fields.js";
import { Announce, FailureNote, useLoaded } from "../parts.js";
import { useEffect, useLayoutEffect, useRef, useState } from "../vendor/hooks.js";
import { Append } from "./append.js";
import { useAnswer } from "./ask.js";
import { CachePicker } from "./picker.js";
import { Bubble, Figures, Turns } from "./turns.js";

export function TalkView({ ids: [id], answered }) {
  if (!id) return html`<p>Choose a cache to talk about its document.</p><${CachePicker} view="talk" />`;
  return html`<${Conversation} id=${id} answered=${answered} />`;
}

const show = (id) => {
  location.hash = `talk/${id}`; // an entry of the history: Back leads to the turn before
};

/** `answered`: the figures of the turns that this tab has asked, by the ids of their caches. */
function Conversation({ id, answered }) {
  const [chain, failure] = useChain(id);
  const [asked, setAsked] = useState(null); // {number, id, body, ended}
  const [appending, setAppending] = useState(false);
  const [prompt, setPrompt] = useState("");
  const [said, setSaid] = useState("");
  const form = useRef();
  const current = chain?.cache.id;
  useEffect(() => setAsked(null), [current]); // Back does not ask again
  useLayoutEffect(() => form.current?.scrollIntoView({ block: "nearest" }), [current, asked?.number]);

  if (failure) return html`<${FailureNote} failure=${failure} />`;
  if (!chain) return html`<p class="hint">Loading …</p>`;
  const pending = asked?.id === current ? asked : null;
  const asking = pending !== null && !pending.ended;
  const ask = (maxTokens) => {
    const body = { prompt, max_tokens: maxTokens, store: true };
    setAsked({ number: (asked?.number ?? 0) + 1, id: current, body, ended: false });
    setPrompt("");
  };
  const end = (answer, firstMs) => {
    setSaid(answer ? `Answer: ${answer.text}` : "");
    const next = answer?.stored_cache_id;
    if (next) {
      answered.set(next, { usage: answer.usage, firstMs });
      show(next);
    } else {
      setAsked({ ...asked, ended: true });
      setPrompt((before) => before || asked.body.prompt); // to be asked again
    }
  };
  return html`
    <div class="split">
      <section class="card" aria-label="Conversation">
        <${Turns} turns=${chain.turns} answered=${answered}>
          ${pending && html`<${Asking} key=${pending.number} asked=${pending} onEnded=${end} />`}
        <//>
        <div ref=${form}>
          <${Question} prompt=${prompt} onPrompt=${setPrompt} busy=${asking || appending} onAsk=${ask} />
        </div>
      </section>
      <aside class="card" aria-label="Append to the document">
        <${Append} ...${chain} busy=${asking} onBusy=${setAppending} onAppended=${show} />
      </aside>
    </div>
    <${Announce} text=${said} />
  `;
}

/** A cache and its turns. Until those of another one are there, the ones before stay: what is read does not jump. */
function useChain(id) {
  const load = async (signal) => {
    const [turns, cache] = await Promise.all([listTurns(id, { signal }), getCache(id, { signal })]);
    return { turns, cache };
  };
  const [loaded, failure] = useLoaded(load, [id]);
  const last = useRef(null);
  last.current = loaded ?? last.current;
  return [last.current, failure];
}

/** `onAsk` gets the most tokens of the answer. */
function Question({ prompt, onPrompt, busy, onAsk }) {
  const [maxTokens, setMaxTokens] = useState("256");
  const submit = (event) => {
    event.preventDefault();
    if (!busy) onAsk(Number(maxTokens)); // the keys work while the button does not
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
  };
  return html`<form onSubmit=${submit} aria-label="The next turn">
    <${Field} label="Question" as="textarea" rows="3" required value=${prompt} onValue=${onPrompt} onKeyDown=${onKeyDown} />
    <div class="inline">
      <${Field} label="Maximum tokens" type="number" min="1" max="4096" required value=${maxTokens} onValue=${setMaxTokens} />
      <button class="main" disabled=${busy}>Ask</button>
      <span class="hint">Or press Ctrl+Enter.</span>
    </div>
  </form>`;
}

/** A question whose answer is being written, or was not kept. `onEnded` gets the answer, if there is one, and the time to its first piece. */
function Asking({ asked, onEnded }) {
  const { text, answer, failure, firstMs, stop } = useAnswer(asked, [asked.id]);
  const ended = answer !== null || failure !== null;
  const notKept = answer?.not_stored && {
    message: `This turn is not part of the conversation: ${answer.not_stored}.`,
    code: "not_stored",
  };
  useEffect(() => {
    if (ended) onEnded(answer, firstMs);
  }, [ended]);
  return html`<li class="turn" aria-busy=${!ended}>
    <${Bubble} role="user" content=${asked.body.prompt} />
    <${Bubble} role="assistant" content=${text} />
    ${answer && html`<p class="hint"><${Figures} usage=${answer.usage} firstMs=${firstMs} /></p>`}
    <${FailureNote} failure=${failure ?? notKept} />
    ${!ended && html`<button onClick=${stop}>Stop</button>`}
  </li>`;
}
