"use strict";
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const heads = data.heads; // [{code, title, role}], layer by layer
const size = data.views[0].labels.length;
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

// ---- colours

let ramp = []; // 256 colours [r, g, b] between the stops of the style sheet
let ink = {};
function readColours() {
  const stops = [0, 1, 2, 3, 4].map((i) => [1, 3, 5].map((at) => parseInt(style(`--r${i}`).slice(at, at + 2), 16)));
  ramp = Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * 4, low = Math.min(Math.floor(at), 3);
    return stops[low].map((c, j) => Math.round(c + (stops[low + 1][j] - c) * (at - low)));
  });
  ink = { text: style("--ink"), soft: style("--soft"), rule: style("--rule"), page: style("--page"), mark: style("--mark") };
}
const colour = (share) => ramp[Math.round(clamp(share, 0, 1) * 255)];

// ---- the page

function drawAll() {
  readColours();
  showHeads();
}

/** A click on a column's name sorts the table by it, and another click the other way round. */
function setUpSorting() {
  const table = document.querySelector("#heads-table table");
  if (!table) return;
  const names = [...table.querySelectorAll("th")], body = table.querySelector("tbody");
  const value = (row, at) => {
    const text = row.cells[at].textContent, number = parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };
  names.slice(0, -1).forEach((name, at) => { // the last column is drawn
    const button = html("button", { type: "button" }, name.textContent);
    name.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = name.getAttribute("aria-sort") !== "ascending";
      names.forEach((other) => other.removeAttribute("aria-sort"));
      name.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1);
      body.append(...[...body.rows].sort((a, b) => order(value(a, at), value(b, at)))); // stable
    });
  });
}

/** Runs after all scripts are loaded. */
function start() {
  readColours();
  setUpAttention();
  document.querySelectorAll(".drawn figure").forEach(setUpFigure);
  setUpCursors();
  setUpSorting();
  showView(0);
  let waiting = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(drawAll); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
}
