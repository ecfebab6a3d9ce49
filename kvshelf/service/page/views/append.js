/** Files that are appended to a cache: each makes a new cache, behind the one before. */

import { appendTo, Failure, listPolicies } from "../api.js";
import { html } from "../dom.js";
import { Choice, Field } from "../fields.js";
import { bodyOf } from "../jobs.js";
import { FailureNote, Progress, useLoaded } from "../parts.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { DropZone } from "./drop-zone.js";

const EXTRACTED = ["application/pdf", "application/x-pdf", "text/html", "application/xhtml+xml"];

/** `busy`: nothing can be appended now. `onBusy` is told of the work, `onAppended` the id of the last new cache. */
export function Append({ cache, turns, busy, onBusy, onAppended }) {
  const [policy, setPolicy] = useState("");
  const [ratio, setRatio] = useState("");
  const [sending, setSending] = useState(null); // {name, share}
  const [failure, setFailure] = useState(null);
  const [policies] = useLoaded(listPolicies, []);
  const stop = useRef(null);
  const leave = () => {
    stop.current?.abort();
    stop.current = null;
  };
  useEffect(() => leave, [cache.id]);

  const ids = (policies ?? []).map(({ id }) => [id, id]);
  const takesBudget = policies?.find(({ id }) => id === (policy || cache.policy))?.takes_budget ?? true;
  const usual = policy ? "default" : cache.compression_ratio;
  const fields = { ...(policy && { policy }), ...(ratio && takesBudget && { compression_ratio: Number(ratio) }) };
  const append = async (files) => {
    if (busy || sending) return setFailure({ message: "Wait until the work before has ended.", code: "busy" });
    const own = new AbortController();
    stop.current = own;
    const { signal } = own;
    let { id } = cache;
    setFailure(null);
    onBusy(true);
    try {
      for (const file of files) {
        const onProgress = (share) => setSending({ name: file.name, share });
        onProgress(0);
        const body = endsWithTurn(cache, turns) ? await asMessage(file, fields) : bodyOf({ document: file, fields });
        ({ id } = await appendTo(id, body, { onProgress, signal }));
      }
    } catch (error) {
      setFailure(error.name === "AbortError" ? { message: "It was stopped.", code: "stopped" } : error);
    }
    setSending(null);
    onBusy(false);
    if (stop.current === own && id !== cache.id) onAppended(id); // else another turn has been chosen meanwhile
    return undefined;
  };
  return html`
    <h2>Append</h2>
    <${DropZone} disabled=${busy || sending} onFiles=${append}>
      ${sending && html`<${Sending} ...${sending} onStop=${() => stop.current.abort()} />`}
    <//>
    <${FailureNote} failure=${failure} />
    <p class="hint">Each file is read behind this cache and makes a new one, to which the conversation moves.</p>
    <${Choice} label="Policy" options=${[["", `the cache's: ${cache.policy}`], ...ids]} value=${policy} onValue=${setPolicy} />
    <${Field}
      label="Share removed" type="number" min="0" max="0.98" step="0.01" disabled=${!takesBudget} placeholder=${usual}
      value=${ratio} onValue=${setRatio}
    />
  `;
}

function Sending({ name, share, onStop }) {
  return html`
    <p role="status">${share < 1 ? `${name} is being sent` : `${name} is being compressed`}</p>
    <${Progress} share=${share < 1 ? share : null} label=${`Progress of ${name}`} />
    <button type="button" onClick=${onStop}>Stop</button>
  `;
}

/** Whether the chat template has closed a turn at the end of a cache, so that more of a document cannot go on there. */
const endsWithTurn = (cache, turns) => cache.layout === "chat" && turns.some(({ messages }) => messages);

/** The text of a file as a message of the user. The service extracts text only where a document goes on. */
async function asMessage(file, fields) {
  if (EXTRACTED.includes(file.type)) {
    const told = `behind an answer only a text can be appended; append ${file.name} before the first question`;
    throw new Failure(told, "not_a_text");
  }
  try {
    const content = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return { name: file.name, messages: [{ role: "user", content }], ...fields };
  } catch {
    throw new Failure(`${file.name} is no text in UTF-8, and behind an answer nothing else can be appended`, "not_a_text");
  }
}
