/** What to do with an empty shelf. */

import { html } from "../dom.js";

/** The service's address as the command line takes it. */
const url = () => new URL(".", location.href).href;

export const Begin = () => html`<div class="begin">
  <p>The shelf is empty. Put a document on it, and ask it questions.</p>
  <a class="button main" href="#put">Put a document on the shelf</a>
  <p>In a terminal:</p>
  <pre tabindex="0" aria-label="Commands"><code>export KVSHELF_URL=${url()}
kvshelf sample > report.txt
kvshelf put report.txt --policy keydiff --compression-ratio 0.75</code></pre>
</div>`;
