/** Uploads and creations. They continue while another view is open. */

import { createInBackground, getRequest } from "./api.js";

const AT_ONCE = 2; // a browser has six connections per host, and each waiting job uses one
const WAIT_S = 20;
const AGAIN_MS = 2000;

/** Whether a retry may succeed: the service is down, busy or restarting. */
const mayPass = ({ code, status }) => code === "connection_failed" || status === 429 || status >= 500;

const pause = (signal) =>
  new Promise((resolve) => {
    setTimeout(resolve, AGAIN_MS);
    signal.addEventListener("abort", resolve, { once: true });
  });

/** The request's body: an object for a text; for a file a form, with text as text and all other fields as JSON. */
export function bodyOf({ document, fields }) {
  if (typeof document === "string") return { document, ...fields };
  const form = new FormData();
  for (const [name, value] of Object.entries({ name: document.name, ...fields })) {
    form.append(name, typeof value === "string" ? value : JSON.stringify(value));
  }
  form.append("file", document);
  return form;
}

/**
 * The jobs of this tab, newest first. A "changed" event follows each change. A job is `{key, name, document, fields,
 * state, share, failure, requestState, cacheId, startedAt, endedAt}`; its state is waiting, uploading, working, done,
 * failed or stopped.
 */
export class Jobs extends EventTarget {
  list = [];
  #next = 1;

  /** Put a document on the shelf. `document`: a File or a text; `fields`: the other fields of the request. */
  add(document, fields) {
    const name = fields.name || document.name || `${document.trim().slice(0, 40)} …`;
    const job = { key: this.#next, name, document, fields, state: "waiting", share: 0, stop: new AbortController() };
    this.#next += 1;
    this.list = [job, ...this.list];
    this.#begin();
    this.#tell();
  }

  /** Stop waiting. The service completes what it has received. */
  stop(key) {
    const job = this.list.find((each) => each.key === key);
    if (job.state === "waiting") this.#change(job, { state: "stopped", endedAt: Date.now() });
    job.stop.abort();
  }

  /** Forget the jobs that have ended. */
  clear() {
    this.list = this.list.filter((job) => ["waiting", "uploading", "working"].includes(job.state));
    this.#tell();
  }

  #begin() {
    const active = this.list.filter((job) => ["uploading", "working"].includes(job.state)).length;
    const waiting = this.list.filter((job) => job.state === "waiting").reverse(); // the oldest first
    for (const job of waiting.slice(0, Math.max(0, AT_ONCE - active))) this.#run(job);
  }

  async #run(job) {
    this.#change(job, { state: "uploading", startedAt: Date.now() });
    try {
      const onProgress = (share) => this.#change(job, { share });
      const request = await createInBackground(bodyOf(job), { onProgress, signal: job.stop.signal });
      this.#change(job, { state: "working", share: null, requestState: request.state });
      await this.#await(job, request.id);
    } catch (failure) {
      const state = failure.name === "AbortError" ? "stopped" : "failed";
      this.#change(job, { state, failure: state === "failed" ? failure : undefined });
    }
    this.#change(job, { endedAt: Date.now() });
    this.#begin();
  }

  async #await(job, id) {
    for (let waitS = 0; ; waitS = WAIT_S) {
      const request = await this.#ask(job, id, waitS);
      this.#change(job, { requestState: request.state, failure: undefined });
      if (request.state === "done") return this.#change(job, { state: "done", cacheId: request.cache_id });
      if (request.state === "failed") return this.#change(job, { state: "failed", failure: request.error });
    }
  }

  /** The service continues the work while it cannot be reached, so a failed poll does not end the job. */
  async #ask(job, id, waitS) {
    const { signal } = job.stop;
    for (;;) {
      try {
        return await getRequest(id, waitS, { signal });
      } catch (failure) {
        if (!mayPass(failure)) throw failure;
        this.#change(job, { failure });
        await pause(signal);
      }
    }
  }

  #change(job, fields) {
    Object.assign(job, fields);
    this.#tell();
  }

  #tell() {
    this.dispatchEvent(new Event("changed"));
  }
}
