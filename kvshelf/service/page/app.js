/** The page: the view that the address names, the form for the key, and the jobs that run beside the views. */

import { access, apiKey } from "./api.js";
import { html } from "./dom.js";
import { Field } from "./fields.js";
import { Jobs } from "./jobs.js";
import { FailureNote } from "./parts.js";
import { render } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
import { AskView } from "./views/ask.js";
import { BatchesView } from "./views/batches.js";
import { KeptView } from "./views/kept.js";
import { PutView } from "./views/put.js";
import { ShelfView } from "./views/shelf.js";
import { TalkView } from "./views/talk.js";

/** Each view: its title and its component, which gets the rest of the address as `ids`. */
const VIEWS = {
  shelf: ["Shelf", ShelfView],
  put: ["Put", PutView],
  ask: ["Ask", AskView],
  talk: ["Conversation", TalkView],
  kept: ["Kept tokens", KeptView],
  batches: ["Batches", BatchesView],
};

/** `#kept/kvs_...` as ["kept", ["kvs_..."]]. */
function readAddress() {
  const [name, ...ids] = location.hash.slice(1).split("/");
  return [Object.hasOwn(VIEWS, name) ? name : "shelf", ids];
}

function useAddress() {
  const [address, setAddress] = useState(readAddress);
  // Before anything else can run: an effect comes after the next frame, and would miss an address changed until then.
  useLayoutEffect(() => {
    const changed = () => setAddress(readAddress());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return address;
}

/** `jobs` and `answered`, what this tab measured of each stored turn, outlive the views. */
function App({ jobs, answered }) {
  const [name, ids] = useAddress();
  const [refused, setRefused] = useState(null);
  const [session, setSession] = useState(0); // incremented with each key: another key may show another shelf
  const heading = useRef();
  const [title, View] = VIEWS[name];

  useEffect(() => {
    const hear = (event) => setRefused(event.detail);
    access.addEventListener("refused", hear);
    return () => access.removeEventListener("refused", hear);
  }, []);
  useEffect(() => {
    document.title = `${title} · kvshelf`;
  }, [title]);

  const skip = (event) => {
    event.preventDefault(); // following the link would replace the view's name in the address
    heading.current.focus();
  };
  const useKey = (key) => {
    apiKey.set(key);
    setRefused(null);
    setSession(session + 1);
  };
  const shown = refused
    ? html`<${KeyForm} failure=${refused} onKey=${useKey} />`
    : html`<${View} key=${`${name} ${session}`} ids=${ids} jobs=${jobs} answered=${answered} />`;
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <header class="bar">
      <span class="brand" aria-hidden="true">kvshelf</span>
      <${Navigation} current=${name} />
      ${apiKey.get() && html`<button class="quiet" onClick=${() => useKey("")}>Forget key</button>`}
    </header>
    <main id="main" class=${name}>
      <h1 ref=${heading} tabindex="-1">${refused ? "API key" : title}</h1>
      ${shown}
    </main>
  `;
}

function Navigation({ current }) {
  return html`<nav aria-label="Views">
    ${Object.entries(VIEWS).map(
      ([name, [title]]) =>
        html`<a href=${`#${name}`} aria-current=${name === current ? "page" : undefined}>${title}</a>`,
    )}
    <a href="docs">API</a>
  </nav>`;
}

function KeyForm({ failure, onKey }) {
  const [key, setKey] = useState("");
  const submit = (event) => {
    event.preventDefault();
    onKey(key.trim());
  };
  return html`<form class="card narrow" onSubmit=${submit}>
    <${FailureNote} failure=${failure} />
    <${Field} label="API key" type="password" required autocomplete="off" value=${key} onValue=${setKey} />
    <p class="hint">This tab keeps the key until you close it, and sends it in a header.</p>
    <button class="main">Use this key</button>
  </form>`;
}

render(html`<${App} jobs=${new Jobs()} answered=${new Map()} />`, document.getElementById("app"));
