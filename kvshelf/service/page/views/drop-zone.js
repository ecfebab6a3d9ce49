/** A place for files. */

import { html } from "../dom.js";
import { Files } from "../fields.js";
import { useEffect, useState } from "../vendor/hooks.js";

/** Takes files that are dropped or pasted anywhere in the view: the browser would open a file dropped beside the zone. */
export function DropZone({ disabled, onFiles, children }) {
  const [over, setOver] = useState(false);
  useEffect(() => {
    const take = (event, { files }) => {
      if (files.length === 0) return; // pasted text goes into the focused field
      event.preventDefault();
      onFiles([...files]);
    };
    const paste = (event) => take(event, event.clipboardData);
    const drag = (event) => {
      if (!event.dataTransfer.types.includes("Files")) return; // dragged text goes into a field
      event.preventDefault();
      setOver(event.type === "dragover");
      if (event.type === "drop") take(event, event.dataTransfer);
    };
    const heard = { paste, dragover: drag, dragleave: drag, drop: drag };
    for (const [name, hear] of Object.entries(heard)) addEventListener(name, hear);
    return () => Object.entries(heard).forEach(([name, hear]) => removeEventListener(name, hear));
  }, [onFiles]);
  return html`<div class=${over ? "drop over" : "drop"}>
    <p>Drop files here, or paste them</p>
    <${Files} label="Choose files" multiple disabled=${disabled} onFiles=${onFiles} />
    ${children}
  </div>`;
}
