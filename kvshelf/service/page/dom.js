/** Markup in template strings. Text in it is text: nothing on this page ever sets HTML. */

import htm from "./vendor/htm.js";
import { h } from "./vendor/preact.js";

export const html = htm.bind(h);
