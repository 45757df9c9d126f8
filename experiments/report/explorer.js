// The explorer: the heads' weights on each example, step by step, interactively.

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

/** The layout of a picture of this width, in CSS pixels. */
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
    const [right, down] = directions[event.key] || [];
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
  const { steps, first } = views[state.view];
  const step = steps[frame];
  $("now").textContent = frame === 0 && step === 0 ? `0 (${first})` : String(step);
  $("step").setAttribute("aria-valuetext", `training step ${step}`);
  showHeads();
  showScores();
  for (const { line, x } of cursors) { line.setAttribute("x1", x(step)); line.setAttribute("x2", x(step)); }
}

function showView(view) {
  const step = views[state.view].steps[state.frame]; // the new view's nearest, to compare views at one step
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
