"use strict";
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const heads = data.heads; // [{code, title, role}], layer by layer
const size = data.views[0].labels.length;
const dashes = ["", "7 3", "2 3", "7 3 2 3"];

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
const series = (index) => (index < 0 ? "var(--ink)" : `var(--c${index % 8})`);

// ---- attention

const views = data.views.map((view) => {
  const bytes = Uint8Array.from(atob(view.weights), (c) => c.charCodeAt(0));
  return { ...view, weights: data.width === 2 ? new Uint16Array(bytes.buffer) : bytes };
});
const unit = data.top / (256 ** data.width - 1), digits = data.width === 2 ? 4 : 2;
const state = { view: 0, frame: views[0].steps.length - 1, head: 0, pointed: 0, query: size - 1, key: 0 };
const at = (head, query, key) =>
  views[state.view].weights[((state.frame * heads.length + head) * size + query) * size + key] * unit;

function strongestKey(head, query) {
  let best = 0;
  for (let key = 1; key < size; key++) if (at(head, query, key) > at(head, query, best)) best = key;
  return best;
}

function shorten(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  while (text.length > 1 && pen.measureText(text + "…").width > room) text = text.slice(0, -1);
  return text + "…";
}

/** Where things stand in a picture of this width, in CSS pixels. */
function layout(pen, width, large) {
  const widest = large ? 11 : 9;
  pen.font = `bold ${widest}px system-ui, sans-serif`; // as wide as a label gets
  const label = width < 120 ? 0 : Math.min(extent(views[state.view].labels.map((t) => pen.measureText(t).width))[1], large ? 90 : 44) + 5;
  const edge = label + (large ? 18 : 0);
  const cell = (width - edge - 2) / size;
  const font = clamp(cell * 0.95, 9, widest);
  return { font, label, edge, cell, top: 7, side: cell * size, stride: Math.ceil(font / cell) };
}

function drawHead(canvas, head, large) {
  const pen = canvas.getContext("2d");
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  const place = layout(pen, width, large);
  const height = place.top + place.side + place.edge + 2;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.place = place;
  pen.scale(ratio, ratio);

  const cells = new ImageData(size, size);
  for (let i = 0; i < size * size; i++) {
    const value = at(head, Math.floor(i / size), i % size);
    cells.data.set([...colour(value / data.top), 255], i * 4);
  }
  const tile = new OffscreenCanvas(size, size);
  tile.getContext("2d").putImageData(cells, 0, 0);
  pen.imageSmoothingEnabled = false;
  const { cell, edge, side, top } = place;
  pen.drawImage(tile, edge, top, side, side);
  pen.strokeStyle = ink.rule;
  pen.strokeRect(edge, top, side, side);

  pen.strokeStyle = ink.mark;
  pen.globalAlpha = 0.45;
  pen.strokeRect(edge, top + state.query * cell, side, cell);
  pen.strokeRect(edge + state.key * cell, top, cell, side);
  pen.globalAlpha = 1;
  pen.lineWidth = 2;
  pen.strokeRect(edge + state.key * cell - 1, top + state.query * cell - 1, cell + 2, cell + 2);
  if (place.label) drawLabels(pen, place, large);
}

function drawLabels(pen, place, large) {
  const { cell, edge, side, top, label, font, stride } = place;
  const write = (index, chosen, isKey) => {
    pen.save();
    const middle = (index + 0.5) * cell;
    if (isKey) pen.translate(edge + middle, top + side + 5);
    else pen.translate(edge - 4, top + middle);
    if (isKey) pen.rotate(-Math.PI / 2);
    pen.font = `${chosen ? "bold " : ""}${font}px system-ui, sans-serif`;
    pen.fillStyle = chosen ? ink.mark : ink.soft;
    pen.fillText(shorten(pen, views[state.view].labels[index], label - 4), 0, 0);
    pen.restore();
  };
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const [chosen, isKey] of [[state.query, false], [state.key, true]]) {
    for (let i = 0; i < size; i += stride) if (Math.abs(i - chosen) >= stride) write(i, false, isKey);
    write(chosen, true, isKey);
  }
  if (!large) return;
  pen.textAlign = "center";
  pen.font = `12px system-ui, sans-serif`;
  pen.fillStyle = ink.text;
  pen.fillText("Keys (Source)", edge + side / 2, top + side + edge - 6);
  pen.rotate(-Math.PI / 2);
  pen.fillText("Queries (Target)", -top - side / 2, 7);
}

const pictures = []; // {canvas, caption, head()}
function addPicture(figure, head, large) {
  const canvas = html("canvas", { tabindex: "0", role: "img", "aria-describedby": "readout" });
  const caption = html("figcaption", {}, html("b"), html("span", { class: "number" }), html("span", { class: "role" }));
  figure.append(caption, canvas);
  const point = (event) => {
    const box = canvas.getBoundingClientRect(), place = canvas.place;
    const key = Math.floor((event.clientX - box.left - place.edge) / place.cell);
    const query = Math.floor((event.clientY - box.top - place.top) / place.cell);
    if (key < 0 || key >= size || query < 0 || query >= size) return;
    Object.assign(state, { key, query, pointed: head() });
    showHeads();
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("focus", () => { state.pointed = head(); showReadout(); });
  if (!large) canvas.addEventListener("click", () => choose(head()));
  canvas.addEventListener("keydown", (event) => {
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] || [];
    if (down !== undefined) {
      state.query = clamp(state.query + down, 0, size - 1);
      state.key = clamp(state.key + right, 0, size - 1);
      state.pointed = head();
      showHeads();
    } else if (event.key === "Enter" || event.key === " ") choose(head());
    else return;
    event.preventDefault();
  });
  pictures.push({ canvas, caption, head, large, figure });
}

function choose(head) {
  state.head = state.pointed = head;
  showHeads();
  showScores();
}

function showReadout() {
  const { pointed, query, key } = state;
  $("head").textContent = heads[pointed].title;
  $("query").textContent = views[state.view].texts[query];
  $("key").textContent = views[state.view].texts[key];
  $("weight").textContent = at(pointed, query, key).toFixed(digits);
}

function showHeads() {
  for (const { canvas, caption, head, large, figure } of pictures) {
    const { code, title, role } = heads[head()];
    drawHead(canvas, head(), large);
    canvas.setAttribute("aria-label", `${title}${role ? ", " + role : ""}: attention weights, queries down, keys across`);
    const [name, weight, part] = caption.children;
    name.textContent = large ? title : code;
    part.textContent = role;
    weight.textContent = at(head(), state.query, state.key).toFixed(large ? digits : 2);
    if (!large) figure.classList.toggle("chosen", head() === state.head);
  }
  showReadout();
}

function showScores() {
  const step = views[state.view].steps[state.frame];
  const steps = data.scores.steps;
  const look = nearest(steps, step);
  if (!data.scores.names.length) return;
  $("scores-title").textContent = `Scores of ${heads[state.head].title} at step ${steps[look]}`;
  const rows = data.scores.names.map((name, i) => {
    const value = data.scores.values[look][i][state.head];
    const width = `${clamp(value || 0, 0, 1) * 100}%`;
    const bar = svg("svg", { height: 12, "aria-hidden": "true" },
      svg("rect", { width: "100%", height: 12, fill: "var(--raised)" }), svg("rect", { width, height: 12, fill: "var(--c0)" }));
    return html("tr", {}, html("td", {}, name), html("td", { style: "width:60%" }, bar),
      html("td", { class: "number" }, value === null ? "–" : value.toFixed(3)));
  });
  $("scores").replaceChildren(html("table", { style: "width:100%" }, ...rows));
}

function showFrame(frame) {
  state.frame = frame;
  $("step").value = frame;
  const step = views[state.view].steps[frame];
  $("now").textContent = frame === 0 && step === 0 ? "0 (untrained)" : String(step);
  $("step").setAttribute("aria-valuetext", `training step ${step}`);
  showHeads();
  showScores();
  for (const { line, x } of cursors) { line.setAttribute("x1", x(step)); line.setAttribute("x2", x(step)); }
}

function showView(view) {
  const step = views[state.view].steps[state.frame]; // the new view's nearest, so that views are compared at one step
  state.view = view;
  $("step").max = views[view].steps.length - 1;
  showFrame(nearest(views[view].steps, step));
}

let playing = 0;
function play() {
  const stop = () => { clearInterval(playing); playing = 0; $("play").textContent = "▶ play"; };
  if (playing) return stop();
  const last = views[state.view].steps.length - 1;
  if (state.frame === last) showFrame(0);
  $("play").textContent = "■ stop";
  playing = setInterval(() => { state.frame < last ? showFrame(state.frame + 1) : stop(); }, 400);
}

function setUpAttention() {
  $("attention").hidden = false;
  const layers = data.layers, across = layers === 1 ? Math.min(heads.length, 2) : Math.min(heads.length / layers, 6);
  $("grid").style.setProperty("--across", across);
  document.querySelector(".explorer").classList.toggle("deep", layers > 1);
  addPicture($("large"), () => state.head, true);
  heads.forEach((_, head) => {
    const figure = html("figure");
    $("grid").append(figure);
    addPicture(figure, () => head, false);
  });
  $("top").textContent = data.top.toPrecision(3);
  $("view").append(...views.map((view, i) => html("option", { value: i }, view.name)));
  $("view").addEventListener("change", () => showView(Number($("view").value)));
  $("step").addEventListener("input", () => showFrame(Number($("step").value)));
  $("play").addEventListener("click", play);
  state.key = strongestKey(0, state.query);
}

// ---- charts

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999) || power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(value);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const m of high / low < 30 ? [1, 2, 5] : [1]) {
      const value = m * 10 ** power;
      if (value >= low && value <= high) found.push(value);
    }
  return found;
}

const short = (value) => String(Number(value.toPrecision(3)));

/** Thin lines for the seeds, a strong one for their median. Returns the svg and its scale of x. */
function lineChart(host, panel, { height, label, xLabel = "", names = data.seeds }) {
  const left = 42, right = 8, top = 8, bottom = xLabel ? 36 : 20, width = Math.max(host.clientWidth, 160);
  const xs = panel.lines.flatMap((line) => line.x);
  const ys = panel.lines.flatMap((line) => line.seeds.flat()).filter((y) => y !== null);
  let [low, high] = panel.unit ? [0, 1] : extent(ys);
  if (low === high) high = low + 1;
  const [first, last] = panel.domain || extent(xs);
  const scale = panel.log ? Math.log : (value) => value;
  const x = (value) => left + ((value - first) / (last - first || 1)) * (width - left - right);
  const y = (value) => top + (1 - (scale(value) - scale(low)) / (scale(high) - scale(low))) * (height - top - bottom);
  const chart = svg("svg", { height, role: "img", "aria-label": label });
  for (const value of panel.log ? logTicks(low, high) : ticks(low, high, 4))
    chart.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  for (const value of ticks(first, last, Math.max(4, width / 110)))
    chart.append(svg("text", { x: x(value), y: height - bottom + 15, "text-anchor": "middle" }, short(value)));
  if (xLabel) chart.append(svg("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, xLabel));
  const path = (line, values) => {
    let d = "", open = false;
    values.forEach((value, i) => {
      if (value !== null) d += `${open ? "L" : "M"}${x(line.x[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      open = value !== null;
    });
    return d;
  };
  for (const line of panel.lines)
    if (line.seeds.length > 1)
      line.seeds.forEach((values, i) => chart.append(svg("path", { class: "thin", d: path(line, values), style: `stroke:${line.stroke}` },
        svg("title", {}, `seed ${names[i] ?? i}: ${line.label}`))));
  for (const line of panel.lines)
    chart.append(svg("path", { class: "median", d: path(line, line.median), style: `stroke:${line.stroke}`,
      "stroke-dasharray": line.dash }, svg("title", {}, `median: ${line.label}`)));
  host.replaceChildren(chart);
  return { chart, x, y, first, last, floor: height - bottom };
}

const dressed = (line) => ({ ...line, stroke: series(line.colour), dash: line.colour < 0 ? "" : dashes[line.colour % 4] });

function legend(lines) {
  return lines.map((line) => html("span", {},
    svg("svg", { "aria-hidden": "true" }, svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, "stroke-width": 2.5,
      style: `stroke:${line.stroke}`, "stroke-dasharray": line.dash })), line.label));
}

let cursors = [];
function setUpPanels(host, panels, height, timed) {
  const domain = timed && extent(panels.flatMap((panel) => panel.lines.flatMap((line) => line.x)));
  return panels.map((panel, i) => {
    panel = { ...panel, domain, lines: panel.lines.map(dressed) };
    const chart = html("div", { class: "chart" });
    const named = panel.lines.length > 1 || panel.lines[0].label !== panel.title;
    host.append(html("h3", {}, panel.title), html("p", { class: "legend" }, ...(named ? legend(panel.lines) : [])), chart);
    const xLabel = !timed || i === panels.length - 1 ? panel.x_label : "";
    return () => {
      const drawn = lineChart(chart, panel, { height, label: `${panel.title} over ${panel.x_label}`, xLabel });
      if (timed) addCursor(drawn);
    };
  });
}

function addCursor({ chart, x, first, last, floor }) {
  const line = svg("line", { class: "cursor", y1: 4, y2: floor });
  chart.append(line);
  cursors.push({ line, x });
  chart.style.cursor = "pointer";
  chart.addEventListener("click", (event) => {
    const box = chart.getBoundingClientRect(), [left, right] = [x(first), x(last)];
    const step = first + ((event.clientX - box.left - left) / (right - left)) * (last - first);
    showFrame(nearest(views[state.view].steps, step));
  });
}

function setUpProfiles() {
  const { offsets, profiles } = data.offsets;
  const looks = [{ label: "untrained", stroke: "var(--soft)", dash: "4 3" }, { label: "trained", stroke: "var(--c0)", dash: "" }];
  $("offsets-legend").append(...legend(looks));
  return heads.map((head, h) => {
    const chart = html("div");
    $("profiles").append(html("figure", {}, html("figcaption", {}, html("span", {}, html("b", {}, head.title), head.role ? ` ${head.role}` : "")), chart));
    const lines = looks.map((look, when) => ({ ...look, x: offsets, ...profiles[when][h] }));
    return () => {
      const drawn = lineChart(chart, { unit: true, lines }, { height: 140, label: `offset profile of ${head.title}` });
      const best = lines[1].median.reduce((top, value, i, all) => (value > all[top] ? i : top), 0);
      const value = lines[1].median[best], right = offsets[best] > (drawn.first + drawn.last) / 2;
      if (value >= 0.25)
        drawn.chart.append(svg("text", { x: drawn.x(offsets[best]) + (right ? -6 : 6), y: drawn.y(value) + 8,
          "text-anchor": right ? "end" : "start" }, `${offsets[best] > 0 ? "+" : ""}${offsets[best]}: ${value.toFixed(2)}`));
    };
  });
}

// ---- matrices and maps

const ruler = document.createElement("canvas").getContext("2d");
ruler.font = "11px system-ui, sans-serif"; // of the style sheet
const textWidth = (text) => ruler.measureText(text).width;
const widest = (texts) => Math.max(0, ...texts.map(textWidth));
const brief = (value) => (value === null ? "–" : value.toFixed(Math.abs(value) < 10 ? 2 : 1).replace(/^-(0\.0+)$/, "$1"));
const exact = (value) => (value === null ? "–" : value.toFixed(3).replace(/^-(0\.0+)$/, "$1"));

function setUpMatrices(host, matrices, tall, label) {
  return matrices.map((matrix) => {
    const chart = html("div", { class: "chart" });
    host.append(html("figure", {}, html("figcaption", {}, matrix.title), chart));
    return () => matrixChart(chart, matrix, tall, `${label} ${matrix.title}`);
  });
}

/** Cells `tall` pixels high, or square ones; what has no room in a cell stands in its tooltip. */
function matrixChart(host, { rows, columns, values, shades, seeds }, tall, label) {
  const left = Math.min(widest(rows) + 8, host.clientWidth * 0.35);
  const wide = Math.min((host.clientWidth - left) / columns.length, tall ? 92 : 440 / columns.length), high = tall || wide;
  const words = columns.map((name) => name.split(" ")), flat = widest(words.flat()) < wide - 4;
  const names = columns.map((name) => shorten(ruler, name, 130)), stride = flat ? 1 : Math.ceil(13 / wide);
  const top = flat ? 13 * Math.max(...words.map((w) => w.length)) + 5 : widest(names) + 8;
  const numbered = high >= 12 && widest(values.flat().map(brief)) < wide - 3;
  const chart = svg("svg", { height: top + rows.length * high + 2, role: "img", "aria-label": label });
  columns.forEach((name, c) => {
    const x = left + (c + 0.5) * wide;
    if (flat) words[c].forEach((word, i) => chart.append(svg("text", { x, y: top - 6 - 13 * (words[c].length - 1 - i), "text-anchor": "middle" }, word)));
    else if (c % stride === 0) chart.append(svg("text", { transform: `translate(${x + 4} ${top - 5}) rotate(-90)` }, names[c]));
  });
  const skip = Math.ceil(12 / high), cells = [];
  rows.forEach((name, r) => {
    if (r % skip === 0) chart.append(svg("text", { x: left - 6, y: top + (r + 0.5) * high + 4, "text-anchor": "end" }, shorten(ruler, name, left - 8)));
    columns.forEach((column, c) => {
      const value = values[r][c], shade = shades[r][c], [red, green, blue] = colour(shade ?? 0);
      const each = seeds.length > 1 ? seeds.map((of, i) => `\nseed ${data.seeds[i]}: ${exact(of[r][c])}`) : [];
      const cell = svg("rect", { class: high < 12 ? "flush" : "edged", x: left + c * wide, y: top + r * high, width: wide, height: high },
        svg("title", {}, `${name}, ${column}: ${exact(value)}${each.join("")}`));
      cell.style.fill = shade === null ? "var(--raised)" : `rgb(${red},${green},${blue})`;
      const ink = shade === null ? "var(--ink)" : 0.3 * red + 0.6 * green + 0.1 * blue > 140 ? "#111" : "#fff";
      chart.append(cell);
      cells.push(cell);
      if (numbered) chart.append(svg("text", { class: "cell", x: left + (c + 0.5) * wide, y: top + (r + 0.5) * high + 4,
        "text-anchor": "middle", style: `fill:${ink}` }, brief(value)));
    });
  });
  host.replaceChildren(chart, readable(chart, cells, columns.length));
}

/** A line that says what the tooltip of the mark says that is pointed at, touched or reached by arrow keys. */
function readable(chart, marks, across) {
  const line = html("p", { class: "told", role: "status" });
  let chosen = 0;
  const tell = (index) => {
    marks[chosen].classList.remove("marked");
    chosen = index;
    marks[chosen].classList.add("marked");
    line.textContent = marks[chosen].textContent.replaceAll("\n", " · ");
  };
  chart.setAttribute("tabindex", "0");
  chart.addEventListener("focus", () => tell(chosen));
  chart.addEventListener("pointerover", (event) => { if (marks.includes(event.target)) tell(marks.indexOf(event.target)); });
  chart.addEventListener("keydown", (event) => {
    const by = { ArrowUp: -across, ArrowDown: across, ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined) return;
    if (marks[chosen + by]) tell(chosen + by);
    event.preventDefault();
  });
  return line;
}

function setUpMaps() {
  $("roles-legend").append(...Object.entries(data.roles).map(([role, index]) => html("span", {},
    svg("svg", { "aria-hidden": "true" }, svg("circle", { cx: 20, cy: 5, r: 5, style: `fill:${series(index)}` })), role)));
  return data.maps.map((map) => {
    const host = html("div", { class: "chart" });
    $("maps").append(html("figure", {}, html("figcaption", {}, map.title), host));
    return () => mapChart(host, map);
  });
}

/** A dot per head on axes of one scale, and its name where it has room. */
function mapChart(host, { title, points, sides }) {
  const left = 34, side = Math.min(host.clientWidth - left - 2, 440), middle = side / 2, scale = middle / data.reach;
  const chart = svg("svg", { height: side + 22, role: "img", "aria-label": `map of the heads, ${title}` });
  const x = (value) => left + middle + value * scale, y = (value) => 2 + middle - value * scale;
  for (const value of ticks(-data.reach, data.reach, 4))
    chart.append(svg("line", { class: "grid", x1: left, x2: left + side, y1: y(value), y2: y(value) }),
      svg("line", { class: "grid", x1: x(value), x2: x(value), y1: 2, y2: 2 + side }),
      svg("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, short(value)),
      svg("text", { x: x(value), y: side + 16, "text-anchor": "middle" }, short(value)));
  chart.append(svg("rect", { class: "frame", x: left, y: 2, width: side, height: side }));
  const dots = points.map(([px, py], h) => {
    const { code, role } = heads[h], index = data.roles[role] ?? -1;
    return svg("circle", { cx: x(px), cy: y(py), r: 5, style: `fill:${series(index)}` },
      svg("title", {}, `${code}${role ? ` ${role}` : ""}: ${short(px)}, ${short(py)}`));
  });
  chart.append(...dots);
  points.forEach(([px, py], h) => {
    if (!sides[h]) return;
    const [right, up] = sides[h];
    chart.append(svg("text", { class: "cell ink", x: x(px) + 8 * right, y: y(py) + 4 - 12 * up,
      "text-anchor": right > 0 ? "start" : right < 0 ? "end" : "middle" }, heads[h].code));
  });
  host.replaceChildren(chart, readable(chart, dots, 1));
}

// ---- all of it

let charts = [];
function drawAll() {
  readColours();
  cursors = [];
  for (const chart of charts) chart();
  showFrame(state.frame);
}

for (const id of ["offsets", "ablation", "divergence"]) $(id).hidden = false;
$("statistics").hidden = data.statistics.length === 0;
$("training").hidden = data.panels.length === 0;
$("curves").hidden = data.curves.length === 0;
readColours();
setUpAttention();
charts = [
  ...setUpPanels($("panels"), data.panels, 150, true), ...setUpProfiles(),
  ...setUpMatrices($("statistics-matrices"), data.statistics, 20, "statistics of the heads,"),
  ...setUpMatrices($("ablation-matrices"), data.ablation, 26, "accuracy lost"),
  ...setUpMatrices($("divergence-matrices"), data.divergence, 0, "divergence of the heads,"),
  ...setUpMaps(),
  ...setUpPanels($("curve-panels"), data.curves, 230, false),
];
drawAll();
showView(0);
let waiting = 0;
window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(drawAll); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
