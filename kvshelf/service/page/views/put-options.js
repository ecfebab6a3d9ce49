/** The options of a creation as form fields, and the request fields that they make. */

import { listModels, listPolicies } from "../api.js";
import { html } from "../dom.js";
import { Check, Choice, Field } from "../fields.js";
import { parseLabels, percent } from "../format.js";
import { FailureNote, useLoaded } from "../parts.js";

/** What each codec does, for people. */
const CODECS = {
  none: "unchanged, in the model's type",
  int8: "8 bits per number",
  int4: "4 bits per number",
  int2: "2 bits per number",
  mixed: "8 bits for important entries, 2 bits for the others",
  klt: "transform coding: the fewest bytes of all entries",
  lossless: "unchanged bit by bit, a third smaller in bfloat16",
};
const SPANS = { "": "never", 3600: "in an hour", 86400: "in a day", 604800: "in a week", 2592000: "in 30 days" };
const AUTO = {
  id: "auto",
  summary: "The service chooses policy, ratio and codec for the document: the smallest cache that reaches the minimum quality.",
  advice: "",
  takes_budget: false,
  takes_questions: false,
};

export const DEFAULTS = {
  model: "",
  policy: "full",
  takesBudget: false,
  takesQuestions: false,
  ratio: "0.5",
  codec: "int8",
  quality: "",
  ttl: "",
  name: "",
  labels: "",
  questions: "",
  source: true,
};

/** The request fields of a creation. Throws an Error for an invalid choice. */
export function fieldsOf(choices) {
  const fields = { policy: choices.policy, keep_source: choices.source };
  const questions = choices.questions.split("\n").filter((line) => line.trim());
  if (choices.policy !== AUTO.id) fields.codec = choices.codec;
  if (choices.takesBudget) fields.compression_ratio = Number(choices.ratio);
  if (choices.takesQuestions && questions.length) fields.expected_questions = questions;
  if (choices.quality) fields.min_quality = Number(choices.quality);
  if (choices.model) fields.model = choices.model;
  if (choices.ttl) fields.ttl_s = Number(choices.ttl);
  if (choices.name) fields.name = choices.name;
  if (choices.labels.trim()) fields.labels = parseLabels(choices.labels);
  return fields;
}

export const CodecChoice = (rest) =>
  html`<${Choice} label="Codec" options=${Object.entries(CODECS).map(([id, told]) => [id, `${id}: ${told}`])} ...${rest} />`;

/** The fields of a form. */
export function PutOptions({ choices, onChange }) {
  const [models] = useLoaded(listModels, []);
  const [policies, failure] = useLoaded(listPolicies, []);
  const offered = [AUTO, ...(policies ?? [{ ...AUTO, id: DEFAULTS.policy, summary: "…" }])];
  const policy = offered.find(({ id }) => id === choices.policy);
  const of = (name) => ({ value: choices[name], onValue: (value) => onChange({ ...choices, [name]: value }) });
  const choosePolicy = (id) => {
    const { takes_budget: takesBudget, takes_questions: takesQuestions } = offered.find((each) => each.id === id);
    onChange({ ...choices, policy: id, takesBudget, takesQuestions });
  };
  const ids = (things) => things.map(({ id }) => [id, id]);
  const fixed = choices.policy === "full" ? "nothing" : "what it chooses";
  const removed = `Removed: ${choices.takesBudget ? percent(Number(choices.ratio)) : fixed}`;
  const least = policy === AUTO ? "0.95" : "any";
  return html`
    <${FailureNote} failure=${failure} />
    ${models?.length > 1 && html`<${Choice} label="Model" options=${ids(models)} ...${of("model")} />`}
    <${Choice} label="Policy" options=${ids(offered)} value=${choices.policy} onValue=${choosePolicy} />
    <p class="hint about">${policy.summary}${policy.advice && ` Good ${policy.advice}`}</p>
    <${Field} label=${removed} type="range" min="0" max="0.98" step="0.01" disabled=${!choices.takesBudget} ...${of("ratio")} />
    <${CodecChoice} disabled=${policy === AUTO} ...${of("codec")} />
    ${
      choices.takesQuestions &&
      html`<${Field} label="Expected questions, one per line" as="textarea" rows="2" ...${of("questions")} />`
    }
    <${Field} label="Minimum quality" type="number" min="0" max="1" step="0.01" placeholder=${least} ...${of("quality")} />
    <details>
      <summary>Name, labels, expiry, text</summary>
      <${Field} label="Name" maxlength="256" placeholder="the file's" ...${of("name")} />
      <${Field} label="Labels, one name=value per line" as="textarea" rows="2" ...${of("labels")} />
      <${Choice} label="Expires" options=${Object.entries(SPANS)} ...${of("ttl")} />
      <${Check} label="Store the text with the cache" ...${of("source")} />
      <p class="hint">With the text, the page can show which tokens were kept, and a lost cache can be made again.</p>
    </details>
  `;
}
