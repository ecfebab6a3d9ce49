/** Numbers and times as people read them. */

const SPANS = [
  ["year", 31_536_000],
  ["month", 2_592_000],
  ["day", 86_400],
  ["hour", 3600],
  ["minute", 60],
  ["second", 1],
];
const numbers = new Intl.NumberFormat("en");
const relative = new Intl.RelativeTimeFormat("en", { numeric: "always", style: "short" });
const moments = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

export const count = (number) => numbers.format(number);

/** Sizes as the command line writes them: in MB, with at least two digits. */
export function megabytes(bytes) {
  const number = bytes / 1e6;
  return `${number < 0.1 ? Number(number.toPrecision(2)) : number.toFixed(2)} MB`;
}

/** What is stored against the full cache in 16 bits, and in the model's dtype where that is wider. */
export function size({ stored, full, full_16bit: base }) {
  const wider = full > base ? `; ${megabytes(full)} in the model's dtype` : "";
  return `${megabytes(stored)}, ${percent(stored / base)} of ${megabytes(base)} in 16 bits${wider}`;
}

/** The size of a cache beside the entries that it keeps, and the form in which it does. */
export function kept(cache) {
  const { codec, dtype, tokens, bytes } = cache;
  const entries = percent(tokens.kept / Math.max(tokens.document, 1));
  return `${size(bytes)}; ${entries} of the entries in ${codec === "none" ? dtype : codec}`;
}

export const percent = (share) => `${Number((share * 100).toFixed(share > 0.99 && share < 1 ? 2 : 1))} %`;

export const milliseconds = (ms) =>
  ms < 1000 ? `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;

/** A time in Unix seconds against now: "in 3 days", "5 min. ago". */
export function fromNow(unix, now = Date.now() / 1000) {
  const seconds = unix - now;
  const [unit, length] = SPANS.find(([, span]) => Math.abs(seconds) >= span) ?? SPANS.at(-1);
  return relative.format(Math.trunc(seconds / length), unit);
}

export const moment = (unix) => moments.format(new Date(unix * 1000));

export const expiry = (cache) => (cache.expires_at === null ? "never" : fromNow(cache.expires_at));

/** The share of the cues that agree with the full cache; a dash if it was not measured. */
export const agreement = ({ quality }) => (Number.isFinite(quality?.agreement) ? percent(quality.agreement) : "–");

/** The agreement with its interval, if the document is long enough for one. */
export const quality = ({ agreement: share, low, high, cues, kl, reason }) => {
  if (share === null) return `none: ${reason}`;
  if (cues === 0 && reason) return `${percent(share)}, ${reason}`;
  const interval = low === null ? "" : ` (${percent(low)} to ${percent(high)})`;
  return `${percent(share)}${interval} of ${count(cues)} cues agree with the full cache, KL ${kl.toFixed(3)}`;
};

/** The title of a cache: its name, or its document's id if it has no name. */
export const title = (cache) => cache.name || cache.document_id;

/** One line that distinguishes a cache from others of its document. */
export const summary = (cache) =>
  [
    `${title(cache)}: ${cache.policy}`,
    `${percent(cache.compression_ratio)} removed`,
    cache.codec !== "none" && cache.codec,
  ]
    .filter(Boolean)
    .join(", ");

/** Labels as lines of name=value, and back. Throws an Error that names the line. */
export const labelLines = (labels) =>
  Object.entries(labels)
    .map(([name, value]) => `${name}=${value}`)
    .join("\n");

export function parseLabels(text) {
  const lines = text
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);
  return Object.fromEntries(
    lines.map((line) => {
      const at = line.indexOf("=");
      if (at < 1) throw new Error(`a label is name=value, and this one is not: ${line}`);
      return [line.slice(0, at).trim(), line.slice(at + 1).trim()];
    }),
  );
}
