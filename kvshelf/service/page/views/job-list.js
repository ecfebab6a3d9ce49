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

/** `onAgain` gets an ended job whose document is to be put again. */
export function JobList({ jobs, onAgain }) {
  const [list, setList] = useState(jobs.list);
  useEffect(() => {
    const changed = () => setList([...jobs.list]);
    jobs.addEventListener("changed", changed);
    return () => jobs.removeEventListener("changed", changed);
  }, [jobs]);
  const now = useSeconds(list.some((job) => job.state === "working"));
  const last = list.find((job) => job.endedAt);
  return html`<section aria-label="Uploads and creations">
    <ul class="jobs">
      ${list.map(
        (job) => html`<${JobRow}
        key=${job.key} job=${job} now=${now} onStop=${() => jobs.stop(job.key)} onAgain=${() => onAgain(job)}
      />`,
      )}
    </ul>
    ${last && html`<button type="button" class="quiet" onClick=${() => jobs.clear()}>Clear what has ended</button>`}
    <${Announce} text=${last ? `${last.name} ${STATES[last.state]}` : ""} />
  </section>`;
}

/** The time in milliseconds, every second while `running`. */
function useSeconds(running) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = running && setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [running]);
  return now;
}

function JobRow({ job, now, onStop, onAgain }) {
  const share = { done: 1, failed: 0, stopped: 0, working: null }[job.state];
  return html`<li class=${`card job ${job.state}`}>
    <strong>${job.name}</strong>
    <span class="state">${told(job, now)}</span>
    <${Progress} share=${share === undefined ? job.share : share} label=${`Progress of ${job.name}`} />
    <span class="links">
      ${
        job.cacheId &&
        html`<a href=${`#shelf/${job.cacheId}`}>Show</a>
          <a href=${`#ask/${job.cacheId}`}>Ask</a>
          <a href=${`#kept/${job.cacheId}`}>Kept tokens</a>`
      }
      ${
        job.endedAt
          ? html`<button type="button" onClick=${onAgain}>Choose again</button>`
          : html`<button type="button" onClick=${onStop}>Stop</button>`
      }
    </span>
    <${FailureNote} failure=${job.failure} />
  </li>`;
}

function told(job, now) {
  if (job.state === "uploading") return `${STATES.uploading}, ${percent(job.share)}`;
  if (job.state === "working") {
    const seconds = Math.max(0, Math.round((now - job.startedAt) / 1000));
    return `${job.requestState === "queued" ? "waits for the model" : STATES.working}, ${seconds} s`;
  }
  const took = job.startedAt && job.endedAt ? ` (${milliseconds(job.endedAt - job.startedAt)})` : "";
  return STATES[job.state] + took;
}
