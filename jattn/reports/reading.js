// The text coloured by what the chosen query sees, where every head looks, and the heads' numbers.

const rolesOf = (of) => (data.numbers[of.numbers] || {}).roles || [];
const valuesOf = (of) => (data.numbers[of.numbers] || { values: [] }).values;

// ---- text

const WORDS = 4096; // of a long text, the page holds at most three times as many, around the query
let text = null; // {view, from, spans, asked}: what is on the page; spans by key, asked by query, if that is another text
let coloured = [];
/** Adds a space between tokens that have none of their own; a new line counts as one. */
function apart(spans) {
  const spaced = spans.some((span) => span.textContent.startsWith(" "));
  return spans.flatMap((span) => [
    ...(spaced || span.textContent.startsWith("##") ? [] : [" "]), span, ...(span.textContent.endsWith("↵") ? ["\n"] : [])]);
}

function showText() {
  const of = view(), from = Math.max(Math.floor(state.query / WORDS) - 1, 0) * WORDS;
  if (!text || text.view !== of || text.from !== from) {
    const words = (list, which, chosen) => list.slice(from, from + 3 * WORDS).map((token, j) => {
      const i = from + j, span = html("span", { class: "token" }, token.trim() ? token : "␣");
      if (chosen) { span.addEventListener("click", () => { state.query = i; state.pinned = true; follow(); showPoint(); }); }
      span.addEventListener("pointerenter", () => { if (which === "key") { state.key = i; soon(); } });
      return span;
    });
    text = { view: of, from, spans: words(of.keys, "key", !of.cross), asked: of.cross ? words(of.queries, "query", true) : null };
    $("text").replaceChildren(...apart(text.spans));
    $("asked").hidden = !of.cross;
    $("asked").replaceChildren(...apart(text.asked || []));
    coloured = [];
  }
  for (const span of coloured) { span.removeAttribute("style"); span.removeAttribute("title"); span.classList.remove("chosen"); }
  coloured = [];
  for (const [key, weight] of seen()) {
    const share = weight / data.top, span = text.spans[key - from];
    if (!span) continue;
    span.style.cssText = `background:${css(share)};color:${onColour(share)}`;
    span.title = `${view().texts[key]}: ${weight.toFixed(4)}`;
    coloured.push(span);
  }
  const chosen = (text.asked || text.spans)[state.query - from];
  chosen.classList.add("chosen");
  coloured.push(chosen);
  reveal(chosen, chosen.parentNode);
  $("text-title").textContent = `What ${view().asked[state.query]} sees`;
}

/** The kept [key, weight] pairs of the chosen query, for the chosen head or averaged over all heads. */
function seen() {
  const of = frame();
  if ($("of").value === "head") return of.row(state.head, state.query).pairs;
  const sums = new Map();
  heads.forEach((_, head) => { for (const [key, weight] of of.row(head, state.query).pairs) sums.set(key, (sums.get(key) || 0) + weight / heads.length); });
  return [...sums];
}

// ---- where the query looks, head by head

const LOOKS = 3; // keys per head
let rows = [];
function showLooks() {
  const of = frame(), shown = [state.beside ? beside() : null].filter((one) => one && one.T > state.query);
  if (!rows.length) {
    rows = heads.map(({ code, title }, head) => {
      const button = html("button", { type: "button", title }, code), cells = [of, of].map(() => html("td"));
      button.addEventListener("click", () => chooseHead(head));
      const row = html("tr", {}, html("th", { scope: "row" }, button), ...cells);
      return { row, cells };
    });
    $("looks").replaceChildren(...rows.map(({ row }) => row));
  }
  $("looks-title").textContent = `Where ${view().asked[state.query]} looks, head by head`;
  rows.forEach(({ row, cells }, head) => {
    row.classList.toggle("chosen", head === state.head);
    [of, ...shown].forEach((one, i) => cells[i].replaceChildren(...one.row(head, state.query).pairs.slice(0, LOOKS).map(([key, weight]) => {
      const chip = html("span", { class: "look", title: one.view.texts[key] }, one.view.keys[key].trim() || "␣", html("b", {}, weight.toFixed(2)));
      chip.style.setProperty("--w", `${(weight * 100).toFixed(0)}%`);
      return chip;
    })));
    cells[1].hidden = !shown.length;
  });
}

// ---- numbers

const ends = (name, values) => { // of the colour scale: 0 to 1, or the column's own
  const [low, high] = extent(values.filter((v) => v !== null));
  return low >= 0 && high <= 1 ? [0, 1] : [low, high];
};
const share = (value, [low, high]) => (value === null ? 0 : high > low ? (value - low) / (high - low) : 0);
let table = null;

/** A click on a column's name sorts the table by it, and another click the other way round. */
function setUpSorting(table) {
  const names = [...table.querySelectorAll("thead th")], body = table.querySelector("tbody");
  const value = (row, at) => {
    const text = row.cells[at].dataset.value ?? row.cells[at].textContent, number = parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };
  names.filter((name) => !name.classList.contains("meter")).forEach((name, at) => {
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

function setUpNumbers() {
  $("numbers").hidden = !data.columns.length;
  if (!data.columns.length) return;
  const roles = data.numbers.some((one) => one.roles.some(Boolean));
  const names = ["head", ...(roles ? ["role"] : []), ...data.columns];
  table = { roles, rows: heads.map(({ title, layer }, head) => {
    const row = html("tr", {}, html("th", { scope: "row", "data-value": head }, html("button", { type: "button" }, title)), ...names.slice(1).map(() => html("td")));
    row.addEventListener("click", () => chooseHead(head));
    return row;
  }) };
  $("heads-numbers").append(html("thead", {}, html("tr", {}, ...names.map((name) => html("th", { scope: "col" }, name)))), html("tbody", {}, ...table.rows));
  setUpSorting($("heads-numbers"));
  $("by").append(...data.columns.map((name, i) => html("option", { value: i }, name)));
  $("by").addEventListener("change", showNumbers);
  $("head-map").style.setProperty("--across", across);
  $("head-map").append(...heads.map(({ code }, head) => {
    const cell = html("button", { type: "button", tabindex: "-1" }, code.replace(/^L\d+/, ""));
    cell.addEventListener("click", () => chooseHead(head));
    return cell;
  }));
}

function showNumbers() {
  if (!table) return;
  const values = valuesOf(frame()), other = state.beside ? valuesOf(beside()) : null, roles = rolesOf(frame()), by = Number($("by").value);
  const scale = values.map((column, i) => ends(data.columns[i], other ? [...column, ...other[i]] : column));
  table.rows.forEach((row, head) => {
    const cells = [...row.cells].slice(1);
    row.classList.toggle("chosen", head === state.head);
    if (table.roles) cells.shift().textContent = roles[head] || "";
    cells.forEach((cell, i) => {
      const value = values[i][head], at = share(value, scale[i]);
      cell.dataset.value = value ?? -Infinity;
      cell.className = "number";
      cell.style.cssText = value === null ? "" : `background:${css(at)};color:${onColour(at)}`;
      cell.textContent = figures(value) + (other ? ` → ${figures(other[i][head])}` : "");
    });
  });
  [...$("head-map").children].forEach((cell, head) => {
    const value = values[by][head], at = share(value, scale[by]);
    cell.style.cssText = `background:${css(at)};color:${onColour(at)}`;
    cell.title = `${heads[head].title}, ${data.columns[by]}: ${figures(value)}`;
    cell.setAttribute("aria-label", `${cell.textContent}: ${cell.title}`);
    cell.setAttribute("aria-pressed", head === state.head);
  });
}

// ---- the page

/** Runs after all scripts are loaded. */
async function start() {
  readColours();
  for (const set of settingUp) set();
  await setUpExplorer();
  const again = () => { readColours(); showFrame(state.frame); };
  let waiting = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(showPoint); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  document.documentElement.dataset.ready = "1";
}
const settingUp = []; // what a page adds
