// Pictures of one head: queries down, keys across.

function shorten(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  const letters = [...text]; // half of a surrogate pair is not a letter
  let fits = 1, most = letters.length;
  while (fits < most) {
    const middle = Math.ceil((fits + most) / 2);
    if (pen.measureText(letters.slice(0, middle).join("") + "…").width > room) most = middle - 1;
    else fits = middle;
  }
  return letters.slice(0, fits).join("") + "…";
}

/** Where a large picture is in its canvas, in CSS pixels; `from` is [first query, first key, tokens along a side]. */
function layout(pen, width, frame, from) {
  pen.font = "bold 11px system-ui, sans-serif"; // as wide as a label gets
  const [q0, k0, size] = from, rows = Math.min(size, frame.T - q0), columns = Math.min(size, frame.S - k0);
  const shown = [...frame.view.queries.slice(q0, q0 + rows), ...frame.view.keys.slice(k0, k0 + columns)];
  const label = Math.min(extent(shown.slice(0, 2000).map((t) => pen.measureText(t).width))[1], 90) + 5;
  const edge = label + 18, across = width - edge - 2;
  const wide = columns > 8 * rows || rows > 8 * columns; // with square cells, a single query over many keys would be a hairline
  const cell = across / (wide ? columns : Math.max(columns, rows));
  const tall = wide ? clamp(across / 2 / rows, 0.2, 24) : cell;
  return { edge, label, cell, tall, top: 7, rows, columns, q0, k0, across: cell * columns, down: tall * rows };
}

/** Draws a head into a canvas as wide as its element; `canvas.place` says where. */
function drawLarge(canvas, frame, head) {
  const pen = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  const place = layout(pen, width, frame, windowOf(frame));
  const height = place.top + place.down + place.edge + 2;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  Object.assign(canvas, { place, frame, head });
  pen.scale(ratio, ratio);
  const cells = frame.cells(head, windowOf(frame));
  canvas.per = cells.per[0];
  pen.imageSmoothingEnabled = false;
  const { edge, top, cell, tall, across, down } = place;
  pen.save(); // the last block may be larger than the space left
  pen.beginPath();
  pen.rect(edge, top, across, down);
  pen.clip();
  pen.drawImage(tile(cells), edge, top, cells.columns * cells.per[1] * cell, cells.rows * cells.per[0] * tall);
  pen.restore();
  pen.strokeStyle = ink.rule;
  pen.strokeRect(edge, top, across, down);
  drawMarks(pen, place);
  drawLabels(pen, place, frame);
}

/** The largest weight on the scale of a picture's colours. */
const scaleOf = (values) => ($("own").value ? values.reduce((most, value) => Math.max(most, value), 0) || 1 : data.top);

/** The cells as an image of one pixel each; cells not kept have the colour of the page's raised parts. */
function tile({ values, rows, columns }) {
  const made = new OffscreenCanvas(columns, rows), pen = made.getContext("2d"), image = pen.createImageData(columns, rows);
  const none = [1, 3, 5].map((at) => parseInt(ink.raised.slice(at, at + 2), 16));
  const full = scaleOf(values);
  values.forEach((value, i) => image.data.set([...(value < 0 ? none : colour(value / full)), 255], i * 4));
  pen.putImageData(image, 0, 0);
  return made;
}

function drawMarks(pen, { edge, top, cell, tall, across, down, q0, k0, rows, columns }) {
  const query = state.query - q0, key = state.key - k0;
  pen.strokeStyle = ink.mark;
  const seen = query >= 0 && query < rows, met = key >= 0 && key < columns;
  pen.globalAlpha = state.pinned ? 0.9 : 0.45;
  if (seen) pen.strokeRect(edge, top + query * tall, across, tall);
  pen.globalAlpha = 0.45;
  if (met) pen.strokeRect(edge + key * cell, top, cell, down);
  pen.globalAlpha = 1;
  pen.lineWidth = 2;
  if (seen && met) pen.strokeRect(edge + key * cell - 1, top + query * tall - 1, cell + 2, tall + 2);
  pen.lineWidth = 1;
}

function drawLabels(pen, place, frame) {
  const { edge, top, cell, tall, label, q0, k0, rows, columns, across, down } = place;
  const write = (index, chosen, isKey) => {
    const size = clamp((isKey ? cell : tall) * 0.95, 9, 11), middle = (index + 0.5) * (isKey ? cell : tall);
    pen.save();
    if (isKey) pen.translate(edge + middle, top + down + 5);
    else pen.translate(edge - 4, top + middle);
    if (isKey) pen.rotate(-Math.PI / 2);
    pen.font = `${chosen ? "bold " : ""}${size}px system-ui, sans-serif`;
    pen.fillStyle = chosen ? ink.mark : ink.soft;
    pen.fillText(shorten(pen, (isKey ? frame.view.keys[k0 + index] : frame.view.queries[q0 + index]), label - 4), 0, 0);
    pen.restore();
  };
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const [chosen, count, size, isKey] of [[state.query - q0, rows, tall, false], [state.key - k0, columns, cell, true]]) {
    const stride = Math.ceil(clamp(size * 0.95, 9, 11) / size);
    for (let i = 0; i < count; i += stride) if (Math.abs(i - chosen) >= stride) write(i, false, isKey);
    if (chosen >= 0 && chosen < count) write(chosen, true, isKey);
  }
  pen.textAlign = "center";
  pen.font = "12px system-ui, sans-serif";
  pen.fillStyle = ink.ink;
  pen.fillText("Keys (Source)", edge + across / 2, top + down + edge - 6);
  pen.rotate(-Math.PI / 2);
  pen.fillText("Queries (Target)", -top - down / 2, 7);
}

/** The pair under a pointer in a large picture, or null if the shown text has none there, being shorter than the other. */
function pairAt(canvas, event) {
  const box = canvas.getBoundingClientRect(), { edge, top, cell, tall, q0, k0, rows, columns } = canvas.place;
  const key = Math.floor((event.clientX - box.left - edge) / cell), query = Math.floor((event.clientY - box.top - top) / tall);
  const inside = key >= 0 && key < columns && k0 + key < frame().S && query >= 0 && query < rows && q0 + query < frame().T;
  return inside ? [q0 + query, k0 + key] : null;
}

/** A thumbnail: at most 64 cells along a side, one pixel each; CSS scales it. */
function drawSmall(canvas, frame, head) {
  const cells = tile(frame.cells(head, [0, 0, Math.max(frame.T, frame.S)], 64));
  [canvas.width, canvas.height] = [cells.width, cells.height];
  canvas.getContext("2d").drawImage(cells, 0, 0);
}

// ---- files

function download(name, content) {
  const link = html("a", { href: URL.createObjectURL(content), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  return content;
}

const fileName = (kind) => `${heads[state.head].code}-${views[state.view].name.replace(/\W+/g, "-")}.${kind}`;

/** The large picture as vector graphics, in its colours: a rectangle for each visible weight. */
function asSvg(canvas) {
  const { frame, head, place } = canvas, { edge, top, cell, tall, q0, k0, rows, columns, across, down } = place;
  const cells = frame.cells(head, windowOf(frame)), wide = cells.per[1] * cell, high = cells.per[0] * tall, parts = [];
  const full = scaleOf(cells.values), partly = cells.values.some((value) => value < 0);
  cells.values.forEach((value, i) => {
    if (value < (partly ? 0 : full / 500)) return;
    const at = { x: edge + (i % cells.columns) * wide, y: top + Math.floor(i / cells.columns) * high };
    const size = { width: Math.min(wide, edge + across - at.x).toFixed(2), height: Math.min(high, top + down - at.y).toFixed(2) };
    parts.push(svg("rect", { x: at.x.toFixed(2), y: at.y.toFixed(2), ...size, fill: css(value / full) }));
  });
  const word = (text, attributes) => { const made = svg("text", { "font-family": "sans-serif", fill: ink.ink, ...attributes }); made.textContent = text; return made; };
  const size = (of) => clamp(of * 0.95, 7, 11), pen = canvas.getContext("2d");
  pen.font = "11px sans-serif";
  for (let i = 0, stride = Math.ceil(7 / tall); i < rows; i += stride)
    parts.push(word(shorten(pen, frame.view.queries[q0 + i], place.label), { x: edge - 4, y: top + (i + 0.5) * tall + 3, "text-anchor": "end", "font-size": size(tall) }));
  for (let i = 0, stride = Math.ceil(7 / cell); i < columns; i += stride)
    parts.push(word(shorten(pen, frame.view.keys[k0 + i], place.label), { "text-anchor": "end", "font-size": size(cell), transform: `translate(${edge + (i + 0.5) * cell + 3} ${top + down + 5}) rotate(-90)` }));
  const area = { x: edge, y: top, width: across, height: down };
  const ground = svg("rect", { ...area, fill: partly ? ink.raised : css(0) }), border = svg("rect", { ...area, fill: "none", stroke: ink.soft });
  const title = word(`${heads[head].title}: queries in rows, keys in columns`, { x: edge, y: top + down + edge + 8, "font-size": 12 });
  const box = `0 0 ${edge + across + 4} ${top + down + edge + 14}`;
  return new XMLSerializer().serializeToString(svg("svg", { viewBox: box, xmlns: "http://www.w3.org/2000/svg" }, svg("rect", { width: "100%", height: "100%", fill: ink.page }), ground, ...parts, border, title));
}

const saveSvg = (canvas) => download(fileName("svg"), new Blob([asSvg(canvas)], { type: "image/svg+xml" }));
function savePng(canvas) {
  const copy = html("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const pen = copy.getContext("2d");
  pen.fillStyle = ink.page;
  pen.fillRect(0, 0, copy.width, copy.height);
  pen.drawImage(canvas, 0, 0);
  return new Promise((done) => copy.toBlob((content) => done(download(fileName("png"), content))));
}
