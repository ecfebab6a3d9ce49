/** The text of a document; a token's background shows its share. Only tokens near the viewport or the chosen one have
 * elements. */

import { html } from "./dom.js";
import { level, stretches } from "./heat.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";

/**
 * `shares`: from `kept.shares()`, or of a `Read`. `chosen`: the marked token. `onChoose` gets a newly chosen token.
 */
export function HeatText({ kept, shares, chosen, onChoose, label = "Text of the document" }) {
  const { tokens } = kept;
  const box = useRef();
  const parts = useMemo(() => stretches(tokens), [tokens]);
  const near = useNear(box, parts.length);
  const place = parts.findIndex(([first, end]) => chosen >= first && chosen < end);

  // A chosen token that cannot be seen is scrolled to. scrollIntoView would move the page too.
  useLayoutEffect(() => {
    const mark = box.current.querySelector(".chosen") ?? box.current.children[place]; // a token may have no text
    const above = mark.getBoundingClientRect().top - box.current.getBoundingClientRect().top;
    if (above < 0 || above > box.current.clientHeight - 2 * mark.offsetHeight) {
      box.current.scrollTop += above - box.current.clientHeight / 2;
    }
  }, [chosen]);

  const choose = (event) => {
    const token = event.target.dataset?.token;
    if (token !== undefined) onChoose(Number(token));
  };
  const about = { role: "region", "aria-label": label, tabindex: 0 };
  return html`<div class="heat" ref=${box} ...${about} onClick=${choose}>
    ${parts.map(
      ([first, end], at) => html`<${Stretch}
      key=${first} tokens=${tokens} first=${first} end=${end} shares=${shares} drawn=${near.has(at) || at === place}
      templateTokens=${kept.about.template_tokens} chosen=${chosen >= first && chosen < end ? chosen : -1}
    />`,
    )}
  </div>`;
}

/** The children of the box that are in its viewport or near it. */
function useNear(box, count) {
  const [near, setNear] = useState(new Set([0, 1]));
  useEffect(() => {
    const places = new Map([...box.current.children].map((child, at) => [child, at]));
    const look = (entries) =>
      setNear((before) => {
        const after = new Set(before);
        for (const { target, isIntersecting } of entries) after[isIntersecting ? "add" : "delete"](places.get(target));
        return after;
      });
    const observer = new IntersectionObserver(look, { root: box.current, rootMargin: "100% 0px" });
    for (const child of places.keys()) observer.observe(child);
    return () => observer.disconnect();
  }, [count]);
  return near;
}

/** A stretch of tokens. As plain text it takes the same space, so nothing moves when elements are added or removed. */
function Stretch({ tokens, first, end, shares, drawn, templateTokens, chosen }) {
  return useMemo(() => {
    if (!drawn) return html`<p>${tokens.slice(first, end).join("")}</p>`;
    const spans = [];
    for (let at = first; at < end; at += 1) {
      if (tokens[at] === "") continue; // part of a character: the character's last token holds its text
      const style = { "--level": level(shares.kept[at]) };
      const names = shares.kept[at] > 0 ? [] : ["none"];
      if (shares.merged?.[at]) names.push("merged");
      if (at < templateTokens) names.push("template");
      if (at === chosen) names.push("chosen");
      spans.push(html`<span key=${at} class=${names.join(" ")} style=${style} data-token=${at}>${tokens[at]}</span>`);
    }
    return html`<p>${spans}</p>`;
  }, [drawn, shares, chosen, tokens, first, end]);
}
