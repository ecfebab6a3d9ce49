/** What to do with an empty shelf. */

import { html } from "../dom.js";

const commands = () => `export KVSHELF_URL=${new URL(".", location.href).href.replace(/\/$/, "")}
kvshelf sample > report.txt
kvshelf put report.txt`;

export const Begin = () => html`<div class="begin">
  <p>The shelf is empty. Put a document on it, then ask it questions.</p>
  <a class="button main" href="#put">Put a document on the shelf</a>
  <p>Or in a terminal:</p>
  <pre>${commands()}</pre>
</div>`;
