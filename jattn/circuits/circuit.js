// ---- the circuit

const circuit = JSON.parse($("circuit-data").textContent);
const KINDS = ["query", "key", "value", "mlp", "logits"];
const hidden = new Set();
let lines = []; // the elements of the shown edges

const kindOf = (reader) => reader.split(" ")[0];
const colourOf = (kind) => `var(--c${KINDS.indexOf(kind)})`;
const svgElement = (name, attributes, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};

const WIDE = 900, STEP = 30;
const tall = (2 * circuit.layers + 3) * STEP;
const across_ = (place) => 60 + ((place + 0.5) * (WIDE - 120)) / (circuit.heads + 1);
const up = (row) => tall - (row + 1) * STEP; // the embedding is row 0, attention 2l + 1, MLP 2l + 2, the logits last

/** The position [x, y] of a writer or reader. A key or value is centred among the heads that share it. */
function place(name) {
  const [kind, where] = name.split(" ");
  if (kind === "embedding") return [WIDE / 2, up(0)];
  if (kind === "logits") return [WIDE / 2, up(2 * circuit.layers + 1)];
  if (kind === "mlp") return [across_(circuit.heads), up(2 * Number(where) + 2)];
  const [layer, at] = where.split(".").map(Number);
  const group = kind === "key" || kind === "value" ? circuit.heads / circuit.kv_heads : 1;
  return [across_(at * group + (group - 1) / 2), up(2 * layer + 1) + (group > 1 ? 6 : 0)];
}

/** The nodes that a reader belongs to, as writer names. */
function nodesOf(reader) {
  const [kind, where] = reader.split(" ");
  if (kind === "mlp" || kind === "logits") return [reader];
  const [layer, at] = where.split(".").map(Number);
  if (kind === "query") return [`head ${layer}.${at}`];
  const group = circuit.heads / circuit.kv_heads;
  return Array.from({ length: group }, (_, i) => `head ${layer}.${at * group + i}`);
}

const shownEdges = () => circuit.edges.slice(0, Number($("circuit-size").value)).filter(([, reader]) => !hidden.has(kindOf(reader)));
const sayEdge = (edge) => `${edge[0]} → ${edge[1]}: ${figures(edge[2])} (edge ${circuit.edges.indexOf(edge) + 1} of ${circuit.total})`;

function drawCircuit() {
  const edges = shownEdges(), largest = Math.max(...circuit.edges.map(([, , score]) => Math.abs(score)), 1e-30);
  const picture = svgElement("svg", { viewBox: `0 0 ${WIDE} ${tall}`, role: "img", "aria-label": `a circuit of ${edges.length} edges` });
  const inside = new Set(["embedding", "logits"]);
  edges.forEach(([writer, reader]) => { inside.add(writer); nodesOf(reader).forEach((node) => inside.add(node)); });
  lines = edges.map((edge) => {
    const [x0, y0] = place(edge[0]), [x1, y1] = place(edge[1]), bend = Math.max((y0 - y1) / 2, 12);
    const line = svgElement("path", {
      d: `M${x0} ${y0 - 8}C${x0} ${y0 - 8 - bend} ${x1} ${y1 + 8 + bend} ${x1} ${y1 + 8}`, class: "edge",
      stroke: colourOf(kindOf(edge[1])), "stroke-width": (0.6 + 6 * Math.sqrt(Math.abs(edge[2]) / largest)).toFixed(2),
      "stroke-dasharray": edge[2] > 0 ? "5 4" : "none",
    }, svgElement("title", {}, sayEdge(edge)));
    line.addEventListener("pointerenter", () => { $("circuit-readout").textContent = sayEdge(edge); });
    picture.append(line);
    return line;
  });
  for (const reader of new Set(edges.map(([, name]) => name))) { // a key or value that heads share
    const [x, y] = place(reader), nodes = nodesOf(reader);
    if (nodes.length > 1) nodes.forEach((node) => picture.append(svgElement("path", { d: `M${x} ${y + 8}L${place(node)[0]} ${place(node)[1]}`, stroke: "var(--soft)", "stroke-width": 0.7 })));
  }
  for (let layer = 0; layer < circuit.layers; layer++) {
    picture.append(svgElement("text", { x: 8, y: up(2 * layer + 1) + 4, class: "soft" }, `layer ${layer}`));
    for (let head = 0; head < circuit.heads; head++) addNode(picture, `head ${layer}.${head}`, inside, layer * circuit.heads + head);
    addNode(picture, `mlp ${layer}`, inside);
  }
  addNode(picture, "embedding", inside);
  addNode(picture, "logits", inside);
  $("circuit-picture").replaceChildren(picture);
  $("circuit-count").textContent = edges.length;
}

function addNode(picture, name, inside, head) {
  const [x, y] = place(name), isIn = inside.has(name), wide = name.startsWith("head") ? 0 : name.length * 3.2;
  const node = svgElement("rect", { x: x - 8 - wide, y: y - 8, width: 16 + 2 * wide, height: 16, rx: 8, class: isIn ? "node in" : "node" });
  picture.append(node);
  if (!isIn) return;
  const role = head === undefined ? "" : data.numbers[0].roles[head];
  node.append(svgElement("title", {}, role ? `${name}: ${role}` : name));
  const number = name.startsWith("head") ? name.split(".")[1] : name;
  picture.append(svgElement("text", { x, y: y + 4, "text-anchor": "middle" }, number));
  const say = () => {
    const mine = shownEdges().map((edge, i) => [edge, i]).filter(([[writer, reader]]) => writer === name || nodesOf(reader).includes(name));
    $("circuit-readout").textContent = [role ? `${name} (${role})` : name, ...mine.slice(0, 8).map(([edge]) => `${edge[0]} → ${edge[1]} ${figures(edge[2])}`)].join("; ");
    lines.forEach((line, i) => line.classList.toggle("on", mine.some(([, at]) => at === i)));
  };
  node.addEventListener("pointerenter", say);
  node.addEventListener("pointerleave", () => lines.forEach((line) => line.classList.remove("on")));
  if (head === undefined || head >= heads.length) return;
  node.setAttribute("tabindex", "0");
  node.setAttribute("role", "button");
  node.setAttribute("aria-label", `${name}${role ? `, ${role}` : ""}: show what it looks at`);
  const choose = () => { chooseHead(head); $("attention").scrollIntoView(); };
  node.addEventListener("click", choose);
  node.addEventListener("focus", say);
  node.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } });
}

/** The kept share against the number of edges, on a logarithmic scale, with the slider's position. */
function drawKept() {
  if (!circuit.kept) return;
  const { sizes, kept, low, high, random } = circuit.kept, [width, height] = [300, 220];
  const drawn = sizes.map((size, i) => i).filter((i) => sizes[i] > 0);
  const logs = drawn.map((i) => Math.log(sizes[i])), span = logs[logs.length - 1] - logs[0] || 1;
  const x = (size) => 34 + ((Math.log(Math.max(size, 1)) - logs[0]) / span) * (width - 44);
  const top = Math.max(1.1, ...drawn.map((i) => kept[i])), bottom = Math.min(0, ...drawn.map((i) => Math.min(kept[i], random[i])));
  const y = (share) => 10 + ((top - Math.min(Math.max(share, bottom), top)) / (top - bottom)) * (height - 40);
  const path = (values) => "M" + drawn.map((i) => `${x(sizes[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`).join("L");
  const picture = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "share of the metric that is kept, by number of edges" });
  const band = path(low) + "L" + drawn.slice().reverse().map((i) => `${x(sizes[i]).toFixed(1)} ${y(high[i]).toFixed(1)}`).join("L") + "Z";
  picture.append(svgElement("path", { d: band, fill: "var(--c0)", opacity: 0.2 }));
  picture.append(svgElement("path", { d: path(kept), fill: "none", stroke: "var(--c0)", "stroke-width": 2 }));
  picture.append(svgElement("path", { d: path(random), fill: "none", stroke: "var(--soft)", "stroke-dasharray": "4 4" }));
  for (const share of [0, 1]) {
    picture.append(svgElement("path", { d: `M34 ${y(share)}H${width - 10}`, stroke: "var(--rule)" }));
    picture.append(svgElement("text", { x: 28, y: y(share) + 4, "text-anchor": "end" }, String(share)));
  }
  for (const i of [drawn[0], drawn[drawn.length - 1]]) {
    picture.append(svgElement("text", { x: x(sizes[i]), y: height - 8, "text-anchor": i === drawn[0] ? "start" : "end" }, String(sizes[i])));
  }
  const now = Number($("circuit-size").value);
  if (Math.log(now) >= logs[0]) picture.append(svgElement("path", { d: `M${x(now)} 10V${height - 30}`, stroke: "var(--mark)" }));
  const caption = $("circuit-kept").querySelector("figcaption");
  $("circuit-kept").replaceChildren(picture, caption);
  $("circuit-kept").hidden = false;
}

function saveCircuit() {
  const picture = $("circuit-picture").querySelector("svg").cloneNode(true);
  const style = getComputedStyle(document.documentElement), colours = ["--c0", "--c1", "--c2", "--c3", "--c4", "--ink", "--soft", "--rule", "--page", "--raised"];
  const values = colours.map((name) => `${name}:${style.getPropertyValue(name)}`).join(";");
  const rules = [...document.styleSheets[0].cssRules].map((rule) => rule.cssText).filter((text) => text.startsWith(".circuit .") || text.startsWith(".circuit text"));
  picture.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  picture.setAttribute("class", "circuit");
  picture.prepend(svgElement("style", {}, `.circuit{${values}} ${rules.join(" ")}`));
  const link = html("a", { href: URL.createObjectURL(new Blob([picture.outerHTML], { type: "image/svg+xml" })), download: "circuit.svg" });
  link.click();
  URL.revokeObjectURL(link.href);
}

settingUp.push(() => {
  const size = $("circuit-size");
  size.max = circuit.edges.length;
  size.value = Math.min(circuit.edges.length, circuit.shown);
  for (const kind of KINDS) {
    const mark = html("span", {});
    mark.style.background = colourOf(kind);
    const button = html("button", { type: "button", "aria-pressed": "true" }, mark, kind);
    button.addEventListener("click", () => {
      hidden.has(kind) ? hidden.delete(kind) : hidden.add(kind);
      button.setAttribute("aria-pressed", !hidden.has(kind));
      drawCircuit();
    });
    $("circuit-kinds").append(button);
  }
  size.addEventListener("input", () => { drawCircuit(); drawKept(); });
  $("circuit-svg").addEventListener("click", saveCircuit);
  drawCircuit();
  drawKept();
});
