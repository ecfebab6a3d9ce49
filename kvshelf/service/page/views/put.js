/** Put documents on the shelf: by drag and drop, by choosing files, by pasting text. */

import { html } from "../dom.js";
import { Field, Files } from "../fields.js";
import { FailureNote } from "../parts.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { JobList } from "./job-list.js";
import { DEFAULTS, fieldsOf, PutOptions } from "./put-options.js";

export function PutView({ jobs }) {
  const [choices, setChoices] = useState(DEFAULTS);
  const [text, setText] = useState("");
  const [failure, setFailure] = useState(null);

  /** `bodyOf` makes the request's body from the chosen fields. */
  const put = (name, bodyOf) => {
    setFailure(null);
    try {
      jobs.add(choices.name || name, bodyOf(fieldsOf(choices)));
    } catch (error) {
      setFailure(error);
    }
  };
  const putFiles = (files) => files.forEach((file) => put(file.name, (fields) => formOf(file, fields)));
  const putText = (event) => {
    event.preventDefault();
    put(`${text.trim().slice(0, 40)} …`, (fields) => ({ document: text, ...fields }));
  };
  return html`
    <div class="split even">
      <section class="card" aria-label="Document">
        <${DropZone} onFiles=${putFiles} />
        <form onSubmit=${putText}>
          <${Field} label="Or paste its text" as="textarea" rows="6" required value=${text} onValue=${setText} />
          <button class="main">Put the text on the shelf</button>
        </form>
        <${FailureNote} failure=${failure} />
      </section>
      <${PutOptions} choices=${choices} onChange=${setChoices} />
    </div>
    <${JobList} jobs=${jobs} />
  `;
}

/** A multipart body: the file as it is, text as text, all other fields as JSON. */
function formOf(file, fields) {
  const form = new FormData();
  for (const [name, value] of Object.entries({ name: file.name, ...fields })) {
    form.append(name, typeof value === "string" ? value : JSON.stringify(value));
  }
  form.append("file", file);
  return form;
}

function DropZone({ onFiles }) {
  const [over, setOver] = useState(false);
  const take = (event, { files }) => {
    if (files.length === 0) return; // pasted text goes into the focused field
    event.preventDefault();
    onFiles([...files]);
  };
  useEffect(() => {
    const paste = (event) => take(event, event.clipboardData);
    addEventListener("paste", paste);
    return () => removeEventListener("paste", paste);
  });
  const drag = (event) => {
    event.preventDefault(); // else the browser would open the file
    setOver(event.type === "dragover");
    if (event.type === "drop") take(event, event.dataTransfer);
  };
  return html`<div
    class=${over ? "drop over" : "drop"} onDragOver=${drag} onDragLeave=${() => setOver(false)} onDrop=${drag}
  >
    <p>Drop files here, or paste them</p>
    <${Files} label="Choose files" multiple onFiles=${onFiles} />
  </div>`;
}
