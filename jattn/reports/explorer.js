// Handles what the reader does (choose a sequence, a head, a query; point, pin, zoom) and what the page then shows.

const state = { view: 0, frame: 0, beside: null, head: 0, query: 0, key: 0, pinned: false, window: null };
const pictures = []; // the large ones: {canvas, caption, frame()}
const view = () => views[state.view];
const frame = () => view().frames[state.frame];
const beside = () => (state.beside ? views[state.beside[0]].frames[state.beside[1]] : null);
/** [first query, first key, tokens along a side]; all of them unless the reader has zoomed. */
const windowOf = (frame) => (state.window && frame.view === view() ? state.window : [0, 0, Math.max(frame.T, frame.S)]);

// ---- showing

let waiting = 0;
function soon() {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(showPoint);
}

/** Updates everything that depends on the query and the key. */
function showPoint() {
  for (const { canvas, caption, frame } of pictures) {
    const of = frame();
    if (!of || !of.loaded) continue;
    drawLarge(canvas, of, state.head);
    caption.children[1].textContent = weightText(of, state.head, state.query, state.key);
  }
  $("grid").style.setProperty("--at", `${((state.query + 0.5) / frame().T) * 100}%`);
  $("head").textContent = heads[state.head].title;
  $("query").textContent = view().asked[state.query];
  $("key").textContent = view().texts[state.key];
  $("weight").textContent = weightText(frame(), state.head, state.query, state.key);
  $("pin").setAttribute("aria-pressed", state.pinned);
  showText();
  showLooks();
  remember();
}

function weightText(of, head, query, key) {
  if (query >= of.T || key >= of.S) return "–";
  const weight = of.at(head, query, key), digits = of.bits > 12 ? 4 : of.bits > 8 ? 3 : 2;
  if (weight !== null) return weight.toFixed(digits);
  return `not kept: at most ${atMost(of.row(head, query).bound)}`;
}

/** Updates everything that depends on the head. */
function showHead() {
  const { title } = heads[state.head], role = rolesOf(frame())[state.head] || "";
  for (const { canvas, caption, frame: at } of pictures) {
    const of = at();
    if (!of) continue;
    caption.children[0].textContent = of.heads ? `${title} ↔ ${of.code(state.head)}` : title;
    caption.children[2].textContent = pictures.length > 1 && state.beside ? of.title : role;
    canvas.setAttribute("aria-label", `${title}${role ? ", " + role : ""}: attention weights, queries in rows, keys in columns`);
  }
  [...$("grid").children].forEach((button, head) => {
    button.setAttribute("aria-pressed", head === state.head);
    button.tabIndex = head === state.head ? 0 : -1;
  });
  reveal($("grid").children[state.head], $("grid").parentNode);
  showNumbers();
  showPoint();
}

/** Updates everything that depends on the frame: loads it and the one next to it; until then, the page is unchanged. */
let asked = 0;
async function showFrame(index, at = state.view, second = state.beside) {
  const own = ++asked, next = clamp(index, 0, views[at].frames.length - 1);
  await Promise.all([views[at].frames[next].load(), second && views[second[0]].frames[second[1]].load()]);
  if (own !== asked) return; // the reader has moved on
  if (at !== state.view) { state.window = null; showZoom(); }
  [state.view, state.frame, state.beside] = [at, next, second];
  const { timed, steps } = view(), step = steps[state.frame];
  $("time").hidden = $("play").hidden = !timed;
  if (timed) {
    $("step").max = view().frames.length - 1;
    $("step").value = state.frame;
    $("now").textContent = frame().title;
    $("step").setAttribute("aria-valuetext", `training step ${step}`);
  }
  $("view").value = String(options.findIndex(([v, f]) => v === state.view && (timed || f === state.frame)));
  $("beside").value = state.beside ? state.beside.join(",") : "";
  $("second").hidden = !state.beside;
  document.querySelectorAll(".explorer").forEach((part) => part.classList.toggle("double", Boolean(state.beside)));
  state.query = clamp(state.query, 0, frame().T - 1);
  state.key = clamp(state.key, 0, frame().S - 1);
  [...$("grid").children].forEach((button, head) => drawSmall(button.querySelector("canvas"), frame(), head));
  $("kept").textContent = frame().note || "";
  $("top").textContent = $("own").value ? "the picture's largest" : data.top.toPrecision(3);
  for (const listen of onFrame) listen(step);
  showHead();
}
const onFrame = []; // other parts of the page that follow the step

function showView(index, at) {
  const step = view().steps[state.frame], next = views[index]; // the new view's nearest, to compare views at one step
  return showFrame(at !== undefined ? at : next.timed ? nearest(next.steps, step === null ? Infinity : step) : 0, index);
}

function chooseHead(head) {
  state.head = clamp(head, 0, heads.length - 1);
  showHead();
}

// ---- zoom

/** Halves or doubles the window around the chosen pair; `factor` 0 shows all. */
function zoom(factor) {
  const of = frame(), whole = Math.max(of.T, of.S), now = state.window ? state.window[2] : whole;
  const size = factor ? clamp(Math.round(now * factor), Math.min(8, whole), whole) : whole;
  const start = (at, length) => clamp(at - Math.floor(size / 2), 0, Math.max(length - size, 0));
  state.window = size >= whole ? null : [start(state.query, of.T), start(state.key, of.S), size];
  showZoom();
  showPoint();
}

function showZoom() {
  $("zoomed").textContent = state.window ? `${state.window[2]} of ${Math.max(frame().T, frame().S)} tokens` : "all tokens";
}

/** Moves the window, if needed, so that the chosen pair is in it. */
function follow() {
  if (!state.window) return;
  const [q0, k0, size] = state.window, inside = (at, first, length) => clamp(clamp(first, at - size + 1, at), 0, Math.max(length - size, 0));
  state.window = [inside(state.query, q0, frame().T), inside(state.key, k0, frame().S), size];
}

// ---- pictures

function addLarge(figure, frame) {
  const canvas = html("canvas", { tabindex: "0", role: "img", "aria-describedby": "readout" });
  const caption = html("figcaption", {}, html("b"), html("span", { class: "number" }), html("span", { class: "role" }));
  figure.append(caption, canvas);
  const point = (event) => {
    const pair = canvas.place && pairAt(canvas, event);
    if (!pair || (state.pinned && event.type === "pointermove")) {
      if (pair) { state.key = pair[1]; soon(); }
      return;
    }
    [state.query, state.key] = pair;
    soon();
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("click", (event) => { // a click pins the query under it, or releases it
    const pair = pairAt(canvas, event);
    if (!pair) return;
    state.pinned = !state.pinned || pair[0] !== state.query;
    [state.query, state.key] = pair;
    soon();
  });
  canvas.addEventListener("dblclick", (event) => { const pair = pairAt(canvas, event); if (pair) { [state.query, state.key] = pair; zoom(0.25); } });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.5 : 2);
  }, { passive: false });
  canvas.addEventListener("keydown", keys);
  pictures.push({ canvas, caption, frame });
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return; // browser shortcuts
  const [right, down] = directions[event.key] || [], stride = event.shiftKey ? 10 : 1;
  const others = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => zoom(0), "[": () => chooseHead(state.head - 1),
    "]": () => chooseHead(state.head + 1), ",": () => change(-1), ".": () => change(1),
    Enter: () => { state.pinned = !state.pinned; showPoint(); } };
  others[" "] = others.Enter;
  if (down !== undefined) {
    state.query = clamp(state.query + down * stride, 0, frame().T - 1);
    state.key = clamp(state.key + right * stride, 0, frame().S - 1);
    follow();
    showPoint();
  } else if (others[event.key]) others[event.key]();
  else return;
  event.preventDefault();
}

/** The next entry of the list of sequences, or the one before. */
function change(by) {
  const next = clamp(Number($("view").value) + by, 0, options.length - 1);
  return showView(...options[next]);
}

function addSmall(head) {
  const { title, code } = heads[head], label = title.includes(code) ? title : `${code}: ${title}`; // voice commands use the visible label
  const button = html("button", { type: "button", class: "small", "aria-label": label, title },
    html("canvas", { "aria-hidden": "true" }), html("span", {}, code));
  button.addEventListener("click", () => chooseHead(head));
  button.addEventListener("keydown", (event) => {
    const [right, down] = directions[event.key] || [];
    if (right === undefined) return;
    const next = clamp(head + right + down * across, 0, heads.length - 1);
    chooseHead(next);
    $("grid").children[next].focus();
    event.preventDefault();
  });
  $("grid").append(button);
}

// ---- the selection in the address

let remembering = 0;
function remember() {
  clearTimeout(remembering);
  remembering = setTimeout(() => {
    const { view, frame, beside, head, query, key, pinned, window: shown } = state;
    const parts = { view, frame, head, query, key, ...(pinned ? { pin: 1 } : {}), ...(shown ? { window: shown } : {}), ...(beside ? { beside } : {}) };
    try { // a frame of a notebook has no address of its own
      history.replaceState(null, "", "#" + Object.entries(parts).map(([name, value]) => `${name}=${value}`).join("&"));
    } catch { /* then the selection is not remembered */ }
  }, 150);
}

function recall() {
  const parts = Object.fromEntries(location.hash.slice(1).split("&").map((part) => part.split("=")).filter(([name]) => name));
  const number = (name, below) => { const value = Number(parts[name]); return Number.isInteger(value) && value >= 0 && value < below ? value : null; };
  const numbers = (name) => (parts[name] ? parts[name].split(",").map(Number) : null);
  if (number("view", views.length) !== null) state.view = number("view", views.length);
  state.frame = number("frame", view().frames.length) ?? (view().timed ? view().frames.length - 1 : 0);
  state.head = number("head", heads.length) ?? 0;
  state.query = number("query", frame().T) ?? frame().T - 1;
  state.key = number("key", frame().S);
  state.pinned = parts.pin === "1";
  const [v, f] = numbers("beside") || [];
  state.beside = views[v] && views[v].frames[f] ? [v, f] : null;
  const shown = numbers("window");
  const { T, S } = frame(), most = [T - 1, S - 1, Math.max(T, S)]; // a link may point to another version of this page
  state.window = shown && shown.length === 3 && shown.every((n, i) => Number.isInteger(n) && n >= 0 && n <= most[i]) && shown[2] > 0 ? shown : null;
}

// ---- setting up

const options = []; // [view, frame] of each entry in the list of sequences; one entry per view with steps
let across = 1; // heads in a row of the grid

function fillLists() {
  views.forEach((of, v) => {
    if (of.timed || of.frames.length === 1) options.push([v, undefined]);
    else of.frames.forEach((_, f) => options.push([v, f]));
  });
  const name = ([v, f]) => (f === undefined ? views[v].name : `${views[v].name} · ${views[v].frames[f].title}`);
  $("view").append(...options.map((option, i) => html("option", { value: i }, name(option))));
  options.forEach((option, i) => { if (option[1] === undefined && !views[option[0]].timed) options[i] = [option[0], 0]; });
  const second = views.flatMap((of, v) => of.frames.map((one, f) => [`${v},${f}`, of.frames.length > 1 ? `${of.name} · ${one.title}` : of.name]));
  $("beside").append(html("option", { value: "" }, "nothing"), ...second.map(([value, text]) => html("option", { value }, text)));
  $("beside-label").hidden = second.length < 2;
}

async function setUpExplorer() {
  const counts = Array.from({ length: heads[heads.length - 1].layer + 1 }, (_, l) => heads.filter(({ layer }) => layer === l).length);
  across = Math.max(...counts);
  const even = counts.every((count) => count === across);
  if (counts.length === 1 || !even) across = heads.length <= 4 ? Math.min(heads.length, 2) : Math.min(heads.length, 8);
  $("grid").style.setProperty("--across", across);
  fillLists();
  recall();
  addLarge($("large"), frame);
  addLarge($("second"), beside);
  heads.forEach((_, head) => addSmall(head));
  $("view").addEventListener("change", () => showView(...options[Number($("view").value)]));
  $("beside").addEventListener("change", () => showFrame(state.frame, state.view, $("beside").value ? $("beside").value.split(",").map(Number) : null));
  $("step").addEventListener("input", () => showFrame(Number($("step").value)));
  $("play").addEventListener("click", play);
  $("zoom-in").addEventListener("click", () => zoom(0.5));
  $("zoom-out").addEventListener("click", () => zoom(2));
  $("whole").addEventListener("click", () => zoom(0));
  $("pin").addEventListener("click", () => { state.pinned = !state.pinned; showPoint(); });
  $("svg").addEventListener("click", () => saveSvg(pictures[0].canvas));
  $("png").addEventListener("click", () => savePng(pictures[0].canvas));
  $("of").addEventListener("change", showPoint);
  $("own").addEventListener("change", () => showFrame(state.frame));
  setUpNumbers();
  await Promise.all([frame().load(), beside() && beside().load()]);
  if (state.key === null) state.key = (frame().row(state.head, state.query).pairs[0] || [0])[0];
  showZoom();
  await showFrame(state.frame);
  window.addEventListener("hashchange", () => location.reload());
}

let playing = 0;
function play() {
  const stop = () => { clearInterval(playing); playing = 0; $("play").textContent = "▶ play"; };
  if (playing) return stop();
  const last = view().frames.length - 1;
  if (state.frame === last) showFrame(0);
  $("play").textContent = "■ stop";
  playing = setInterval(() => { state.frame < last ? showFrame(state.frame + 1) : stop(); }, 400);
}
