"use strict";
// The numbers of the page: heads, statistics, and the weights of every frame (one model on one sequence).

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const heads = data.heads; // [{code, title, layer}], layer by layer
const MOST = 128; // the most queries and keys of a picture that are drawn one by one
const directions = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }; // right, down

function node(space, tag, attributes, children) {
  const made = space ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const html = (tag, attributes = {}, ...children) => node(false, tag, attributes, children);
const svg = (tag, attributes = {}, ...children) => node(true, tag, attributes, children);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const extent = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
const nearest = (values, wanted) =>
  values.reduce((best, v, i) => (Math.abs(v - wanted) < Math.abs(values[best] - wanted) ? i : best), 0);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const figures = (value) => (value === null || value === undefined ? "–" : value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1)
  : Math.abs(value) < 10 ? value.toFixed(3) : value.toPrecision(4));
/** The value, rounded up to two digits. */
function atMost(value) {
  const shown = value.toPrecision(2);
  return Number(shown) >= value ? shown : (Number(shown) + 10 ** (Math.floor(Math.log10(value)) - 1)).toPrecision(2);
}

/** Scrolls a box, not the page, so that an element in it is visible. */
function reveal(element, box) {
  const at = element.getBoundingClientRect().top - box.getBoundingClientRect().top;
  if (at < 0 || at + element.offsetHeight > box.clientHeight) box.scrollTop += at - box.clientHeight / 2;
}

async function inflated(blob) {
  const bytes = Uint8Array.from(atob($(blob).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

/** All weights of a frame, or each query's largest and a coarse picture; see jattn/reports/_pack_weights.py. */
class Frame {
  constructor(view, entry) {
    Object.assign(this, entry);
    this.view = view;
    this.T = view.queries.length;
    this.S = view.keys.length;
  }

  async load() {
    this.loading = this.loading || inflated(this.blob).then((buffer) => {
      const { T, S, k, side } = this, count = heads.length * T;
      if (!k) this.weights = this.bits > 8 ? new Uint16Array(buffer) : new Uint8Array(buffer);
      else {
        const wide = this.wide ? Uint32Array : Uint16Array;
        this.keys = new wide(buffer, 0, count * k);
        this.weights = new Uint16Array(buffer, this.keys.byteLength, count * k);
        this.coarse = new Uint8Array(buffer, this.keys.byteLength + this.weights.byteLength, heads.length * side[0] * side[1]);
      }
      this.unit = this.top / (2 ** this.bits - 1);
      this.loaded = true;
    });
    return this.loading;
  }

  code(head) { return this.heads ? this.heads[head] : heads[head].code; }

  /** The weight, or null if it is not kept. */
  at(head, query, key) {
    const { T, S, k } = this;
    if (!k) {
      const weight = this.weights[(head * T + query) * S + key];
      return weight || !this.dropped ? weight * this.unit : null;
    }
    for (let rank = 0; rank < k; rank++) {
      const i = (rank * heads.length + head) * T + query;
      if (this.weights[i] && this.keys[i] === key) return this.weights[i] * this.unit;
    }
    return null;
  }

  /** The kept pairs [key, weight] of a query, largest first, and a bound on the others. */
  row(head, query) {
    const { T, S, k } = this, pairs = [];
    const rounded = 0.51 * this.unit; // the largest rounding error, in float32
    const left = Math.max(this.dropped, rounded); // weights smaller than either need not be kept
    if (!k) {
      for (let key = 0, i = (head * T + query) * S; key < S; key++, i++) if (this.weights[i]) pairs.push([key, this.weights[i] * this.unit]);
      pairs.sort((a, b) => b[1] - a[1] || a[0] - b[0]);
      return { pairs, bound: left };
    }
    for (let rank = 0; rank < k; rank++) {
      const i = (rank * heads.length + head) * T + query;
      if (this.weights[i]) pairs.push([this.keys[i], this.weights[i] * this.unit]);
    }
    return { pairs, bound: pairs.length < k ? left : pairs[k - 1][1] + rounded };
  }

  /** The cells of a picture, at most MOST or the cells of the coarse one; `per`: the number of [queries, keys] per cell. */
  cells(head, from, most = MOST) {
    const { T, S, k, side } = this, [q0, k0, size] = from, rows = Math.min(size, T - q0), columns = Math.min(size, S - k0);
    if (k && size > MOST) { // the coarse picture has no parts
      const [down, across] = side, values = Float32Array.from(this.coarse.subarray(head * down * across, (head + 1) * down * across), (v) => v / 255);
      return { values, rows: down, columns: across, per: this.span };
    }
    if (k) {
      const values = new Float32Array(rows * columns).fill(-1);
      for (let rank = 0; rank < k; rank++)
        for (let q = 0; q < rows; q++) {
          const i = (rank * heads.length + head) * T + q0 + q, key = this.keys[i] - k0;
          if (this.weights[i] && key >= 0 && key < columns) values[q * columns + key] = this.weights[i] * this.unit;
        }
      return { values, rows, columns, per: [1, 1] };
    }
    const per = Math.ceil(Math.max(rows, columns) / most), down = Math.ceil(rows / per), across = Math.ceil(columns / per);
    const values = new Float32Array(down * across);
    for (let q = 0; q < rows; q++) {
      const low = Math.floor(q / per), i = (head * T + q0 + q) * S + k0, share = this.unit / Math.min(per, rows - low * per);
      for (let key = 0; key < columns; key++) values[low * across + Math.floor(key / per)] += this.weights[i + key] * share;
    }
    return { values, rows: down, columns: across, per: [per, per] };
  }
}

const views = data.views.map((view) => ({ ...view, texts: view.texts || view.keys.map((token, i) => `${i}: ${token}`) }));
for (const view of views) {
  view.asked = view.texts_of_queries || (view.cross ? view.queries.map((token, i) => `${i}: ${token}`) : view.texts);
  view.frames = view.frames.map((entry) => new Frame(view, entry));
  view.steps = view.frames.map((frame) => frame.step);
  view.timed = view.frames.length > 1 && view.steps[0] !== null;
}

// ---- colours

let ramp = []; // 256 colours [r, g, b] between the stops of the style sheet
let ink = {};
function readColours() {
  const stops = [0, 1, 2, 3, 4].map((i) => [1, 3, 5].map((at) => parseInt(style(`--r${i}`).slice(at, at + 2), 16)));
  ramp = Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * 4, low = Math.min(Math.floor(at), 3);
    return stops[low].map((c, j) => Math.round(c + (stops[low + 1][j] - c) * (at - low)));
  });
  ink = Object.fromEntries(["ink", "soft", "rule", "page", "mark", "raised"].map((name) => [name, style(`--${name}`)]));
}
const colour = (share) => ramp[Math.round(clamp(share, 0, 1) * 255)];
const css = (share) => `rgb(${colour(share)})`;
const luminance = (rgb) => rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
/** Black or white, whichever is more legible on this colour. */
const onColour = (share) => (luminance(colour(share)) > 0.179 ? "#000" : "#fff");
