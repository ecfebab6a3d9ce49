/** Put documents on the shelf: drop, choose or paste them, choose how to compress them, then send them. */

import { html } from "../dom.js";
import { Field } from "../fields.js";
import { count } from "../format.js";
import { FailureNote } from "../parts.js";
import { useRef, useState } from "../vendor/hooks.js";
import { DropZone } from "./drop-zone.js";
import { JobList } from "./job-list.js";
import { DEFAULTS, fieldsOf, PutOptions } from "./put-options.js";

export function PutView({ jobs }) {
  const [choices, setChoices] = useState(DEFAULTS);
  const [files, setFiles] = useState([]);
  const [text, setText] = useState("");
  const [failure, setFailure] = useState(null);
  const zone = useRef();
  const documents = text.trim() ? [...files, text] : files;

  const addFiles = (more) => setFiles((before) => [...before, ...more]);
  const chooseAgain = ({ document }) => (typeof document === "string" ? setText(document) : addFiles([document]));
  const submit = (event) => {
    event.preventDefault();
    setFailure(null);
    try {
      const fields = fieldsOf(choices);
      documents.forEach((document) => jobs.add(document, fields));
    } catch (error) {
      setFailure(error);
      return;
    }
    setFiles([]);
    setText("");
    zone.current.scrollIntoView({ block: "nearest" }); // on a phone the button is far below it
  };
  return html`<form class="split even" onSubmit=${submit}>
    <section class="card" aria-label="Documents">
      <div ref=${zone}>
        <${DropZone} onFiles=${addFiles}>
          <${ChosenFiles} files=${files} onFiles=${setFiles} />
          <${JobList} jobs=${jobs} onAgain=${chooseAgain} />
        <//>
      </div>
      <${Field} label="Or paste a text" as="textarea" rows="4" value=${text} onValue=${setText} />
    </section>
    <section class="card" aria-label="Options">
      <${PutOptions} choices=${choices} onChange=${setChoices} />
      <${FailureNote} failure=${failure} />
      <div class="inline">
        <button class="main" disabled=${documents.length === 0}>${action(documents.length)}</button>
        ${documents.length === 0 && html`<span class="hint">Choose a file or paste a text first.</span>`}
      </div>
    </section>
  </form>`;
}

const action = (number) => (number > 1 ? `Put ${count(number)} documents on the shelf` : "Put it on the shelf");

/** The files that the button will send. */
function ChosenFiles({ files, onFiles }) {
  return html`<ul class="picker" aria-label="Chosen files">
    ${files.map(
      (file, at) => html`<li key=${at} class="to-send">
        <span>${file.name}</span>
        <button type="button" class="quiet" aria-label=${`Remove ${file.name}`} onClick=${() => onFiles(files.toSpliced(at, 1))}>
          Remove
        </button>
      </li>`,
    )}
  </ul>`;
}
