/** The kept tokens of a cache, and those that an answer read, as numbers to draw. Independent of the page. */

export const LEVELS = 8; // color levels, not counting 0, which means none

/** The answer of /v1/caches/{id}/kept, with the layers of later answers added. */
export class Kept {
  #layers = new Map(); // number -> {kept, merged}: each head's bits

  constructor(answer) {
    this.about = answer;
    this.tokens = answer.tokens;
    this.addLayers(answer);
  }

  get size() {
    return this.tokens.length;
  }

  get numLayers() {
    return this.about.num_layers;
  }

  addLayers(answer) {
    for (const { layer, kept, merged } of answer.layers) {
      this.#layers.set(layer, { kept: kept.map(decode), merged: (merged ?? []).map(decode) });
    }
  }

  hasLayer(layer) {
    return this.#layers.has(layer);
  }

  /** KV heads of a loaded layer. */
  heads(layer) {
    return this.#layers.get(layer).kept.length;
  }

  /** What each head of a layer did with a token: "kept", "merged" or "evicted". */
  states(layer, token) {
    const { kept, merged } = this.#layers.get(layer);
    return kept.map((bits, head) => {
      if (bit(bits, token)) return "kept";
      return merged.length && bit(merged[head], token) ? "merged" : "evicted";
    });
  }

  /**
   * For each token: the share of heads that kept it, 0 to 1, and whether any head merged it into another token. Counts
   * the heads of all layers, of one (`layer`), or one head.
   */
  shares(layer = null, head = null) {
    if (layer === null) {
      const { counts, merged_counts: merged, num_heads: heads } = this.about;
      return {
        kept: Float32Array.from(counts, (n) => n / heads),
        merged: merged && Uint8Array.from(merged, (n) => n > 0),
      };
    }
    const { kept, merged } = this.#layers.get(layer);
    const wanted = head === null ? [...kept.keys()] : [head];
    const share = new Float32Array(this.tokens.length);
    const joined = merged.length ? new Uint8Array(this.tokens.length) : null;
    for (const each of wanted) {
      for (let token = 0; token < share.length; token += 1) {
        if (bit(kept[each], token)) share[token] += 1 / wanted.length;
        else if (joined && bit(merged[each], token)) joined[token] = 1;
      }
    }
    return { kept: share, merged: joined };
  }

  /** Kept entries of one head in `bins` equal stretches of the document, 0 to 1. */
  density(layer, head, bins) {
    const bits = this.#layers.get(layer).kept[head];
    const found = new Float32Array(bins);
    const sizes = new Float32Array(bins);
    for (let token = 0; token < this.tokens.length; token += 1) {
      const bin = Math.floor((token * bins) / this.tokens.length);
      sizes[bin] += 1;
      if (bit(bits, token)) found[bin] += 1;
    }
    return found.map((sum, bin) => (sizes[bin] ? sum / sizes[bin] : 0));
  }
}

/** What an answer read of a document: one row to draw, and no text. */
export class Read {
  /** `shares`: base64 of one byte for each token, 255 for all. */
  constructor(shares) {
    this.shares = { kept: Float32Array.from(decode(shares), (byte) => byte / 255), merged: null };
  }

  get size() {
    return this.shares.kept.length;
  }

  heads() {
    return 1;
  }

  /** The first of the most read tokens. */
  get most() {
    const { kept } = this.shares;
    return kept.reduce((best, share, token) => (share > kept[best] ? token : best), 0);
  }

  /** The largest share in each of `bins` equal stretches of the document: a mean would hide a short passage. */
  density(_layer, _head, bins) {
    const found = new Float32Array(bins);
    this.shares.kept.forEach((share, token) => {
      const bin = Math.floor((token * bins) / this.size);
      found[bin] = Math.max(found[bin], share);
    });
    return found;
  }
}

/** The color level of a share: 0 for none, `LEVELS` for all. */
export const level = (share) => (share <= 0 ? 0 : Math.max(1, Math.ceil(share * LEVELS - 1e-6)));

/** Stretches of about `size` tokens, cut at line ends if possible: [first, past the last]. */
export function stretches(tokens, size = 500) {
  const found = [];
  let first = 0;
  for (let at = 0; at < tokens.length; at += 1) {
    const length = at + 1 - first;
    if ((length >= size && tokens[at].includes("\n")) || length >= 3 * size || at === tokens.length - 1) {
      found.push([first, at + 1]);
      first = at + 1;
    }
  }
  return found;
}

const decode = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));

const bit = (bytes, index) => (bytes[index >> 3] >> (index & 7)) & 1;
