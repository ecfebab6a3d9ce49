/** Put documents on the shelf: by drag and drop, by choosing files, by pasting text. */

import { listModels, listPolicies } from "../api.js";
import { html } from "../dom.js";
import { milliseconds, parseLabels, percent } from "../format.js";
import { Announce, FailureNote, Progress, useLoaded } from "../parts.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";

const CODECS = { none: "as the model computes them", int8: "8 bits a number", int4: "4 bits", int2: "2 bits", mixed: "8 bits for the important, 2 for the rest" };
const SPANS = { "": "for ever", 3600: "an hour", 86400: "a day", 604800: "a week", 2592000: "30 days" };
const DEFAULTS = { model: "", policy: "keydiff", ratio: "0.5", codec: "none", ttl: "", name: "", labels: "", questions: "", source: true };
const NAMES = { waiting: "waits for its turn", uploading: "is sent", working: "is compressed", done: "is on the shelf", failed: "failed", stopped: "was stopped" };

export function PutView({ jobs }) {
  const [options, setOptions] = useState(DEFAULTS);
  const [text, setText] = useState("");
  const [failure, setFailure] = useState(null);
  const [policies, policyFailure] = useLoaded(listPolicies, []);
  const policy = policies?.find((each) => each.id === options.policy);

  const put = (name, document) => {
    setFailure(null);
    try {
      const fields = fieldsOf(options, policy);
      const body = typeof document === "string" ? { document, ...fields } : formOf(document, fields);
      jobs.add(options.name || name, body);
      return true;
    } catch (error) {
      setFailure(error);
      return false;
    }
  };
  const putFiles = (files) => [...files].forEach((file) => put(file.name, file));
  const putText = (event) => {
    event.preventDefault();
    if (put(`${text.trim().slice(0, 40)} …`, text)) setText("");
  };
  return html`
    <div class="split even">
      <section class="card" aria-label="Document">
        <${DropZone} onFiles=${putFiles} />
        <form onSubmit=${putText}>
          <label>Or paste its text <textarea rows="6" required value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label>
          <button class="main">Put the text on the shelf</button>
        </form>
        <${FailureNote} failure=${failure ?? policyFailure} />
      </section>
      <${Options} options=${options} onChange=${setOptions} policies=${policies ?? []} policy=${policy} />
    </div>
    <${JobList} jobs=${jobs} />
  `;
}

/** The fields of a creation. Throws what is wrong with them. */
function fieldsOf(options, policy) {
  const fields = { policy: options.policy, codec: options.codec, keep_source: options.source };
  if (policy?.takes_budget !== false) fields.compression_ratio = Number(options.ratio);
  if (policy?.takes_questions && options.questions.trim()) {
    fields.expected_questions = options.questions.split("\n").map((line) => line.trim()).filter(Boolean);
  }
  if (options.model) fields.model = options.model;
  if (options.ttl) fields.ttl_s = Number(options.ttl);
  if (options.name) fields.name = options.name;
  if (options.labels.trim()) fields.labels = parseLabels(options.labels);
  return fields;
}

/** A multipart body: the file as it is, text as text, all other fields as JSON. */
function formOf(file, fields) {
  const form = new FormData();
  const named = { name: file.name, ...fields };
  for (const [name, value] of Object.entries(named)) form.append(name, typeof value === "string" ? value : JSON.stringify(value));
  form.append("file", file);
  return form;
}

function DropZone({ onFiles }) {
  const [over, setOver] = useState(false);
  const input = useRef();
  const take = (event, files) => {
    if (!files?.length) return;
    event.preventDefault();
    onFiles(files);
  };
  useEffect(() => {
    const paste = (event) => take(event, event.clipboardData.files);
    addEventListener("paste", paste);
    return () => removeEventListener("paste", paste);
  });
  return html`<div
    class=${over ? "drop over" : "drop"}
    onDragOver=${(event) => (event.preventDefault(), setOver(true))} onDragLeave=${() => setOver(false)}
    onDrop=${(event) => (event.preventDefault(), setOver(false), take(event, event.dataTransfer.files))}
  >
    <p>Drop files here, or paste them</p>
    <label>Choose files <input ref=${input} type="file" multiple onChange=${(event) => (take(event, event.target.files), (input.current.value = ""))} /></label>
  </div>`;
}

function Options({ options, onChange, policies, policy }) {
  const [models] = useLoaded(listModels, []);
  const set = (name) => (event) => onChange({ ...options, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const choice = (name, label, values) => html`<label>${label}
    <select value=${options[name]} onChange=${set(name)}>
      ${values.map(([value, told]) => html`<option key=${value} value=${value}>${told}</option>`)}
    </select>
  </label>`;
  return html`<form class="card" aria-label="How it is kept" onSubmit=${(event) => event.preventDefault()}>
    ${models?.length > 1 && choice("model", "Model", models.map(({ id }) => [id, id]))}
    ${choice("policy", "Policy", (policies.length ? policies : [{ id: options.policy }]).map(({ id }) => [id, id]))}
    <p class="hint about">${policy ? `${policy.summary} ${policy.advice && `Good ${policy.advice}`}` : "…"}</p>
    <label>Removed: ${policy?.takes_budget === false ? "nothing" : percent(Number(options.ratio))}
      <input type="range" min="0" max="0.98" step="0.01" value=${options.ratio} onInput=${set("ratio")} disabled=${policy?.takes_budget === false} />
    </label>
    ${choice("codec", "Keys and values", Object.entries(CODECS).map(([id, told]) => [id, `${id}: ${told}`]))}
    ${choice("ttl", "Kept", Object.entries(SPANS))}
    <label>Name <input maxlength="256" placeholder="the file's" value=${options.name} onInput=${set("name")} /></label>
    <label>Labels, one name=value a line <textarea rows="2" value=${options.labels} onInput=${set("labels")}></textarea></label>
    ${policy?.takes_questions && html`<label>Expected questions, one a line <textarea rows="2" value=${options.questions} onInput=${set("questions")}></textarea></label>`}
    <label class="check"><input type="checkbox" checked=${options.source} onChange=${set("source")} /> Keep the text beside the cache</label>
    <p class="hint">The kept text shows which tokens stayed, and makes the cache again if it is lost.</p>
  </form>`;
}

function JobList({ jobs }) {
  const [list, setList] = useState(jobs.list);
  useEffect(() => {
    const changed = () => setList([...jobs.list]);
    jobs.addEventListener("changed", changed);
    return () => jobs.removeEventListener("changed", changed);
  }, [jobs]);
  const last = list.find((job) => job.endedAt);
  return html`<section aria-label="On their way">
    <h2>On their way ${list.some((job) => job.endedAt) && html`<button onClick=${() => jobs.clear()}>Clear</button>`}</h2>
    ${list.length === 0 && html`<p class="hint">Nothing yet.</p>`}
    <ul class="jobs">${list.map((job) => html`<${JobRow} key=${job.key} job=${{ ...job }} onStop=${() => jobs.stop(job.key)} />`)}</ul>
    <${Announce} text=${last ? `${last.name} ${NAMES[last.state]}` : ""} />
  </section>`;
}

function JobRow({ job, onStop }) {
  const told = job.state === "working" && job.requestState === "queued" ? "waits for the model" : NAMES[job.state];
  const share = { done: 1, failed: 0, stopped: 0, working: null }[job.state];
  return html`<li class=${`card job ${job.state}`}>
    <strong>${job.name}</strong>
    <span>${told}${job.state === "uploading" && `, ${percent(job.share)}`}${job.endedAt && job.startedAt && ` (${milliseconds(job.endedAt - job.startedAt)})`}</span>
    <${Progress} share=${share === undefined ? job.share : share} label=${`Progress of ${job.name}`} />
    <span class="links">
      ${job.cacheId && html`<a href=${`#shelf/${job.cacheId}`}>Show</a> <a href=${`#ask/${job.cacheId}`}>Ask</a> <a href=${`#kept/${job.cacheId}`}>Kept tokens</a>`}
      ${!job.endedAt && html`<button onClick=${onStop}>Stop</button>`}
    </span>
    <${FailureNote} failure=${job.failure} />
  </li>`;
}
