/** Fields of forms, each with its label. */

import { html } from "./dom.js";
import { useEffect, useState } from "./vendor/hooks.js";

/** `onValue` gets the typed text; other properties go to the element. */
export function Field({ label, as = "input", onValue, ...rest }) {
  return html`<label>${label} <${as} ...${rest} onInput=${(event) => onValue(event.target.value)} /></label>`;
}

/** As `Field`, but `onValue` is called only after Enter or when the field loses focus. */
export function LateField({ value, onValue, ...rest }) {
  const [draft, setDraft] = useState(value);
  useEffect(() => setDraft(value), [value]);
  const hear = (event) => onValue(event.target.value); // the draft may be a render behind
  return html`<${Field} ...${rest} value=${draft} onValue=${setDraft} onChange=${hear} />`;
}

/** A choice; `options` maps values to the texts that are shown. */
export function Choice({ label, options, value, onValue, ...rest }) {
  return html`<label>
    ${label}
    <select value=${value} onChange=${(event) => onValue(event.target.value)} ...${rest}>
      ${options.map(([each, told]) => html`<option key=${each} value=${each}>${told}</option>`)}
    </select>
  </label>`;
}

/** `onValue` gets true or false. */
export const Check = ({ label, value, onValue }) =>
  html`<label class="check">
    <input type="checkbox" checked=${value} onChange=${(event) => onValue(event.target.checked)} /> ${label}
  </label>`;

/** `onFiles` gets the chosen files. The same files can be chosen again. */
export function Files({ label, onFiles, ...rest }) {
  const hear = (event) => {
    onFiles([...event.target.files]);
    event.target.value = "";
  };
  return html`<label class="button file">${label} <input type="file" class="unseen" ...${rest} onChange=${hear} /></label>`;
}
