/** Fields of forms, each with its label. */

import { html } from "./dom.js";

/** `onValue` hears what is typed, with `late` only once it is left; all else is the element's own. */
export function Field({ label, as = "input", onValue, late = false, ...rest }) {
  const hear = (event) => onValue(event.target.value);
  const heard = { [late ? "onChange" : "onInput"]: hear };
  return html`<label>${label} <${as} ...${rest} ...${heard} /></label>`;
}

/** One of several: `options` are values with the text that people read. */
export function Choice({ label, options, value, onValue, ...rest }) {
  return html`<label>
    ${label}
    <select value=${value} onChange=${(event) => onValue(event.target.value)} ...${rest}>
      ${options.map(([each, told]) => html`<option key=${each} value=${each}>${told}</option>`)}
    </select>
  </label>`;
}

/** `onValue` hears true or false. */
export const Check = ({ label, value, onValue }) =>
  html`<label class="check">
    <input type="checkbox" checked=${value} onChange=${(event) => onValue(event.target.checked)} /> ${label}
  </label>`;

/** `onFiles` hears of the files that were chosen. They can be chosen once more. */
export function Files({ label, onFiles, ...rest }) {
  const hear = (event) => {
    onFiles([...event.target.files]);
    event.target.value = "";
  };
  return html`<label>${label} <input type="file" ...${rest} onChange=${hear} /></label>`;
}
