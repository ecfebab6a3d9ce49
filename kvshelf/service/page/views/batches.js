/** Batches: a file of documents, one per line, that is compressed in the background. */

import {
  batchEvents,
  changeBatch,
  createBatch,
  getBatch,
  getFile,
  getLines,
  listBatches,
  listPolicies,
  uploadFile,
} from "../api.js";
import { html } from "../dom.js";
import { Check, Choice, Field } from "../fields.js";
import { count, fromNow, moment, size } from "../format.js";
import { Announce, Facts, FailureNote, Progress, useLoaded } from "../parts.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { CodecChoice, DEFAULTS } from "./put-options.js";

const FIRST_ROWS = 20; // failed rows that are shown; the file of errors has all
const FIRST_BYTES = 64 * 1024;

const ENDED = ["completed", "failed", "expired", "cancelled"];

/** The actions on a batch, by its state. */
const ACTIONS = {
  validating: { cancel: "Cancel" },
  in_progress: { pause: "Pause", cancel: "Cancel" },
  paused: { resume: "Resume", cancel: "Cancel" },
  completed: { retry: "Retry failed rows" },
  failed: { retry: "Retry" },
  expired: { retry: "Continue" },
  cancelled: { retry: "Continue" },
};

export function BatchesView({ ids: [id] }) {
  const [round, setRound] = useState(0); // each change increments it, which reloads the list
  const [page, failure] = useLoaded((signal) => listBatches({ limit: 50 }, { signal }), [round]);
  return html`
    <div class="split even">
      <div class="stack">
        <${NewBatch} onCreated=${(batch) => (setRound(round + 1), (location.hash = `batches/${batch.id}`))} />
        <${FailureNote} failure=${failure} />
        <section aria-label="All batches">
          <h2>All batches</h2>
          <ul class="picker">${(page?.data ?? []).map(
            (batch) => html`<li key=${batch.id}>
            <a href=${`#batches/${batch.id}`}>${moment(batch.created_at)}</a>: ${told(batch)}
          </li>`,
          )}</ul>
          ${page?.data.length === 0 && html`<p class="hint">There are no batches yet.</p>`}
        </section>
      </div>
      ${
        id
          ? html`<${BatchCard} key=${id} id=${id} onEnded=${() => setRound(round + 1)} />`
          : html`<section class="card"><p class="hint">Choose a batch to see its progress.</p></section>`
      }
    </div>
  `;
}

function told({ status, request_counts: counts }) {
  const rows = `${count(counts.completed)} of ${count(counts.total)} rows`;
  return `${status.replace("_", " ")}, ${rows}${counts.failed ? `, ${count(counts.failed)} failed` : ""}`;
}

function NewBatch({ onCreated }) {
  const [policies] = useLoaded(listPolicies, []);
  const [policy, setPolicy] = useState(DEFAULTS.policy);
  const [ratio, setRatio] = useState(DEFAULTS.ratio);
  const [codec, setCodec] = useState(DEFAULTS.codec);
  const [source, setSource] = useState(true);
  const [share, setShare] = useState(null);
  const [failure, setFailure] = useState(null);

  const submit = async (event) => {
    event.preventDefault();
    const [file] = event.target.elements.file.files;
    setFailure(null);
    setShare(0);
    try {
      const uploaded = await uploadFile(file, { onProgress: setShare, signal: new AbortController().signal });
      const takesBudget = policies?.find(({ id }) => id === policy)?.takes_budget !== false;
      const options = { policy, codec, ...(takesBudget && { compression_ratio: Number(ratio) }), keep_source: source };
      onCreated(await createBatch({ input_file_id: uploaded.id, endpoint: "/v1/caches", ...options }));
    } catch (error) {
      setFailure(error);
    }
    setShare(null);
  };
  return html`<form class="card" aria-label="New batch" onSubmit=${submit}>
    <label>
      File of documents, one per line
      <input type="file" name="file" required accept=".jsonl,application/jsonl" />
    </label>
    <p class="hint"><code>${'{"custom_id": "a", "document": "…"}'}</code></p>
    <div class="inline">
      <${Choice} label="Policy" options=${(policies ?? [{ id: policy }]).map(({ id }) => [id, id])} value=${policy} onValue=${setPolicy} />
      <${Field} label="Removed" type="number" min="0" max="0.99" step="0.01" required value=${ratio} onValue=${setRatio} />
      <${CodecChoice} value=${codec} onValue=${setCodec} />
    </div>
    <${Check} label="Store the texts with the caches" value=${source} onValue=${setSource} />
    <button class="main" disabled=${share !== null}>Begin the batch</button>
    ${share !== null && html`<${Progress} share=${share} label="Upload" />`}
    <${FailureNote} failure=${failure} />
  </form>`;
}

function BatchCard({ id, onEnded }) {
  const [round, setRound] = useState(0);
  const [batch, failure, setFailure] = useBatch(id, round);
  const ended = batch && ENDED.includes(batch.status);
  useEffect(() => {
    if (ended) onEnded();
  }, [ended]);

  const act = async (action) => {
    try {
      await changeBatch(id, action);
      setRound(round + 1); // follow the events again, because an ended batch may run again
    } catch (error) {
      setFailure(error);
    }
  };
  if (!batch)
    return html`<section class="card">
      <${FailureNote} failure=${failure} />
      ${!failure && html`<p class="hint">Loading …</p>`}
    </section>`;
  const saving = (file) => () => save(file).catch(setFailure);
  const { request_counts: counts, progress } = batch;
  const full_16bit = progress.bytes_full_16bit;
  const done = counts.completed + counts.failed;
  return html`<section class="card" aria-label="The chosen batch">
    <h2>${told(batch)}</h2>
    <${Progress} share=${counts.total ? done / counts.total : ended ? 1 : null} label="Progress of the batch" />
    <p class="links">
      ${Object.entries(ACTIONS[batch.status] ?? {}).map(
        ([action, label]) => html`<button key=${action} onClick=${() => act(action)}>${label}</button>`,
      )}
      ${batch.output_file_id && html`<button onClick=${saving(batch.output_file_id)}>Save the results</button>`}
      ${counts.completed < counts.total && batch.error_file_id && html`<button onClick=${saving(batch.error_file_id)}>Save the errors</button>`}
    </p>
    <${FailureNote} failure=${failure} />
    ${(batch.errors?.data ?? []).map((error, at) => html`<${FailureNote} key=${at} failure=${error} />`)}
    <${Facts} facts=${{
      Batch: html`<code>${batch.id}</code>`,
      Reason: progress.reason,
      Priority: batch.priority || null,
      Reused: counts.reused ? `${count(counts.reused)} were on the shelf` : null,
      Tokens: `${count(progress.tokens)}, ${count(Math.round(progress.tokens_per_s))} a second`,
      Size: full_16bit ? size({ stored: progress.bytes_stored, full: progress.bytes_full, full_16bit }) : null,
      "Time left": progress.eta_s === null || ended ? null : `about ${Math.ceil(progress.eta_s)} s`,
      Deadline: ended || !batch.expires_at ? null : `${fromNow(batch.expires_at)}; the batch then ends with the rows that are done`,
    }} />
    ${ended && counts.failed > 0 && batch.error_file_id && html`<${FailedRows} id=${batch.error_file_id} />`}
    <${Announce} text=${ended ? `The batch is ${batch.status}` : ""} />
  </section>`;
}

/** The first failed rows, by custom id or, without one, by line. */
function FailedRows({ id }) {
  const [rows, failure] = useLoaded((signal) => getLines(id, FIRST_BYTES, { signal }), [id]);
  return html`<${FailureNote} failure=${failure} />
    <ul class="picker" aria-label="Failed rows" tabindex="0">${(rows ?? []).slice(0, FIRST_ROWS).map(
      (row, at) => html`<li key=${at}><code>${row.custom_id ?? `line ${row.line}`}</code>: ${(row.error ?? row.response.body.error).message}</li>`,
    )}</ul>`;
}

/** The batch and its progress: [batch, failure, setFailure]. Follows its event stream until it ends. */
function useBatch(id, round) {
  const [batch, setBatch] = useState(null);
  const [failure, setFailure] = useState(null);
  useEffect(() => {
    const stop = new AbortController();
    const follow = async () => {
      setFailure(null);
      let last = await getBatch(id, { signal: stop.signal });
      setBatch(last);
      // A restart of the service ends the stream before the batch; the restarted service continues both.
      while (!ENDED.includes(last.status)) {
        for await (const event of batchEvents(id, { signal: stop.signal })) setBatch((last = event));
      }
    };
    follow().catch((error) => error.name === "AbortError" || setFailure(error));
    return () => stop.abort();
  }, [id, round]);
  return [batch, failure, setFailure];
}

/** Make the browser save a file. A plain link would not send the key. */
async function save(id) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await getFile(id));
  link.download = `${id}.jsonl`;
  link.click();
  URL.revokeObjectURL(link.href);
}
