/** Components that several views share. */

import { html } from "./dom.js";
import { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";

/** A failure with its code and its request id in the service's log. */
export function FailureNote({ failure }) {
  if (!failure) return null;
  return html`<div class="failure" role="alert">
    <p>${failure.message}</p>
    <p class="hint">
      <code>${failure.code ?? "error"}</code>
      ${failure.missReason && html` · <code>${failure.missReason}</code>`}
      ${failure.requestId && html` · request <code>${failure.requestId}</code>`}
    </p>
  </div>`;
}

/** An announcement for screen readers. */
export const Announce = ({ text }) => html`<p class="unseen" role="status">${text}</p>`;

/** A list of terms and values; null values are left out. */
export function Facts({ facts }) {
  const given = Object.entries(facts).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<dl class="facts">
    ${given.map(([term, value]) => html`<div key=${term}><dt>${term}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

/** A confirmation of an action that cannot be undone. Escape and "Keep" answer no. */
export function Confirm({ question, action, onYes, onNo }) {
  const dialog = useRef();
  useLayoutEffect(() => dialog.current.showModal(), []); // before the next key event
  return html`<dialog ref=${dialog} onClose=${onNo} aria-labelledby="confirm-question">
    <p id="confirm-question">${question}</p>
    <div class="buttons">
      <button autofocus onClick=${() => dialog.current.close()}>Keep</button>
      <button class="danger" onClick=${onYes}>${action}</button>
    </div>
  </dialog>`;
}

/** Progress from 0 to 1; null: in progress, share unknown. */
export const Progress = ({ share, label }) =>
  html`<progress max="1" value=${share ?? undefined} aria-label=${label}></progress>`;

/** The result of `load` once it is there: [value, failure]. Loaded again when one of `inputs` changes. */
export function useLoaded(load, inputs) {
  const [state, setState] = useState([null, null]);
  useEffect(() => {
    const stop = new AbortController();
    setState([null, null]);
    load(stop.signal).then(
      (value) => stop.signal.aborted || setState([value, null]),
      (failure) => stop.signal.aborted || setState([null, failure]),
    );
    return () => stop.abort();
  }, inputs);
  return state;
}
