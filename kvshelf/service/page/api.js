/** The HTTP API as this page uses it. Every error is a `Failure` with the service's message. */

const KEY = "kvshelf.key";

export class Failure extends Error {
  /** `code`: the service's error code, or connection_failed. `requestId`: the request's id in the service's log. */
  constructor(message, code, { status = 0, requestId = "", missReason = null, details = null } = {}) {
    super(message);
    Object.assign(this, { code, status, requestId, missReason, details });
  }
}

/** The API key. The tab keeps it until it closes, and sends it only in a header. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

/** Dispatches `refused` with the failure when the service asks for a key or refuses the given one. */
export const access = new EventTarget();

function authorization() {
  const key = apiKey.get();
  return key ? { authorization: `Bearer ${key}` } : {};
}

function failureOf(status, text, requestId) {
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // The answer comes from a proxy, not from the service.
  }
  const failure = new Failure(error.message ?? `the answer has the status ${status}`, error.code ?? `http_${status}`, {
    status,
    requestId: requestId ?? "",
    missReason: error.miss_reason ?? null,
    details: error.details ?? null,
  });
  if (status === 401) access.dispatchEvent(new CustomEvent("refused", { detail: failure }));
  return failure;
}

const unreachable = () => new Failure("the service cannot be reached, or the connection broke", "connection_failed");

async function send(method, path, { json, headers = {}, signal } = {}) {
  const body = json === undefined ? undefined : JSON.stringify(json);
  const type = json === undefined ? {} : { "content-type": "application/json" };
  let response;
  try {
    response = await fetch(path, { method, body, headers: { ...authorization(), ...type, ...headers }, signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : unreachable();
  }
  if (response.ok) return response;
  throw failureOf(response.status, await response.text(), response.headers.get("x-request-id"));
}

const get = async (path, options) => (await send("GET", path, options)).json();

/** A path with a query string of the parameters that have a value. */
function withQuery(path, query) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

const ofCache = (id, rest = "") => `v1/caches/${encodeURIComponent(id)}${rest}`;

export const listCaches = (query, options) => get(withQuery("v1/caches", query), options);
export const getCache = (id, options) => get(ofCache(id), options);
export const updateCache = async (id, json) => (await send("PATCH", ofCache(id), { json })).json();
/** `query`: `cascade` also deletes what was appended to it. */
export const deleteCache = async (id, query = {}) => (await send("DELETE", withQuery(ofCache(id), query))).json();
/** The caches that one grew from, the first document first and itself last, each with what it appended. */
export const listTurns = async (id, options) => (await get(ofCache(id, "/turns"), options)).data;
export const listPolicies = async () => (await get("v1/policies")).data;
export const listSelectors = async () => (await get("v1/selectors")).data;
export const listModels = async () => (await get("v1/models")).data;
export const getRequest = (id, waitS, options) =>
  get(withQuery(`v1/requests/${encodeURIComponent(id)}`, { wait_s: waitS }), options);

/** The tokens that a cache kept; `document` is its text, if the service does not store it. */
export async function keptTokens(id, document, firstLayer, options) {
  const path = withQuery(ofCache(id, "/kept"), { first_layer: firstLayer });
  if (document === null) return get(path, options);
  return (await send("POST", path, { json: { document }, ...options })).json();
}

const ofBatch = (id, rest = "") => `v1/batches/${encodeURIComponent(id)}${rest}`;

export const listBatches = (query, options) => get(withQuery("v1/batches", query), options);
export const getBatch = (id, options) => get(ofBatch(id), options);
export const createBatch = async (json) => (await send("POST", "v1/batches", { json })).json();
/** `action`: cancel, pause, resume or retry. */
export const changeBatch = async (id, action) => (await send("POST", ofBatch(id, `/${action}`))).json();
const ofFile = (id) => `v1/files/${encodeURIComponent(id)}/content`;
export const getFile = async (id) => (await send("GET", ofFile(id))).blob();

/** The first whole lines of a file of JSON lines, as objects: those within its first `most` bytes. */
export async function getLines(id, most, options) {
  const response = await send("GET", ofFile(id), { ...options, headers: { range: `bytes=0-${most - 1}` } });
  const text = await response.text();
  return text
    .slice(0, text.lastIndexOf("\n") + 1)
    .split("\n")
    .filter(Boolean)
    .map((line) => JSON.parse(line));
}

/** The batch after each change, until it ends. */
export const batchEvents = (id, options) => streamed("GET", ofBatch(id, "/events"), options);

/** The events of a streamed answer of one cache, or of several together, as objects. */
export const ask = (ids, question, options) =>
  ids.length === 1
    ? streamed("POST", ofCache(ids[0], "/query"), { json: { ...question, stream: true }, ...options })
    : streamed("POST", "v1/query", { json: { ...question, cache_ids: ids, stream: true }, ...options });

/** The events of an answer, as objects. Throws an error event as a `Failure`. */
async function* streamed(method, path, options) {
  const response = await send(method, path, options);
  for await (const event of events(response)) {
    if (event.error) throw new Failure(event.error.message, event.error.code);
    yield event;
  }
}

/** The `data:` lines of an event stream up to [DONE]. EventSource cannot send a key. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  let ended = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done && ended) return;
      if (done) throw new Failure("the stream broke off before its end", "connection_failed");
      const lines = (pending + value).split("\n");
      pending = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        ended = line === "data: [DONE]";
        if (!ended) yield JSON.parse(line.slice(6));
      }
    }
  } catch (error) {
    throw error instanceof TypeError ? unreachable() : error;
  } finally {
    reader.cancel().catch(() => {}); // closes the connection if the caller stops early, which ends the answer
  }
}

/** Create a cache in the background. `body` is a FormData, or an object for JSON. */
export const createInBackground = (body, options) => upload("v1/caches", body, { prefer: "respond-async" }, options);

/** Append to a cache: the new cache. `body` is a FormData with a file, or an object for JSON. */
export const appendTo = (id, body, options) => upload(ofCache(id, "/append"), body, {}, options);

/** Upload the input of a batch. */
export function uploadFile(file, options) {
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file);
  return upload("v1/files", form, {}, options);
}

/** POST a body and report the share that was sent. XMLHttpRequest, because fetch cannot report it. */
function upload(path, body, headers, { onProgress, signal }) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    const isForm = body instanceof FormData;
    const all = { ...authorization(), ...headers, ...(isForm ? {} : { "content-type": "application/json" }) };
    for (const [name, value] of Object.entries(all)) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
    request.onerror = () => reject(unreachable());
    request.onabort = () => reject(new DOMException("stopped", "AbortError"));
    request.onload = () => {
      if (request.status < 300) resolve(JSON.parse(request.responseText));
      else reject(failureOf(request.status, request.responseText, request.getResponseHeader("x-request-id")));
    };
    signal.addEventListener("abort", () => request.abort());
    request.send(isForm ? body : JSON.stringify(body));
  });
}
