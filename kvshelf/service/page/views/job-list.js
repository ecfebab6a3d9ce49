/** The uploads and creations of this tab, with their progress. */

import { html } from "../dom.js";
import { milliseconds, percent } from "../format.js";
import { Announce, FailureNote, Progress } from "../parts.js";
import { useEffect, useState } from "../vendor/hooks.js";

const STATES = {
  waiting: "waits to be sent",
  uploading: "is being sent",
  working: "is being compressed",
  done: "is on the shelf",
  failed: "failed",
  stopped: "was stopped",
};

export function JobList({ jobs }) {
  const [list, setList] = useState(jobs.list);
  useEffect(() => {
    const changed = () => setList([...jobs.list]);
    jobs.addEventListener("changed", changed);
    return () => jobs.removeEventListener("changed", changed);
  }, [jobs]);
  const last = list.find((job) => job.endedAt);
  return html`<section aria-label="Uploads and creations">
    <h2>Uploads and creations ${last && html`<button onClick=${() => jobs.clear()}>Clear</button>`}</h2>
    ${list.length === 0 && html`<p class="hint">Nothing yet.</p>`}
    <ul class="jobs">
      ${list.map((job) => html`<${JobRow} key=${job.key} job=${job} onStop=${() => jobs.stop(job.key)} />`)}
    </ul>
    <${Announce} text=${last ? `${last.name} ${STATES[last.state]}` : ""} />
  </section>`;
}

function JobRow({ job, onStop }) {
  const share = { done: 1, failed: 0, stopped: 0, working: null }[job.state];
  return html`<li class=${`card job ${job.state}`}>
    <strong>${job.name}</strong>
    <span class="state">${told(job)}</span>
    <${Progress} share=${share === undefined ? job.share : share} label=${`Progress of ${job.name}`} />
    <span class="links">
      ${
        job.cacheId &&
        html`<a href=${`#shelf/${job.cacheId}`}>Show</a>
          <a href=${`#ask/${job.cacheId}`}>Ask</a>
          <a href=${`#kept/${job.cacheId}`}>Kept tokens</a>`
      }
      ${!job.endedAt && html`<button onClick=${onStop}>Stop</button>`}
    </span>
    <${FailureNote} failure=${job.failure} />
  </li>`;
}

function told(job) {
  if (job.state === "uploading") return `${STATES.uploading}, ${percent(job.share)}`;
  if (job.state === "working" && job.requestState === "queued") return "waits for the model";
  const took = job.startedAt && job.endedAt ? ` (${milliseconds(job.endedAt - job.startedAt)})` : "";
  return STATES[job.state] + took;
}
