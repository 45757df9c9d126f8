// Charts of the page: lines, matrices and maps, which show the numbers under the pointer.

// ---- lines

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

/** Thin lines for seeds, a strong line for their median. Returns the svg and its x scale. */
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

/** Cells `tall` pixels high, or square; text that does not fit in a cell is in its tooltip. */
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

/** A line with the tooltip of the mark that is pointed at, touched or reached by arrow keys. */
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

/** A dot per head on axes of one scale, with its name where it fits. */
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
