/** Markup in template strings. Values are inserted as text; nothing on this page sets HTML. */

import htm from "./vendor/htm.js";
import { h } from "./vendor/preact.js";

export const html = htm.bind(h);
